// A guess, then the computed answer. State: guess and committed; nothing leaves the browser.

const storageKey = (model) => `kvlab-predict-${model.get("key")}`;

/** What was committed before: in the notebook's traits, or in this browser. */
function remembered(model) {
  if (model.get("committed")) return model.get("guess");
  if (!onPage()) return null;
  try {
    const text = localStorage.getItem(storageKey(model));
    return text !== null && Number.isFinite(Number(text)) ? Number(text) : null;
  } catch { return null; } // a browser may forbid storage; the widget works without
}

function keep(model, guess) {
  model.set("guess", guess ?? 0);
  model.set("committed", guess !== null);
  model.save_changes();
  if (!onPage()) return;
  try {
    if (guess === null) localStorage.removeItem(storageKey(model));
    else localStorage.setItem(storageKey(model), String(guess));
  } catch { /* not kept then */ }
}

/** Four significant digits, grouped. */
const short = (value) => Number(value.toPrecision(4)).toLocaleString("en-US", { maximumSignificantDigits: 4 });

function verdict(guess, answer) {
  if (guess === answer) return "Exactly right.";
  if (answer === 0 || guess === 0 || guess * answer < 0) return `You were off by ${short(Math.abs(guess - answer))}.`;
  const ratio = guess / answer;
  const word = ratio > 1 ? "too high" : "too low";
  const factor = ratio > 1 ? ratio : 1 / ratio;
  if (factor < 1.005) return "Right, within half a percent.";
  if (factor < 2) return `Your guess was ${short((factor - 1) * 100)} % ${word}.`;
  return `Your guess was ${short(factor)} times ${word}.`;
}

function render({ model, el }) {
  const root = frame({ model, el }, "Predict first");
  const unit = model.get("unit");
  const box = numberControl({ label: unit ? `Your guess, in ${unit}` : "Your guess", step: "any", value: "" });
  const commit = buttonControl({ label: "Commit", primary: true, onPress: () => {
    if (box.valid) reveal(box.value, true);
    else { box.input.focus(); result.textContent = "Type a number first; a rough one will do."; }
  } });
  const again = buttonControl({ label: "Guess again", onPress: () => {
    keep(model, null);
    box.input.disabled = false;
    box.set("");
    commit.input.hidden = false;
    again.input.hidden = true;
    result.textContent = "";
    why.textContent = "";
    box.input.focus();
  } });
  again.input.hidden = true;
  const result = h("p", { role: "status", "aria-live": "polite" });
  const why = h("p", { class: "kvlab-muted" });

  function reveal(guess, fresh) {
    const answer = model.get("answer");
    const tail = unit ? ` ${unit}` : "";
    box.input.disabled = true;
    commit.input.hidden = true;
    again.input.hidden = false;
    result.replaceChildren(`You said ${short(guess)}${tail}. Computed: `, h("strong", {}, `${short(answer)}${tail}`),
      `. ${verdict(guess, answer)}`);
    why.textContent = model.get("explanation");
    if (fresh) { keep(model, guess); again.input.focus(); }
  }

  box.input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the focus moves to "Guess again", which this key must not press
    commit.input.click();
  });
  root.append(h("p", {}, model.get("question")),
    h("div", { class: "kvlab-row" }, box.element, commit.element, again.element), result, why);
  const before = remembered(model);
  if (before !== null) { box.set(before); reveal(before, false); }
}

export default { render };
