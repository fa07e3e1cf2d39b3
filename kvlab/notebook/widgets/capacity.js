// The capacity planner. Every number is Python's answer; this file only asks and draws.

const PLAN = [
  ["the card's memory", "memory_bytes"], ["usable share of it", "usable_bytes"],
  ["weights", "weight_bytes_per_card"], ["left for the cache", "pool_bytes"],
  ["one sequence", "bytes_per_sequence"], ["all sequences", "needed_bytes"],
];
const PASTED = "pasted config.json";

function render({ model, el }) {
  const root = frame({ model, el }, "What fits on a card");
  const both = (v) => `${v < 0 ? "−" : ""}${format.gib(Math.abs(v))} (${format.gb(Math.abs(v))})`;
  let pasted = null; // the text of a config.json, once it was read
  let turn = 0; // answers may come late: only the last question counts
  let ownWeights = false; // true once the reader has typed a size
  let running = !onPage();

  const names = model.get("models").map((m) => [m.slug, m.name]);
  const params = Object.fromEntries(model.get("models").map((m) => [m.slug, m.params]));
  const changed = () => plan();
  const which = selectControl({ label: "model", options: names, value: model.get("model"), onInput: () => {
    pasted = null;
    option.remove();
    fillWeights();
    plan();
  } });
  const option = h("option", { value: "" }, PASTED); // in the list while a pasted config is in use
  const card = selectControl({
    label: "card", options: model.get("cards").map((c) => [c.slug, c.name]), value: model.get("card"), onInput: changed });
  const dtype = selectControl({ label: "K and V in", options: model.get("formats"), value: model.get("kv_dtype"), onInput: changed });
  const tp = selectControl({
    label: "cards (tensor parallel)", options: ["1", "2", "4", "8", "16"], value: String(model.get("tp")), onInput: changed });
  const share = rangeControl({
    label: "usable share of the card", min: 50, max: 100, value: model.get("utilisation"),
    format: (v) => `${v} %`, onInput: changed });
  const weights = numberControl({ label: "weights, GB", min: 0, max: 100000, step: "any", value: "", onInput: () => { ownWeights = true; plan(); } });
  const tokens = numberControl({ label: "tokens a sequence", min: 1, max: 10000000, value: model.get("tokens"), onInput: changed });
  const sequences = numberControl({ label: "sequences", min: 1, max: 1000000, value: model.get("sequences"), onInput: changed });
  const text = h("textarea", {
    rows: 6, id: freshId("config"), spellcheck: "false", autocomplete: "off",
    placeholder: '{"model_type": "llama", "num_hidden_layers": 32, ...}' });
  const read = buttonControl({ label: "Read this config", onPress: () => readPasted() });
  const problem = h("p", { class: "kvlab-error", role: "alert" });
  const verdict = h("p", { style: "font-weight: 600" });
  const bar = h("div", {});
  const table = tableView({ caption: "The plan, on each card", head: ["", "bytes"] });
  const advice = h("div", {});
  const notes = h("ul", { class: "kvlab-muted" });
  const said = liveRegion();
  const controls = h("fieldset", { style: "border: 0; padding: 0; margin: 0; min-width: 0" },
    h("legend", { class: "kvlab-hidden" }, "The plan's settings"),
    h("div", { class: "kvlab-row" }, which.element, card.element, dtype.element, tp.element),
    h("div", { class: "kvlab-row" }, share.element, tokens.element, sequences.element, weights.element),
    h("details", {}, h("summary", {}, "Paste a config.json"),
      h("p", {}, "Any model's config.json from the hub. It is read here and goes nowhere; nothing in it is run."),
      h("label", { for: text.id }, "config.json"), text, h("div", { class: "kvlab-row" }, read.element)),
    notes);
  controls.disabled = !running;
  const start = startButton(() => { running = true; controls.disabled = false; });
  root.append(start.element, controls, problem, verdict, bar,
    legend([["weights", "weights"], ["cache", "K and V of the load"], ["waste", "over the usable share"], ["five", "kept back"]]),
    table.element, advice, said.element);
  fillWeights();
  show(model.get("answer"));

  function fillWeights() {
    const count = pasted ? null : params[which.value];
    ownWeights = false;
    weights.set(count ? ((2 * count) / 1e9).toFixed(2) : "");
  }

  function question() {
    const asked = {
      card: card.value, kv_dtype: dtype.value, tp: Number(tp.value), utilisation: (share.value / 100).toFixed(2),
      tokens: tokens.value, sequences: sequences.value,
    };
    if (pasted === null) asked.model = which.value; else asked.config = pasted;
    if (ownWeights && weights.valid) asked.weight_bytes = Math.round(weights.value * 1e9);
    return asked;
  }

  async function plan() {
    if (!running || !tokens.valid || !sequences.valid) return;
    turn += 1;
    const mine = turn;
    try {
      const answer = await ask(model, "capacity", question());
      if (mine !== turn) return;
      problem.textContent = "";
      show(answer);
      if (pasted === null) model.set("model", which.value);
      model.set({ card: card.value, kv_dtype: dtype.value, tp: Number(tp.value), utilisation: share.value,
        tokens: tokens.value, sequences: sequences.value, answer });
      model.save_changes();
    } catch (error) {
      if (mine === turn) refuse(error);
    }
  }

  function refuse(error) {
    problem.textContent = `${error.name}: ${error.message}`;
    verdict.textContent = "";
    bar.replaceChildren();
    table.update([]);
    advice.replaceChildren();
  }

  async function readPasted() {
    const config = text.value;
    turn += 1;
    const mine = turn;
    try {
      const report = await ask(model, "kv", { config });
      if (mine !== turn) return;
      pasted = config;
      which.input.prepend(option);
      which.set("");
      fillWeights();
      problem.textContent = "";
      tellModel(report);
      await plan();
    } catch (error) {
      if (mine === turn) refuse(error);
    }
  }

  function tellModel(report) {
    const growing = format.integer(report.kv_bytes_per_token_growing);
    const filling = format.integer(report.kv_bytes_per_token_filling);
    notes.replaceChildren(...[
      `${PASTED}: ${report.model}, ${report.num_layers} layers: ${shorten(report.layer_runs)}`,
      `${growing} bytes per token${growing === filling ? "" : `, ${filling} while windows fill`}`,
      ...report.notes,
    ].map((line) => h("li", {}, line)));
  }

  function shorten(runs) {
    return runs.length > 8 ? `${runs.slice(0, 8).join(", ")}, ...` : runs.join(", ");
  }

  function show(answer) {
    if (pasted === null) notes.replaceChildren(...answer.notes.map((line) => h("li", {}, line)));
    const load = `${format.integer(sequences.value)} sequences of ${format.integer(tokens.value)} tokens`;
    verdict.textContent = answer.fits
      ? `${answer.model}: ${load} fit.`
      : answer.weights_fit
        ? `${answer.model}: ${load} do not fit; ${format.integer(answer.sequences_that_fit)} would.`
        : `${answer.model}: the weights alone do not fit.`;
    said.say(verdict.textContent);
    const limit = answer.longest_context;
    table.update([
      ...PLAN.map(([label, key]) => [label, both(answer[key])]),
      ["sequences that fit", format.integer(answer.sequences_that_fit)],
      ["longest context each", limit === null ? "no limit" : `${format.integer(limit)} tokens`],
      ...(answer.num_blocks === null ? [] : [["blocks of 16 tokens", format.integer(answer.num_blocks)]]),
      ["it fits", answer.fits ? "yes" : "no"],
    ]);
    advice.replaceChildren(...(answer.advice.length === 0 ? [h("p", {}, answer.fits ? "" : "No single change makes it fit: combine more cards, fewer bits and a smaller load.")] : [
      h("p", {}, "To make it fit, one of these is enough:"), h("ul", {}, answer.advice.map((line) => h("li", {}, `${line}.`)))]));
    if (answer.fits_ignoring_utilisation && !answer.fits) {
      advice.append(h("p", {}, "The whole card could hold it. But an engine keeps a share back for activations and graphs, and that share decides here."));
    }
    if (!ownWeights && !weights.input.value) weights.set((answer.weight_bytes_per_card * Number(tp.value) / 1e9).toFixed(2));
    bar.replaceChildren(drawBar(answer));
  }

  function drawBar(answer) {
    const [width, height] = [640, 36];
    const total = Math.max(answer.memory_bytes, answer.weight_bytes_per_card + answer.needed_bytes);
    const x = (bytes) => 4 + (bytes / total) * (width - 8);
    const end = answer.weight_bytes_per_card + answer.needed_bytes;
    const usable = Math.min(answer.usable_bytes, total);
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, role: "img",
      "aria-label": `weights ${both(answer.weight_bytes_per_card)}, load ${both(answer.needed_bytes)}, usable ${both(answer.usable_bytes)} of ${both(answer.memory_bytes)}`,
    });
    const part = (from, to, fill) => {
      if (to > from) image.append(svg("rect", { x: x(from), y: 6, width: x(to) - x(from), height: 24, fill: colour(fill) }));
    };
    part(usable, answer.memory_bytes, "five");
    part(0, answer.weight_bytes_per_card, "weights");
    part(answer.weight_bytes_per_card, Math.min(end, usable), "cache");
    part(Math.max(usable, answer.weight_bytes_per_card), end, "waste");
    image.append(
      svg("rect", { x: x(0), y: 6, width: x(answer.memory_bytes) - x(0), height: 24, fill: "none", stroke: "var(--kv-fg)" }),
      svg("line", { x1: x(usable), x2: x(usable), y1: 1, y2: 35, stroke: "var(--kv-fg)", "stroke-width": 3 }));
    return h("figure", {},
      h("figcaption", {}, `${both(answer.weight_bytes_per_card)} of weights and ${both(answer.needed_bytes)} of K and V on a card of ${both(answer.memory_bytes)}; the line marks the usable ${share.value} %`),
      image);
  }
}

export default { render };
