// Recorded drift curves: KL against the decode step, one curve at a time, on a logarithmic axis.

function render({ model, el }) {
  const root = frame({ model, el }, "How far a shifted position drifts");
  const curves = model.get("curves");
  const unique = (name) => [...new Set(curves.map((curve) => curve[name]))];
  const offset = selectControl({
    label: "decode positions moved by", value: String(model.get("offset")), onInput: draw,
    options: unique("offset").sort((a, b) => a - b).map((value) => [String(value), `+${value}`]),
  });
  const layer = selectControl({ label: "in", value: model.get("layer"), onInput: draw, options: unique("layer") });
  model.on("change:offset", () => { offset.set(String(model.get("offset"))); draw(); });
  model.on("change:layer", () => { layer.set(model.get("layer")); draw(); });
  const find = (by, where) => curves.find((curve) => curve.offset === by && curve.layer === where);
  const picture = h("div", {});
  const facts = tableView({ caption: "KL against the right run, nats" });
  const said = liveRegion();
  root.append(
    h("div", { class: "kvlab-row" }, offset.element, layer.element),
    legend([["waste", "this choice"], ["muted", "moved by 1 in all layers, for comparison"]]),
    picture, facts.element, said.element,
    h("p", { class: "kvlab-muted" }, model.get("source")),
  );

  function draw() {
    const curve = find(Number(offset.value), layer.value);
    const mean = curve.kl.reduce((sum, value) => sum + value, 0) / curve.kl.length;
    picture.replaceChildren(chart(curve, find(1, "all layers")));
    const steps = [0, 1, 2, 4, 8, 16, 32, 64, 96].filter((step) => step < curve.kl.length);
    facts.update([["KL", ...steps.map((step) => (curve.kl[step] ? curve.kl[step].toPrecision(2) : "0"))]], ["decode step", ...steps]);
    const first = curve.first_differing === null ? "the most likely token never changes"
      : `the most likely token first differs at step ${curve.first_differing}`;
    said.say(`Moved by ${offset.value} in ${layer.value}: ${format.number(mean, 4)} nats a token on average, `
      + `perplexity ${format.number(curve.perplexity, 1)} instead of ${format.number(curve.right_perplexity, 1)}; ${first}.`);
  }

  function chart(curve, reference) {
    const narrow = (root.clientWidth || 640) < 480;
    const [left, width, height, top, bottom] = [52, narrow ? 340 : 620, 260, 12, 220];
    const [low, high] = [-6, 1.5];
    const last = curve.kl.length - 1;
    const x = (step) => left + (step / last) * (width - left - 12);
    const y = (value) => bottom - ((Math.min(high, Math.max(low, Math.log10(value || 1e-9))) - low) / (high - low)) * (bottom - top);
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, role: "img",
      "aria-label": `KL against decode step, moved by ${curve.offset} in ${curve.layer}; the numbers are in the table`,
    });
    for (let power = low; power <= 1; power += 1) {
      image.append(
        svg("line", { x1: left, x2: width - 12, y1: y(10 ** power), y2: y(10 ** power), stroke: "var(--kv-line)" }),
        svg("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, power < -2 ? `1e${power}` : String(10 ** power)));
    }
    for (let step = 0; step <= last; step += narrow ? 32 : 16) {
      image.append(svg("text", { x: x(step), y: bottom + 18, "text-anchor": "middle" }, String(step)));
    }
    image.append(svg("text", { x: left, y: height - 4 }, "KL in nats (log scale) against decode step"));
    for (const [one, kind, thick] of [[reference, "muted", 2], [curve, "waste", 2.5]]) {
      const points = one.kl.map((value, step) => (step ? `${x(step).toFixed(1)},${y(value).toFixed(1)}` : null));
      image.append(svg("polyline", {
        points: points.filter(Boolean).join(" "), fill: "none", stroke: colour(kind), "stroke-width": thick,
      }));
    }
    return image;
  }

  draw();
}

export default { render };
