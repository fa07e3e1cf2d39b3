// Helpers of every widget. This text is put before a widget's own file, in one module: no imports,
// no exports. Text reaches the page as text nodes only, never as HTML.

// --- elements -----------------------------------------------------------------------------

/** An HTML element. attrs: attributes, or on<Event> functions. children: nodes or text. */
function h(tag, attrs = {}, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

/** An SVG element, as h. */
function svg(tag, attrs = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attrs, children);
}

function fill(element, attrs, children) {
  for (const [name, value] of Object.entries(attrs)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

let nextId = 0;
function freshId(stem) {
  nextId += 1;
  return `kvlab-${stem}-${nextId}-${Math.random().toString(36).slice(2, 7)}`;
}

/** The frame of a widget: a labelled region. Call it first; it also folds the text twin away. */
function frame({ model, el }, title) {
  const id = freshId("title");
  const root = h("section", { class: "kvlab", "aria-labelledby": id }, h("h3", { id }, title));
  el.replaceChildren(root);
  foldTwin(model);
  return root;
}

function foldTwin(model) {
  const id = model.get("twin_id");
  const fold = () => {
    for (const twin of document.querySelectorAll("details.kvlab-twin")) {
      if (id && twin.dataset.kvlabTwin === id && !twin.dataset.folded) {
        twin.dataset.folded = "1";
        twin.open = false;
      }
    }
  };
  fold();
  setTimeout(fold, 300); // in a notebook the twin is displayed just after the widget
}

// --- controls: native inputs with a label -------------------------------------------------
// Each returns { element, input, value, set(value), setLimits? } and calls onInput(value).

function field(label, input, { wide = false, after = null } = {}) {
  input.id ||= freshId("input");
  return h("div", { class: wide ? "kvlab-field kvlab-wide" : "kvlab-field" },
    h("label", { for: input.id }, label, after), input);
}

/** A slider. format(value) is shown beside the label and read out as the slider's value. */
function rangeControl({ label, min, max, step = 1, value, format = String, onInput = () => {} }) {
  const input = h("input", { type: "range", min, max, step });
  const output = h("output", {});
  const paint = () => {
    const text = format(Number(input.value));
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  const control = {
    element: field(label, input, { wide: true, after: output }),
    input,
    get value() { return Number(input.value); },
    set(next) { input.value = next; paint(); },
    setLimits(low, high) { input.min = low; input.max = high; paint(); },
  };
  input.addEventListener("input", () => { paint(); onInput(Number(input.value)); });
  control.set(value);
  return control;
}

/** A number box. Values outside the limits, and text that is no number, are refused with a message. */
function numberControl({ label, min, max, step = 1, value, onInput = () => {} }) {
  const input = h("input", { type: "number", min, max, step, inputmode: "decimal" });
  const problem = h("span", { class: "kvlab-error", role: "alert" });
  const element = field(label, input);
  element.append(problem);
  const control = {
    element,
    input,
    get value() { return input.valueAsNumber; },
    get valid() { return input.value !== "" && input.checkValidity(); },
    set(next) { input.value = next; problem.textContent = ""; },
  };
  input.addEventListener("input", () => {
    problem.textContent = control.valid ? "" : input.validationMessage || "a number, please";
    input.setAttribute("aria-invalid", String(!control.valid));
    if (control.valid) onInput(input.valueAsNumber);
  });
  control.set(value);
  return control;
}

/** A drop-down. options: [value, text] pairs, or plain strings. */
function selectControl({ label, options, value, onInput = () => {} }) {
  const input = h("select", {}, options.map((option) => {
    const [name, text] = Array.isArray(option) ? option : [option, option];
    return h("option", { value: name }, text);
  }));
  input.value = value;
  input.addEventListener("input", () => onInput(input.value));
  return {
    element: field(label, input), input,
    get value() { return input.value; },
    set(next) { input.value = next; },
  };
}

/** A tick box. */
function checkControl({ label, value = false, onInput = () => {} }) {
  const input = h("input", { type: "checkbox", id: freshId("check") });
  input.checked = value;
  input.addEventListener("input", () => onInput(input.checked));
  return {
    element: h("div", {}, input, " ", h("label", { for: input.id }, label)), input,
    get value() { return input.checked; },
    set(next) { input.checked = next; },
  };
}

function buttonControl({ label, onPress, primary = false }) {
  const input = h("button", { type: "button", class: primary ? "kvlab-primary" : null, onClick: onPress }, label);
  return { element: input, input, setLabel(text) { input.textContent = text; } };
}

/** Ties a control to a trait, both ways. Call draw yourself on `model.on("change:...")`. */
function bind(model, trait, control) {
  control.input.addEventListener("input", () => {
    if (control.valid === false) return;
    model.set(trait, control.value);
    model.save_changes();
  });
  model.on(`change:${trait}`, () => {
    if (control.value !== model.get(trait)) control.set(model.get(trait));
  });
}

const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/**
 * Play, step back, step forward, scrub. Calls onFrame(value) for each new value.
 * A full play takes about `seconds`. With reduced motion, play goes to the end at once.
 */
function player({ label, min, max, value = min, seconds = 8, format = String, onFrame }) {
  let timer = null;
  const slider = rangeControl({ label, min, max, value, format, onInput: (v) => { stop(); onFrame(v); } });
  const move = (to) => {
    const [low, high] = [Number(slider.input.min), Number(slider.input.max)];
    slider.set(Math.min(high, Math.max(low, to)));
    onFrame(slider.value);
  };
  const play = buttonControl({ label: "Play", onPress: () => (timer ? stop() : start()) });
  const stop = () => { clearInterval(timer); timer = null; play.setLabel("Play"); };
  function start() {
    const [low, high] = [Number(slider.input.min), Number(slider.input.max)];
    if (slider.value >= high) move(low);
    if (reducedMotion()) { move(high); return; }
    const frames = Math.min(high - low, seconds * 12);
    const from = slider.value;
    let n = 0;
    play.setLabel("Pause");
    timer = setInterval(() => {
      if (!slider.input.isConnected) { stop(); return; }
      n += 1;
      const next = Math.round(from + ((high - low) * n) / frames);
      move(next);
      if (next >= high) stop();
    }, (seconds * 1000) / frames);
  }
  const back = buttonControl({ label: "Back", onPress: () => { stop(); move(slider.value - 1); } });
  const step = buttonControl({ label: "Step", onPress: () => { stop(); move(slider.value + 1); } });
  back.input.setAttribute("aria-label", `${label}: one step back`);
  step.input.setAttribute("aria-label", `${label}: one step forward`);
  return {
    element: h("div", { class: "kvlab-row" }, back.element, play.element, step.element, slider.element),
    slider, play: play.input, back: back.input, step: step.input, stop,
    get value() { return slider.value; },
    set: (v) => slider.set(v),
    setLimits(low, high) { stop(); slider.setLimits(low, high); },
  };
}

/** A polite live region. say(text) waits until the reader has stopped moving a slider. */
function liveRegion({ visible = true } = {}) {
  const element = h("p", { role: "status", "aria-live": "polite", class: visible ? "kvlab-say" : "kvlab-hidden" });
  let timer = null;
  return {
    element,
    say(text) { clearTimeout(timer); timer = setTimeout(() => { element.textContent = text; }, 150); },
  };
}

/** A table in a scrolling frame. update(rows, head): the first cell of a row is its header. */
function tableView({ caption, head = [], rows = [] }) {
  const thead = h("thead");
  const tbody = h("tbody");
  const captionNode = h("caption", {}, caption);
  const view = {
    element: h("div", { class: "kvlab-scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", {}, captionNode, thead, tbody)),
    setCaption(text) { captionNode.textContent = text; },
    update(nextRows, nextHead = null) {
      if (nextHead) {
        thead.replaceChildren(h("tr", {}, nextHead.map((cell) => h("th", { scope: "col" }, String(cell)))));
      }
      tbody.replaceChildren(...nextRows.map(([first, ...rest]) => h("tr", {},
        h("th", { scope: "row" }, String(first)), rest.map((cell) => h("td", {}, String(cell))))));
    },
  };
  view.update(rows, head);
  return view;
}

/** A legend: pairs of a colour's name (q, k, v, weights, cache, waste, padding) and a text. */
function legend(entries) {
  return h("ul", { class: "kvlab-legend" }, entries.map(([name, text]) => h("li", {},
    h("i", { style: `background: ${colour(name)}`, "aria-hidden": "true" }), text)));
}

const colour = (name) => `var(--kv-${name})`;

// --- numbers --------------------------------------------------------------------------------
// Bytes in powers of ten say GB, in powers of two GiB. Values may be numbers or BigInts.

function digits(value, places) {
  // Halves go to the even digit, as in Python: 288.125 is 288.12 on both sides.
  return Number(value).toLocaleString("en-US", {
    minimumFractionDigits: places, maximumFractionDigits: places, roundingMode: "halfEven" });
}

function scaled(value, base, units, places) {
  let [v, i] = [Number(value), 0];
  while (Math.abs(v) >= base && i < units.length - 1) { v /= base; i += 1; }
  return `${digits(v, i === 0 && Number.isInteger(v) ? 0 : places)} ${units[i]}`;
}

const format = {
  integer: (v) => (typeof v === "bigint" ? v : Math.round(v)).toLocaleString("en-US"),
  number: (v, places = 2) => digits(v, places),
  gb: (v, places = 2) => scaled(v, 1000, ["B", "kB", "MB", "GB", "TB", "PB"], places),
  gib: (v, places = 2) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], places),
  flop: (v, places = 2) =>
    scaled(v, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"], places),
  seconds: (v, places = 2) => (v >= 1 ? `${digits(v, places)} s` : v >= 1e-3 ? `${digits(v * 1e3, places)} ms`
    : `${digits(v * 1e6, places)} µs`),
  times: (v, places = 1) => `${digits(v, v >= 100 ? 0 : places)}×`,
  percent: (v, places = 1) => `${digits(v * 100, places)} %`,
};

// --- Python -----------------------------------------------------------------------------------

const waiting = new Map();
const listening = new WeakSet();

/** True on the rendered page, where Python must be started; false where a kernel answers. */
const onPage = () => Boolean(globalThis.kvlabPage);

/**
 * Ask Python one question of kvlab.answers.FUNCTIONS. Resolves to the answer; rejects with an
 * Error whose name and message are those of the Python exception. On the rendered page the first
 * question starts Python in the browser (some megabytes, from the page's own folder): ask after
 * the reader has pressed startButton.
 */
async function ask(model, name, args = {}) {
  const text = onPage() ? await globalThis.kvlabPage.ask(name, args) : await askKernel(model, name, args);
  const reply = JSON.parse(text);
  if (reply.error) throw Object.assign(new Error(reply.error.message), { name: reply.error.name });
  return reply.ok;
}

function askKernel(model, name, args) {
  if (!listening.has(model)) {
    listening.add(model);
    model.on("msg:custom", (message) => {
      if (message?.kind !== "kvlab-answer" || !waiting.has(message.id)) return;
      waiting.get(message.id)(message.text);
      waiting.delete(message.id);
    });
  }
  return new Promise((resolve, reject) => {
    const id = freshId("ask");
    waiting.set(id, resolve);
    setTimeout(() => {
      if (waiting.delete(id)) reject(new Error("the kernel did not answer within 60 s: is it running?"));
    }, 60_000);
    model.send({ kind: "kvlab-ask", id, function: name, arguments: args });
  });
}

/**
 * A button that starts Python on the rendered page and then calls onReady once. Where a kernel
 * answers, or Python runs already, onReady is called at once and the element stays empty.
 */
function startButton(onReady) {
  const element = h("div", { class: "kvlab-row" });
  if (!onPage() || globalThis.kvlabPage.running) { queueMicrotask(onReady); return { element }; }
  let done = false;
  const ready = () => {
    if (done) return;
    done = true;
    element.replaceChildren();
    onReady();
  };
  const status = h("span", { role: "status", class: "kvlab-muted" },
    `Python runs in this page: ${globalThis.kvlabPage.size ?? "some megabytes"}, nothing leaves it.`);
  const button = buttonControl({ label: "Start", primary: true, onPress: async () => {
    button.input.disabled = true;
    try {
      await globalThis.kvlabPage.start((text) => { status.textContent = text; });
      ready();
    } catch (error) {
      button.input.disabled = false;
      status.textContent = `Python did not start: ${error.message}`;
      status.className = "kvlab-error";
    }
  } });
  globalThis.kvlabPage.onStarted(ready); // another widget of the page may press first
  element.append(button.element, status);
  return { element, button: button.input };
}
