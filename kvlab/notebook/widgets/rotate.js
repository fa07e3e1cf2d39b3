// One pair of a head on a circle: q turns by m, k by n, the score sees m - n only.

function render({ model, el }) {
  const root = frame({ model, el }, "Rotate a pair by position");
  const frequencies = model.get("inv_freq");
  const keyAngle = (model.get("key_degrees") * Math.PI) / 180;
  const start = { m: model.get("query_pos"), n: model.get("key_pos") };
  const last = 64;
  const shown = frequencies.map((_, i) => i).filter((i) => i < 8 || i % 4 === 0 || i === frequencies.length - 1);
  const query = rangeControl({ label: "query at m", min: 0, max: last, value: start.m, onInput: moved });
  const key = rangeControl({ label: "key at n", min: 0, max: last, value: start.n, onInput: moved });
  const pair = selectControl({
    label: "pair", value: String(model.get("pair")), onInput: () => draw(""),
    options: shown.map((i) => [String(i), `${i}: ${frequencies[i].toPrecision(3)} rad a position`]),
  });
  bind(model, "query_pos", query);
  bind(model, "key_pos", key);
  const shift = (label, dm, dn) => buttonControl({ label, onPress: () => {
    if (query.value + dm > last || key.value + dn > last) return draw("That is the end of the slider.");
    const before = score();
    query.set(query.value + dm);
    key.set(key.value + dn);
    keep();
    const after = score();
    draw(Math.abs(after - before) < 1e-9
      ? `${label}: the score stays ${format.number(after, 3)}.`
      : `${label}: the score goes from ${format.number(before, 3)} to ${format.number(after, 3)}.`);
  } });
  const buttons = [
    shift("Query + 1", 1, 0), shift("Key + 1", 0, 1), shift("Both + 1", 1, 1), shift("Both + 10", 10, 10),
    buttonControl({ label: "Reset", onPress: () => {
      query.set(start.m); key.set(start.n); keep(); draw("Back at the start.");
    } }),
  ];
  const pictures = h("div", { class: "kvlab-row", style: "align-items: center" });
  const facts = tableView({ caption: "This pair now", head: ["", "position", "turned by", "direction"] });
  const said = liveRegion();
  root.append(
    h("div", { class: "kvlab-row" }, query.element, key.element, pair.element),
    h("div", { class: "kvlab-row" }, buttons.map((button) => button.element)),
    legend([["q", "query, rotated"], ["k", "key, rotated"], ["muted", "both before rotation"]]),
    pictures, said.element, facts.element,
  );

  function keep() {
    model.set("query_pos", query.value);
    model.set("key_pos", key.value);
    model.save_changes();
  }
  function frequency() { return frequencies[Number(pair.value)]; }
  function scoreAt(distance) { return Math.cos(distance * frequency() - keyAngle); }
  function score() { return scoreAt(query.value - key.value); }
  function moved() { draw(""); }
  const degrees = (angle) => `${format.number(((angle * 180) / Math.PI) % 360, 0)}°`;

  function draw(text) {
    const [m, n, f] = [query.value, key.value, frequency()];
    pictures.replaceChildren(circle(m * f, keyAngle + n * f), strip(m - n));
    facts.update([
      ["query", m, degrees(m * f), degrees(m * f)],
      ["key", n, degrees(n * f), degrees(keyAngle + n * f)],
      ["difference", m - n, degrees((m - n) * f), degrees((m - n) * f - keyAngle)],
    ]);
    said.say(text || `The score q · k is ${format.number(score(), 3)}, the cosine of the last direction.`);
  }

  function circle(queryAngle, rotatedKey) {
    const image = svg("svg", {
      viewBox: "-125 -125 250 250", width: 250, role: "img",
      "aria-label": `Query at ${degrees(queryAngle)}, key at ${degrees(rotatedKey)}, score ${format.number(score(), 3)}`,
    });
    image.append(svg("circle", { r: 100, fill: "none", stroke: "var(--kv-line)" }));
    image.append(arrow(0, "muted", "", 2), arrow(keyAngle, "muted", "", 2));
    image.append(arrow(queryAngle, "q", "q", 4), arrow(rotatedKey, "k", "k", 4));
    return image;
  }

  function arrow(angle, kind, name, width) {
    const [x, y] = [100 * Math.cos(angle), -100 * Math.sin(angle)];
    const barb = (turn) => `${x - 14 * Math.cos(angle + turn)} ${y + 14 * Math.sin(angle + turn)}`;
    return svg("g", { stroke: colour(kind), "stroke-width": width, fill: "none" },
      svg("line", { x1: 0, y1: 0, x2: x, y2: y, "stroke-dasharray": name ? null : "4 4" }),
      name ? svg("polyline", { points: `${barb(0.4)} ${x} ${y} ${barb(-0.4)}` }) : null,
      name ? svg("text", { x: x * 1.14, y: y * 1.14 + 5, "text-anchor": "middle", stroke: "none" }, name) : null);
  }

  function strip(distance) {
    const [left, width, height, middle] = [34, 330, 206, 90];
    const at = (d) => left + ((d + last) / (2 * last)) * (width - left - 8);
    const line = [];
    for (let d = -last; d <= last; d += 0.25) line.push(`${at(d).toFixed(1)},${(middle - 70 * scoreAt(d)).toFixed(1)}`);
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, role: "img",
      "aria-label": `Score against distance; at distance ${distance} it is ${format.number(score(), 3)}`,
    });
    for (const value of [1, 0, -1]) {
      image.append(
        svg("line", { x1: left, x2: width - 8, y1: middle - 70 * value, y2: middle - 70 * value, stroke: "var(--kv-line)" }),
        svg("text", { x: left - 6, y: middle - 70 * value + 4, "text-anchor": "end" }, String(value)));
    }
    for (const d of [-64, -32, 0, 32, 64]) {
      image.append(svg("text", { x: at(d), y: 180, "text-anchor": d === 64 ? "end" : d === -64 ? "start" : "middle" }, String(d)));
    }
    image.append(
      svg("text", { x: left, y: 198 }, "score against the distance m − n"),
      svg("polyline", { points: line.join(" "), fill: "none", stroke: "var(--kv-muted)", "stroke-width": 1.5 }),
      svg("circle", { cx: at(distance), cy: middle - 70 * score(), r: 6, fill: colour("fg") }));
    return image;
  }

  model.on("change:query_pos change:key_pos", () => draw(""));
  draw("");
}

export default { render };
