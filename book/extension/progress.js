// All exercises with a place for each answer. The verdicts are Python's; this file only asks, shows,
// and remembers in localStorage which are solved (nothing else is stored, nothing is sent).

const STORE = "kvlab-solved";

function render({ model, el }) {
  const root = frame({ model, el }, "What is done, and what is left");
  const entries = model.get("exercises");
  const solved = new Set(remembered());
  const counted = h("p", { role: "status", "aria-live": "polite", style: "font-weight: 600" });
  const chapters = [...new Set(entries.map((e) => e.chapter))];
  const fields = [];
  const start = startButton(() => fields.forEach((field) => { field.disabled = false; }));
  root.append(counted, start.element, ...chapters.map(chapterList));
  count();

  function remembered() {
    try { return JSON.parse(localStorage.getItem(STORE) ?? "[]"); } catch { return []; }
  }

  function remember(id) {
    solved.add(id);
    try { localStorage.setItem(STORE, JSON.stringify([...solved])); } catch { /* private window */ }
    count();
  }

  function count() {
    const done = entries.filter((e) => solved.has(e.id)).length;
    counted.textContent = `${done} of ${entries.length} exercises solved in this browser.`;
  }

  function chapterList(chapter) {
    const own = entries.filter((e) => e.chapter === chapter);
    const title = h("summary", {});
    const paint = () => {
      const done = own.filter((e) => solved.has(e.id)).length;
      title.textContent = `Chapter ${chapter}: ${done} of ${own.length}`;
    };
    const list = h("details", { open: chapter === chapters[0] }, title, own.map((e) => one(e, paint)));
    paint();
    return list;
  }

  function one(entry, paint) {
    const mark = h("span", { "aria-hidden": "true" });
    const said = h("p", { role: "status", "aria-live": "polite" });
    const heading = h("p", { style: "font-weight: 600" }, mark, ` ${entry.id} ${entry.title}`);
    const done = () => { mark.textContent = solved.has(entry.id) ? "✓" : "·"; paint(); };
    const body = h("div", { style: "margin: 0.6rem 0 1.2rem" }, heading, h("p", {}, entry.question));
    done();
    if (entry.kind === "notebook") {
      body.append(h("p", { class: "kvlab-muted" }, "This one needs torch: do it in the notebook."));
      return body;
    }
    const code = entry.kind === "code";
    const box = code
      ? h("textarea", { rows: 5, spellcheck: "false", autocomplete: "off", placeholder: "def answer(...):\n    return ..." })
      : h("input", { type: "text", autocomplete: "off", spellcheck: "false" });
    box.id = freshId("answer");
    const check = buttonControl({ label: "Check", onPress: () => ask_() });
    check.input.setAttribute("aria-label", `Check the answer to ${entry.id}`);
    const push = buttonControl({ label: "Hint", onPress: () => { said.textContent = entry.hint; } });
    push.input.setAttribute("aria-label", `A hint for ${entry.id}`);
    if (!code) box.addEventListener("keydown", (event) => { if (event.key === "Enter") ask_(); });
    const controls = h("fieldset", { style: "border: 0; padding: 0; margin: 0; min-width: 0", disabled: onPage() },
      h("label", { for: box.id }, `Answer to ${entry.id}${code ? ", a Python function" : ""}`), " ", box,
      h("div", { class: "kvlab-row" }, check.element, push.element));
    fields.push(controls);
    body.append(controls, said);
    return body;

    async function ask_() {
      if (!box.value.trim()) { said.textContent = "Type an answer first."; return; }
      try {
        const answer = await ask(model, "exercise", { exercise_id: entry.id, answer: box.value });
        said.textContent = answer.text;
        if (answer.right) { remember(entry.id); done(); }
      } catch (error) {
        said.textContent = `${error.name}: ${error.message}`;
      }
    }
  }
}

export default { render };
