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

/**
 * One sentence about the state. The eye gets it at once; the polite region, which a screen reader
 * speaks, waits until the reader has stopped moving a slider.
 */
function liveRegion() {
  const seen = h("p", { class: "kvlab-say", "aria-hidden": "true" });
  const spoken = h("p", { role: "status", "aria-live": "polite", class: "kvlab-hidden" });
  let timer = null;
  return {
    element: h("div", { class: "kvlab-said" }, seen, spoken),
    say(text) {
      seen.textContent = text;
      clearTimeout(timer);
      timer = setTimeout(() => { spoken.textContent = text; }, 150);
    },
  };
}

/** The places of a widget: the picture, the bar that moves it, a sentence; the rest is folded. */
function stage(root, { picture, transport, said, settings = [], numbers = [] }) {
  const fold = (title, parts) => (parts.length ? h("details", {}, h("summary", {}, title), parts) : null);
  fill(root, {}, [picture, transport.element, said.element, fold("Settings", settings), fold("Numbers", numbers)]);
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
