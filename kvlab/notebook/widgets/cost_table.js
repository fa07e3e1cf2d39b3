// The cost table over the steps of a run. Every figure comes from the functions of costs.py,
// which stand above this text as JavaScript.

const MAX_PROMPT = 131072;
const MAX_DECODE = 32768;
const RUNS = { "Short prompt": [16, 48], "Running example": [2048, 512] };
const COST_STYLE = `
.kvc-large { display: grid; grid-template-columns: 1fr 1.15fr 0.8fr; gap: 0.6rem; margin: 0 0 0.5rem; }
.kvc-large div { min-width: 0; font-size: clamp(0.7rem, 3vw, 0.85rem); white-space: nowrap; color: var(--kv-muted); }
.kvc-large strong { display: block; font-size: clamp(0.9rem, 3.8vw, 1.7rem); line-height: 1.2; white-space: nowrap; font-variant-numeric: tabular-nums; color: var(--kv-fg); }
.kvc-bars { margin: 0.5rem 0; overflow: hidden; }
.kvc-bars div { height: 1.1rem; min-width: 1px; border-radius: 2px; margin: 0 0 0.2rem; }
`;

/** The table after step t, as text: the same rows as CostTable.rows in Python. */
function costRows(spec, P, p, t) {
  const s = p + t;
  const read = cached_step_bytes(spec, P, s);
  const step = [uncached_step_flops(spec, P, s), cached_step_flops(spec, P, s)];
  const projections = [uncached_run_projection_flops(P, p, t), cached_run_projection_flops(P, t)];
  const attention = [uncached_run_attention_flops(spec, p, t), cached_run_attention_flops(spec, p, t)];
  const all = projections.map((value, i) => value + attention[i]);
  const row = (name, [a, b]) => [name, format.flop(a), format.flop(b), format.number(a / b, 1)];
  const [a, b] = step.map((flops) => intensity(flops, read));
  const rows = [
    row("this step", step),
    row("projections so far", projections),
    row("attention so far", attention),
    row("all so far", all),
    ["FLOP per byte, this step", format.number(a), format.number(b), format.number(a / b, 1)],
    ["logit rows thrown away, this step", format.integer(logit_rows_discarded(s)), "0", "–"],
    ["logit rows thrown away so far", format.integer(sum_of_contexts(p, t) - t), "0", "–"],
    ["cache rows kept, each layer", "0", format.integer(s), "–"],
    ["cache kept, all layers", "0 B", format.gib(s * kv_bytes_per_token(spec)), "–"],
  ];
  return { rows, all };
}

/**
 * Above the line the work, below it what is kept. Area is work: a square is `unit` tokens sent
 * through the model, the same on both sides; the squares of this step are the strong ones.
 */
function heaps({ p, n, t }, title) {
  const [columns, rows, cell, ground, depth, width] = [50, 40, 5.6, 228, 64, 280];
  const unit = Math.max(1, sum_of_contexts(p, n) / (columns * rows));
  const picture = svg("svg", { viewBox: `0 0 600 ${ground + depth + 4}`, width: "100%", role: "img", "aria-label": title });
  const heap = (x, tokens, before, hue) => {
    const marks = ["", ""]; // of the steps before, of this step
    const [from, to] = [before / unit, tokens / unit];
    for (let i = 0; i < to; i += 1) {
      const part = (low, high) => {
        if (high <= low) return "";
        const left = x + (i % columns) * cell;
        const foot = ground - 1 - Math.floor(i / columns) * cell;
        return `M${left} ${foot - low * (cell - 1)}h${cell - 1}v${(low - high) * (cell - 1)}h${1 - cell}z`;
      };
      const [a, b] = [Math.min(Math.max(from - i, 0), 1), Math.min(to - i, 1)];
      marks[0] += part(0, Math.min(a, b));
      marks[1] += part(a, b);
    }
    picture.append(svg("path", { d: marks[0], fill: colour(hue), opacity: 0.5 }), svg("path", { d: marks[1], fill: colour(hue) }));
  };
  const kept = ((depth - 5) * (p + t)) / (p + n);
  const shelf = (x) => svg("rect", { x: x + 0.5, y: ground + 2.5, width: width - 1, height: depth, fill: "none", stroke: colour("muted"), "stroke-dasharray": "4 4" });
  picture.append(svg("line", { x1: 0, x2: width, y1: ground + 1, y2: ground + 1, stroke: colour("fg") }),
    svg("line", { x1: 320, x2: 320 + width, y1: ground + 1, y2: ground + 1, stroke: colour("fg") }), shelf(0), shelf(320),
    svg("rect", { x: 323, y: ground + 5, width: width / 2 - 4, height: kept, fill: colour("k") }),
    svg("rect", { x: 321 + width / 2, y: ground + 5, width: width / 2 - 4, height: kept, fill: colour("v") }));
  heap(0, sum_of_contexts(p, t), sum_of_contexts(p, t - 1), "waste");
  heap(320, t, t - 1, "q");
  return { picture, unit };
}

