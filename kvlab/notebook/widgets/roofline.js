// The roofline of a card and three decode steps on it. Every figure comes from the functions of
// costs.py, which stand above this text as JavaScript.

const BYTES = { fp32: 4, bf16: 2, fp16: 2, fp8: 1 };
const ROW_HEAD = ["step", "FLOP", "bytes", "FLOP per byte", "at least", "tokens per second", "bound by"];

/** The three steps at context s: [name, FLOP, bytes, tokens, colour]. */
function decodeSteps(spec, P, batch, s, width) {
  const cached = (n) => [batch_step_flops(spec, P, n, s), batch_step_bytes(spec, P, n, s, width), n];
  return [
    ["without cache", uncached_step_flops(spec, P, s), weight_bytes(P, width), 1, "waste"],
    ["cached, one sequence", ...cached(1), "cache"],
    [`cached, batch ${batch}`, ...cached(batch), "two"],
  ];
}

function stepRow([name, flops, moved, tokens], peak, bandwidth) {
  const arithmetic = compute_seconds(flops, peak);
  const memory = memory_seconds(moved, bandwidth);
  const seconds = Math.max(arithmetic, memory);
  return [name, format.flop(flops), format.gb(moved), format.number(intensity(flops, moved)),
    `${format.number(seconds * 1e3, 3)} ms`, format.number(tokens / seconds, 1),
    arithmetic > memory ? "arithmetic" : "bytes"];
}

/** Log-log picture: x from 0.1 to 100,000 FLOP per byte, y seven decades below the peak. */
function roofPicture(steps, peak, bandwidth) {
  const [width, height, left, foot, top] = [560, 300, 62, 40, 14];
  const [x0, x1] = [-1, 5];
  const y1 = Math.ceil(Math.log10(peak) + 0.15);
  const y0 = Math.floor(Math.log10(bandwidth * 0.1));
  const x = (v) => left + ((Math.log10(v) - x0) / (x1 - x0)) * (width - left - 10);
  const y = (v) => top + ((y1 - Math.log10(v)) / (y1 - y0)) * (height - foot - top);
  const label = "Roofline: FLOP per second over FLOP per byte, both in powers of ten, with three steps";
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const line = (a, b, c, d, stroke, more = {}) =>
    picture.append(svg("line", { x1: a, y1: b, x2: c, y2: d, stroke, ...more }));
  const text = (a, b, value, more = {}) => picture.append(svg("text", { x: a, y: b, ...more }, value));
  for (let power = x0; power <= x1; power += 1) {
    const at = x(10 ** power);
    line(at, top, at, height - foot, colour("line"), { "stroke-width": 0.5 });
    text(at, height - foot + 16, format.integer(10 ** power) === "0" ? "0.1" : format.integer(10 ** power), { "text-anchor": "middle" });
  }
  const names = { 9: "1 GFLOP/s", 12: "1 TFLOP/s", 15: "1 PFLOP/s" };
  for (let power = y0; power <= y1; power += 1) {
    line(left, y(10 ** power), width - 10, y(10 ** power), colour("line"), { "stroke-width": 0.5 });
    if (names[power]) text(left - 4, y(10 ** power) + 4, names[power].replace("FLOP/s", ""), { "text-anchor": "end" });
  }
  text(width / 2, height - 6, "FLOP per byte", { "text-anchor": "middle" });
  text(4, top + 2, "FLOP/s", { "dominant-baseline": "hanging" });
  const ridge = ridge_intensity(peak, bandwidth);
  line(x(10 ** x0), y(bandwidth * 10 ** x0), x(ridge), y(peak), colour("three"), { "stroke-width": 3 });
  line(x(ridge), y(peak), x(10 ** x1), y(peak), colour("one"), { "stroke-width": 3 });
  for (const [index, [name, flops, moved, , fill]] of steps.entries()) {
    const at = intensity(flops, moved);
    const rate = Math.min(peak, at * bandwidth);
    const [cx, cy] = [x(Math.min(at, 10 ** x1)), y(rate)];
    line(cx, cy, cx, height - foot, colour(fill), { "stroke-dasharray": "3 3" });
    picture.append(svg("circle", { cx, cy, r: 6, fill: colour(fill) }, svg("title", {}, name)));
    text(cx, cy - 10, String.fromCharCode(65 + index), { "text-anchor": "middle", "font-weight": "bold" });
  }
  return picture;
}

