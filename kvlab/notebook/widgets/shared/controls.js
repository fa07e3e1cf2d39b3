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
    element: h("div", { class: "kvlab-row kvlab-transport" }, back.element, play.element, step.element, slider.element),
    slider, play: play.input, back: back.input, step: step.input, stop,
    get value() { return slider.value; },
    set: (v) => slider.set(v),
    setLimits(low, high) { stop(); slider.setLimits(low, high); },
  };
}
