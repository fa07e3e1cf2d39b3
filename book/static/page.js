// What every page of the rendered book does by itself, with no kernel and no network:
// draws the widgets, runs Python on request, draws the figures, opens the tables for printing.
(() => {
  const here = document.currentScript.src;
  const file = (name) => new URL(name, here).href;

  function loadScript(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = file(name);
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${name} is missing from the book's static files`));
      document.head.append(script);
    });
  }
  const once = (make) => {
    let made = null;
    return (...args) => (made ??= make(...args).catch((error) => { made = null; throw error; }));
  };

  /** Packed text (tools/vendor.py: gzip in base64) as the address of a script. */
  async function unpacked(packed) {
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const code = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return URL.createObjectURL(new Blob([await new Response(code).text()], { type: "text/javascript" }));
  }

  // --- Python ---------------------------------------------------------------------------------
  let runtime = null;
  let python = null;
  let worker = null;
  let packedPlotly = null;
  const pending = new Map();
  const whenStarted = [];
  let count = 0;

  function tell(message) {
    count += 1;
    const id = count;
    return new Promise((resolve, reject) => {
      pending.set(id, { resolve, reject });
      worker.postMessage({ id, ...message });
    });
  }

  const start = once(async (say = () => {}) => {
    say("Loading Python from this book's folder …");
    if (!runtime) await loadScript("vendor/pyodide.js");
    if (!python) await loadScript("python.js");
    say("Starting Python …");
    worker = new Worker(await unpacked(runtime.code));
    worker.onmessage = ({ data }) => {
      if (!pending.has(data.id)) return;
      const { resolve, reject } = pending.get(data.id);
      pending.delete(data.id);
      if (data.problem) reject(new Error(data.problem));
      else resolve(data.text);
    };
    worker.onerror = (event) => {
      for (const { reject } of pending.values()) reject(new Error(event.message || "the worker stopped"));
      pending.clear();
    };
    await tell({ kind: "start", packed: runtime.files, python });
    runtime = null;
    page.running = true;
    say("Python is ready.");
    whenStarted.splice(0).forEach((call) => call());
  });

  const page = {
    running: false,
    size: "about 9 MB from this book's folder, once",
    runtime(given) { runtime = given; },
    python(given) { python = given; },
    plotly(given) { packedPlotly = given; },
    start,
    onStarted(call) { if (page.running) call(); else whenStarted.push(call); },
    async ask(name, args) {
      await start();
      return tell({ kind: "ask", function: name, arguments: JSON.stringify(args) });
    },
  };
  globalThis.kvlabPage = page;

  // --- widgets: hosts for the modules that anywidget embeds -----------------------------------
  function makeModel(state) {
    const calls = new Map();
    const changed = new Set();
    return {
      get: (name) => state[name],
      set(name, value) {
        if (Object.is(state[name], value)) return;
        state[name] = value;
        changed.add(name);
        calls.get(`change:${name}`)?.forEach((call) => call());
      },
      save_changes() {
        if (changed.size) calls.get("change")?.forEach((call) => call());
        changed.clear();
      },
      on(names, call) {
        for (const name of names.split(" ")) {
          if (!calls.has(name)) calls.set(name, new Set());
          calls.get(name).add(call);
        }
      },
      off(name, call) { if (call) calls.get(name)?.delete(call); else calls.delete(name); },
      send() { throw new Error("there is no kernel on this page"); },
    };
  }

  const modules = new Map();
  function importText(text) {
    if (!modules.has(text)) {
      modules.set(text, import(URL.createObjectURL(new Blob([text], { type: "text/javascript" }))));
    }
    return modules.get(text);
  }

  const styles = new Set();
  function addStyle(text) {
    if (!text || styles.has(text)) return;
    styles.add(text);
    const style = document.createElement("style");
    style.textContent = text;
    document.head.append(style);
  }

  async function mountWidgets() {
    const holder = document.querySelector('script[type="application/vnd.jupyter.widget-state+json"]');
    if (!holder) return;
    const { state: models } = JSON.parse(holder.textContent);
    const made = new Map();
    for (const view of document.querySelectorAll('script[type="application/vnd.jupyter.widget-view+json"]')) {
      const id = JSON.parse(view.textContent).model_id;
      const saved = models[id];
      if (saved?.model_module !== "anywidget") continue;
      const el = document.createElement("div");
      el.className = "kvlab-widget";
      view.after(el);
      try {
        addStyle(saved.state._css);
        const loaded = (await importText(saved.state._esm)).default;
        const widget = typeof loaded === "function" ? await loaded() : loaded;
        if (!made.has(id)) {
          made.set(id, makeModel({ ...saved.state }));
          await widget.initialize?.({ model: made.get(id) });
        }
        await widget.render({ model: made.get(id), el });
      } catch (error) {
        el.textContent = "This widget could not be drawn; the table below says the same.";
        console.error(error);
      }
    }
  }

  // --- figures --------------------------------------------------------------------------------
  const loadPlotly = once(async () => {
    await loadScript("vendor/plotly.js");
    await loadScript(await unpacked(packedPlotly));
    packedPlotly = null;
    return globalThis.Plotly;
  });

  function themed(figure) {
    const css = getComputedStyle(document.documentElement);
    const [ink, line] = [css.getPropertyValue("--kv-fg").trim(), css.getPropertyValue("--kv-line").trim()];
    const next = structuredClone(figure.layout ?? {});
    Object.assign(next, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true });
    next.font = { ...next.font, color: ink };
    delete next.width;
    for (const name of Object.keys(next).concat("xaxis", "yaxis")) {
      if (/^[xy]axis\d*$/.test(name)) {
        next[name] = { ...next[name], gridcolor: line, linecolor: line, zerolinecolor: line };
      }
    }
    // The legend keeps clear of the axis title; a logarithmic axis names the points that are drawn.
    next.legend = { ...next.legend, orientation: "h", x: 0, xanchor: "left", y: 0, yref: "container", yanchor: "bottom" };
    next.margin = { ...next.margin, b: 85 };
    if (next.xaxis?.type === "log") {
      const drawn = [...new Set(figure.data.flatMap((trace) => trace.x ?? []))];
      if (drawn.length <= 12 && drawn.every((x) => typeof x === "number")) {
        Object.assign(next.xaxis, { tickmode: "array", tickvals: drawn, ticktext: drawn.map((x) => x.toLocaleString("en-US")) });
      }
    }
    const heights = figure.data.flatMap((trace) => trace.y ?? []).filter((y) => y > 0);
    if (next.yaxis?.type === "log" && heights.length) {
      const decades = Math.log10(Math.max(...heights) / Math.min(...heights));
      next.yaxis.dtick = decades > 2.5 ? 1 : "D2";
    }
    return next;
  }

  function drawFigure(holder) {
    const figure = JSON.parse(holder.querySelector("script").textContent);
    const plot = holder.querySelector(".kvlab-plot");
    const draw = async () => {
      const Plotly = await loadPlotly();
      await Plotly.react(plot, figure.data, themed(figure), { responsive: true, displayModeBar: false });
      holder.dataset.drawn = "1";
    };
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      draw();
      new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    }, { rootMargin: "200px" });
    watch.observe(holder);
  }

  // --- the page -------------------------------------------------------------------------------
  function openTwins() {
    for (const twin of document.querySelectorAll("details.kvlab-twin:not([open])")) {
      twin.open = true;
      twin.dataset.reclose = "1";
    }
  }
  function closeTwins() {
    for (const twin of document.querySelectorAll("details.kvlab-twin[data-reclose]")) {
      twin.open = false;
      delete twin.dataset.reclose;
    }
  }

  /** A folded cell's summary has a visible text; the label that its script adds hides it. */
  function bareSummaries() {
    for (const summary of document.querySelectorAll('summary[aria-label="Toggle hidden content"]')) {
      summary.removeAttribute("aria-label");
    }
  }

  /** Headings of a sortable table become buttons; data-value of the cells is what is compared. */
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "kvlab-sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const number = head.dataset.sort === "number";
        const value = (row) => row.cells[column].dataset.value;
        const order = (a, b) => (number ? value(a) - value(b) : value(a).localeCompare(value(b)));
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
      });
    });
  }

  /** A formula wider than its line scrolls; what scrolls must be reachable by keyboard. */
  function reachFormulas() {
    for (const formula of document.querySelectorAll(".bd-article .math, .bd-article mjx-container")) {
      if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
    }
  }

  function watchFormulas() {
    (globalThis.MathJax?.startup?.promise ?? Promise.resolve()).then(reachFormulas);
    addEventListener("resize", reachFormulas);
  }

  function begin() {
    document.querySelectorAll("table.kvlab-sortable").forEach(sortable);
    bareSummaries();
    addEventListener("load", bareSummaries);
    addEventListener("load", watchFormulas);
    mountWidgets().then(() => { document.documentElement.dataset.kvlabReady = "1"; });
    document.querySelectorAll(".kvlab-figure").forEach(drawFigure);
    addEventListener("beforeprint", openTwins);
    addEventListener("afterprint", closeTwins);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