function render({ model, el }) {
  const root = frame({ model, el }, "Under the roofs: bytes or arithmetic?");
  const models = model.get("models");
  const cards = model.get("cards");
  const dtypesOf = (card) => Object.keys(card.peaks);
  const chosenModel = selectControl({ label: "Model", options: models.map((m) => [m.slug, m.name]), value: model.get("model") });
  const chosenCard = selectControl({ label: "Card", options: cards.map((c) => [c.slug, c.name]), value: model.get("card") });
  const dtype = selectControl({ label: "Number format", options: Object.keys(BYTES), value: model.get("dtype") });
  const batch = numberControl({ label: "Batch, sequences", min: 1, max: 4096, value: model.get("batch") });
  const prompt = numberControl({ label: "Prompt p, tokens", min: 0, max: 131072, value: model.get("prompt") });
  const decode = numberControl({ label: "Decode steps n", min: 1, max: 32768, value: model.get("decode") });
  const steps = player({
    label: "Step t", min: 1, max: model.get("decode"), value: model.get("step"), format: format.integer,
    onFrame: (t) => { model.set("step", t); model.save_changes(); } });
  const picture = h("div", { style: "max-width: 40rem" });
  const view = tableView({ caption: "", head: ROW_HEAD });
  const note = h("p", { class: "kvlab-muted" });
  const said = liveRegion();
  root.append(
    h("div", { class: "kvlab-row" }, chosenModel.element, chosenCard.element, dtype.element, batch.element, prompt.element, decode.element),
    steps.element, picture,
    legend([["three", "roof of the bandwidth"], ["one", "roof of the arithmetic"], ["waste", "A: without cache"],
      ["cache", "B: cached, one sequence"], ["two", "C: cached, the batch"]]),
    view.element, note, said.element);
  for (const [trait, control] of [["model", chosenModel], ["card", chosenCard], ["dtype", dtype], ["batch", batch],
    ["prompt", prompt], ["decode", decode]]) bind(model, trait, control);

  function draw() {
    const spec = models.find((m) => m.slug === model.get("model"));
    const card = cards.find((c) => c.slug === model.get("card"));
    for (const option of dtype.input.options) option.disabled = !dtypesOf(card).includes(option.value);
    if (!dtypesOf(card).includes(model.get("dtype"))) {
      model.set("dtype", dtypesOf(card).includes("fp16") ? "fp16" : "fp32");
      model.save_changes();
      return;
    }
    const [t, p, R] = [model.get("step"), model.get("prompt"), model.get("batch")];
    const s = p + t;
    const [peak, bandwidth] = [card.peaks[model.get("dtype")], card.bandwidth];
    const entries = decodeSteps(spec, spec.coarse, R, s, BYTES[model.get("dtype")]);
    const rows = entries.map((entry) => stepRow(entry, peak, bandwidth));
    view.setCaption(`${spec.name} on ${card.name}, step ${format.integer(t)}: context s = ${format.integer(s)}`);
    view.update(rows);
    picture.replaceChildren(roofPicture(entries, peak, bandwidth));
    const crossing = kv_weight_crossover_tokens(spec, spec.coarse);
    note.textContent = `The roofs meet at ${format.number(ridge_intensity(peak, bandwidth), 1)} FLOP per byte. `
      + `KV outweighs the weights from ${format.integer(crossing)} resident tokens on; the batch holds ${format.integer(R * s)}: `
      + (R * s > crossing ? "more KV than weights are read." : "more weights than KV are read.");
    said.say(`Step ${t}: ${rows[1][5]} tokens per second for one sequence, ${rows[2][5]} for the batch, bound by ${rows[2][6]}.`);
  }

  model.on("change:decode", () => {
    const n = model.get("decode");
    steps.setLimits(1, n);
    if (model.get("step") > n) { model.set("step", n); model.save_changes(); }
    steps.set(model.get("step"));
  });
  model.on("change:step", () => { if (steps.value !== model.get("step")) steps.set(model.get("step")); });
  for (const trait of ["model", "card", "dtype", "batch", "prompt", "decode", "step"]) model.on(`change:${trait}`, draw);
  draw();
}

export default { render };