function render({ model, el }) {
  const root = frame({ model, el }, "What decoding costs, step by step");
  const models = model.get("models");
  const chosen = selectControl({
    label: "Model", options: models.map((m) => [m.slug, m.name]), value: model.get("model") });
  const prompt = numberControl({ label: "Prompt p, tokens", min: 0, max: MAX_PROMPT, value: model.get("prompt") });
  const decode = numberControl({ label: "Decode steps n", min: 1, max: MAX_DECODE, value: model.get("decode") });
  const accounting = selectControl({
    label: "Accounting",
    options: [["coarse", "coarse: P as on the model card"], ["exact", "exact: weights streamed"]],
    value: model.get("accounting") });
  const steps = player({
    label: "Step t", min: 1, max: model.get("decode"), value: model.get("step"), format: format.integer,
    onFrame: (t) => { model.set("step", t); model.save_changes(); } });
  const [without, cached, memory] = [h("strong"), h("strong"), h("strong")];
  const canvas = h("div");
  const square = h("p", { class: "kvlab-say" });
  const bars = ["waste", "q"].map((hue) => h("div", { class: "kvlab-moves", style: `background: ${colour(hue)}` }));
  const scale = h("p", { class: "kvlab-say" });
  const zoom = buttonControl({ label: "Zoom in", onPress: () => { zoomed = !zoomed; draw(); } });
  const view = tableView({ caption: "", head: ["", "without cache", "with cache", "ratio"] });
  const note = h("p", { class: "kvlab-muted" });
  const said = liveRegion();
  let zoomed = false;
  stage(root, {
    picture: h("div", {}, h("style", {}, COST_STYLE),
      h("div", { class: "kvc-large" }, h("div", {}, "Without a cache", without),
        h("div", {}, "With a cache", cached), h("div", {}, "K and V kept", memory)), canvas),
    transport: steps, said,
    settings: [h("div", { class: "kvlab-row" }, chosen.element, prompt.element, decode.element, accounting.element)],
    numbers: [view.element, note],
  });
  const runs = Object.entries(RUNS).map(([label, [p, n]]) => buttonControl({ label, onPress: () => {
    steps.stop();
    model.set("prompt", p);
    model.set("decode", n);
    model.set("step", n);
    model.save_changes();
  } }).element);
  said.element.after(h("div", { class: "kvlab-row" }, runs, zoom.element), square, h("div", { class: "kvc-bars", "aria-hidden": "true" }, bars), scale);

  for (const [trait, control] of [["model", chosen], ["prompt", prompt], ["decode", decode], ["accounting", accounting]]) {
    bind(model, trait, control);
  }

  function draw() {
    const spec = models.find((m) => m.slug === model.get("model"));
    const [p, n] = [model.get("prompt"), model.get("decode")];
    const t = Math.min(model.get("step"), n);
    const P = spec[model.get("accounting")];
    const s = p + t;
    const { rows, all } = costRows(spec, P, p, t);
    view.setCaption(`${spec.name}, after step ${format.integer(t)} of ${format.integer(n)}: context s = ${format.integer(s)}`);
    view.update(rows);
    [without.textContent, cached.textContent, memory.textContent] = [rows[3][1], rows[3][2], rows[8][2]];
    const sentence = `Step ${format.integer(t)}: ${rows[3][1]} without a cache so far, ${rows[3][3]} times `
      + `the ${rows[3][2]} with one. The cache keeps ${rows[8][2]} for it.`;
    const { picture, unit } = heaps({ p, n, t }, sentence);
    canvas.replaceChildren(picture);
    square.textContent = `Above the line: a square is ${unit === 1 ? "one token" : `${format.number(unit, 1)} tokens`} sent through the model. `
      + "Below it: the K and the V that are kept.";
    const whole = uncached_run_projection_flops(P, p, n) + uncached_run_attention_flops(spec, p, n);
    const widest = zoomed ? cached_run_projection_flops(P, n) + cached_run_attention_flops(spec, p, n) : whole;
    bars.forEach((bar, i) => { bar.style.width = `${(100 * Math.min(all[i], widest)) / widest}%`; });
    scale.textContent = zoomed
      ? `Zoomed in ${format.number(whole / widest, 1)} times: the upper bar goes on for ${format.number(all[0] / widest, 1)} times this width.`
      : `Both bars on one scale: the lower one is ${format.number(all[0] / all[1], 1)} times shorter.`;
    zoom.setLabel(zoomed ? "Zoom out" : "Zoom in");
    note.textContent = `P = ${format.integer(P)} (${spec[`${model.get("accounting")}_text`]}); KV in 2 bytes an element.`;
    said.say(sentence);
  }

  model.on("change:decode", () => {
    const n = model.get("decode");
    steps.setLimits(1, n);
    if (model.get("step") > n) { model.set("step", n); model.save_changes(); }
    steps.set(model.get("step"));
  });
  model.on("change:step", () => { if (steps.value !== model.get("step")) steps.set(model.get("step")); });
  for (const trait of ["model", "prompt", "decode", "accounting", "step"]) model.on(`change:${trait}`, draw);
  draw();
}

export default { render };
