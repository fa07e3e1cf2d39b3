// The cost table over the steps of a run. Every figure comes from the functions of costs.py,
// which stand above this text as JavaScript.

const MAX_PROMPT = 131072;
const MAX_DECODE = 32768;

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
  return [
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
}

/** One panel: a column a step (or a bin of steps), as high as its context. */
function panel(title, { p, n, t, kept }) {
  const [width, height, foot] = [320, 150, 18];
  const columns = Math.min(n, 64);
  const x = (i) => (i * width) / columns;
  const gap = kept ? 0 : Math.min(2, width / columns / 3);
  const top = (s) => (height * s) / (p + n);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height + foot}`, role: "img", "aria-label": title });
  picture.append(svg("line", { x1: 0, x2: width, y1: height, y2: height, stroke: colour("line") }));
  for (let i = 0; i < columns; i += 1) {
    const last = Math.round(((i + 1) * n) / columns);
    if (last > t && i > 0 && Math.round((i * n) / columns) >= t) break;
    const s = p + Math.min(last, t);
    const rect = (y, h, fill, opacity) => svg("rect", {
      x: x(i), y, width: x(i + 1) - x(i) - gap, height: h, fill: colour(fill), opacity });
    if (kept) {
      picture.append(rect(height - top(p), top(p), "cache", 0.55), rect(height - top(s), top(s) - top(p), "cache"));
    } else {
      picture.append(rect(height - top(s), top(s), "waste", last >= t ? 1 : 0.45));
    }
    if (kept) picture.append(rect(height - top(s) - 6, 3, "v"), rect(height - top(s) - 3, 3, "k"));
    else picture.append(rect(height - top(s) - 3, 3, "fg"));
  }
  picture.append(svg("text", { x: 0, y: height + 14 }, "step 1"),
    svg("text", { x: width, y: height + 14, "text-anchor": "end" }, `step ${format.integer(n)}`));
  return h("figure", { class: "kvlab-wide", style: "max-width: 26rem" },
    h("figcaption", {}, title), picture);
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
  const pictures = h("div", { class: "kvlab-row" });
  const view = tableView({ caption: "", head: ["", "without cache", "with cache", "ratio"] });
  const note = h("p", { class: "kvlab-muted" });
  const said = liveRegion({ visible: false });
  root.append(
    h("div", { class: "kvlab-row" }, chosen.element, prompt.element, decode.element, accounting.element),
    steps.element,
    pictures,
    legend([["waste", "rows of logits computed and thrown away"], ["fg", "the one row sampled from"],
      ["cache", "K and V kept"], ["k", "the K this step adds"], ["v", "and the V"]]),
    view.element, note, said.element);

  for (const [trait, control] of [["model", chosen], ["prompt", prompt], ["decode", decode], ["accounting", accounting]]) {
    bind(model, trait, control);
  }

  function draw() {
    const spec = models.find((m) => m.slug === model.get("model"));
    const [p, n, t] = [model.get("prompt"), model.get("decode"), model.get("step")];
    const P = spec[model.get("accounting")];
    const s = p + t;
    const rows = costRows(spec, P, p, t);
    view.setCaption(`${spec.name}, after step ${format.integer(t)} of ${format.integer(n)}: context s = ${format.integer(s)}`);
    view.update(rows);
    pictures.replaceChildren(
      panel(`Without a cache: ${rows[6][1]} logit rows thrown away so far`, { p, n, t, kept: false }),
      panel(`With a cache: ${format.integer(s)} rows kept, ${rows[8][2]}`, { p, n, t, kept: true }));
    note.textContent = `P = ${format.integer(P)} (${spec[`${model.get("accounting")}_text`]}); KV in 2 bytes an element.`;
    said.say(`Step ${t}: ${rows[3][1]} without a cache so far, ${rows[3][2]} with one, ${rows[3][3]} times as much.`);
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
