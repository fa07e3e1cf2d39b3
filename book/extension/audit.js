// The engine audit. Every verdict is Python's; this file only asks and draws. What is pasted is
// text from the first to the last: it is sent to Python as a string and shown as text nodes.

function render({ model, el }) {
  const root = frame({ model, el }, "Audit an engine's start-up log");
  let turn = 0; // only the last question's answer counts
  const examples = model.get("examples");
  const pick = selectControl({
    label: "a documented log", value: "",
    options: [["", "(your own)"], ...examples.map((e) => [e.file, e.file])],
    onInput: (file) => {
      const example = examples.find((e) => e.file === file);
      if (!example) return;
      log.value = example.text;
      which.set(example.model);
      config.value = "";
      check();
    },
  });
  const which = selectControl({
    label: "model", options: model.get("models").map((m) => [m.slug, m.name]), value: model.get("model"),
    onInput: () => { config.value = ""; check(); },
  });
  const log = area("log", 7, "GPU KV cache size: 464,640 tokens");
  const config = area("config", 5, '{"model_type": "llama", "num_hidden_layers": 32, ...}');
  log.value = model.get("log");
  const go = buttonControl({ label: "Check", primary: true, onPress: () => check() });
  const problem = h("p", { class: "kvlab-error", role: "alert" });
  const verdict = h("p", { class: "kvlab-verdict", style: "font-weight: 600", role: "status", "aria-live": "polite" });
  const table = tableView({
    caption: "Predicted from the config, and reported by the engine",
    head: ["check", "predicted", "reported", "agrees", "proof"],
  });
  const reasons = h("ul", {});
  const controls = h("fieldset", { style: "border: 0; padding: 0; margin: 0; min-width: 0" },
    h("legend", { class: "kvlab-hidden" }, "Log and model"),
    h("div", { class: "kvlab-row" }, pick.element, which.element),
    h("label", { for: log.id }, "start-up log"), log,
    h("details", {}, h("summary", {}, "Paste a config.json instead of choosing a model"),
      h("label", { for: config.id }, "config.json"), config),
    h("div", { class: "kvlab-row" }, go.element));
  controls.disabled = onPage();
  const start = startButton(() => { controls.disabled = false; });
  root.append(start.element, controls, problem, verdict, table.element, reasons);
  show(model.get("answer"));

  function area(stem, rows, placeholder) {
    return h("textarea", { rows, id: freshId(stem), spellcheck: "false", autocomplete: "off", placeholder });
  }

  async function check() {
    turn += 1;
    const mine = turn;
    const question = { log: log.value };
    if (config.value.trim()) question.config = config.value; else question.model = which.value;
    try {
      const answer = await ask(model, "audit", question);
      if (mine === turn) show(answer);
    } catch (error) {
      if (mine === turn) refuse(error);
    }
  }

  function refuse(error) {
    problem.textContent = `${error.name}: ${error.message}`;
    verdict.textContent = "";
    table.update([]);
    reasons.replaceChildren();
  }

  function shown(value, unit) {
    if (value === null) return "not known";
    return unit === "bytes" ? `${format.gib(value)} (${format.gb(value)})` : `${Number(value).toLocaleString("en-US")} ${unit}`;
  }

  function show(answer) {
    problem.textContent = "";
    const how = `${answer.engine}, ${answer.model}, ${answer.kv_dtype} cache, ${answer.tensor_parallel} rank(s)`;
    verdict.textContent = answer.agrees === null
      ? `${how}: this cannot be told from this log.`
      : answer.agrees
        ? `${how}: the log agrees${answer.independent ? "." : ", but none of its figures proves anything of the model."}`
        : `${how}: the log does not agree.`;
    table.update(answer.checks.map((c) => [
      c.name, shown(c.predicted, c.unit), shown(c.reported, c.unit),
      c.agrees === null ? "cannot be told" : c.agrees ? "yes" : "no",
      !c.independent ? "no" : c.band === null ? "yes" : `yes, within ${(100 * c.band).toPrecision(2)} %`,
    ]));
    reasons.replaceChildren(
      ...answer.checks.map((c) => h("li", {}, `${c.name}: ${c.why}.`)), ...answer.notes.map((note) => h("li", {}, note)));
  }
}

export default { render };
