// Which query head reads which KV head: MHA, GQA and MQA on one slider, an MLA row beside them.

function render({ model, el }) {
  const root = frame({ model, el }, "Who reads whose K and V");
  const models = Object.fromEntries(model.get("models").map((m) => [m.slug, m]));
  const shape = () => models[picker.value];
  const divisors = (n) => Array.from({ length: n }, (_, i) => i + 1).filter((d) => n % d === 0);

  const picker = selectControl({
    label: "shape of", value: model.get("model"),
    options: model.get("models").map((m) => [m.slug, m.name]),
    onInput: () => { model.set("model", picker.value); setHeads(shape().num_kv_heads); draw("all"); },
  });
  // The slider runs over the divisors of h, so that every stop is a shape that exists.
  const kv = rangeControl({
    label: "KV heads", min: 0, max: 1, value: 0,
    format: (i) => `${divisors(shape().num_heads)[i] ?? ""}`,
    onInput: (i) => { model.set("num_kv_heads", divisors(shape().num_heads)[i]); model.save_changes(); draw("shape"); },
  });
  const head = rangeControl({
    label: "follow query head", min: 0, max: 1, value: 0,
    onInput: (j) => { model.set("query_head", j); model.save_changes(); draw("head"); },
  });
  const tokens = rangeControl({
    label: "context", min: 10, max: 17, value: Math.round(Math.log2(model.get("tokens"))),
    format: (i) => `${format.integer(2 ** i)} tokens`,
    onInput: (i) => { model.set("tokens", 2 ** i); model.save_changes(); draw("shape"); },
  });
  const buttons = [["MHA", (m) => m.num_heads], ["As published", (m) => m.num_kv_heads], ["MQA", () => 1]]
    .map(([label, pick]) => buttonControl({ label, onPress: () => { setHeads(pick(shape())); draw("shape"); } }));
  const picture = h("figure", {});
  const facts = tableView({
    caption: "What one layer keeps",
    head: ["", "numbers", "bytes", "all layers", "of MHA"],
  });
  const tensors = tableView({ caption: "Tensors of one layer in a decode step, batch 1", head: ["", "shape", "bytes"] });
  for (const view of [facts, tensors]) view.element.classList.add("kvlab-figures");
  const said = liveRegion();
  root.append(
    h("div", { class: "kvlab-row" }, picker.element, buttons.map((b) => b.element)),
    h("div", { class: "kvlab-row" }, kv.element, head.element, tokens.element),
    legend([["q", "query heads"], ["cache", "KV heads, kept"], ["fg", "the head you follow"]]),
    picture, said.element, facts.element, tensors.element,
  );

  function setHeads(count) {
    const all = divisors(shape().num_heads);
    kv.setLimits(0, all.length - 1);
    kv.set(all.indexOf(count));
    model.set("num_kv_heads", count);
    model.save_changes();
  }

  function draw(what) {
    const m = shape();
    const [heads, kept, width] = [m.num_heads, model.get("num_kv_heads"), m.head_dim];
    const group = heads / kept;
    head.setLimits(0, heads - 1);
    if (head.value > heads - 1) head.set(heads - 1);
    const j = head.value;
    const mine = Math.floor(j / group);
    picture.replaceChildren(
      h("figcaption", {}, `${heads} query heads of one layer`), diagram(heads, kept, j),
      h("p", { class: "kvlab-muted", style: "font-size: 0.88em" },
        `${kept} KV head${kept > 1 ? "s" : ""} in the cache, read by ${group} query head${group > 1 ? "s" : ""} each`));
    const full = (count) => ({ num_kv_heads: count, key_dim: width, value_dim: width });
    const mha = layer_kv_bytes_per_token(full(heads));
    const n = model.get("tokens");
    const row = (label, layer, text) => {
      const each = layer_kv_bytes_per_token(layer);
      return [label, text, format.integer(each), format.gib(m.num_layers * n * each), format.percent(each / mha)];
    };
    const latent = model.get("latent");
    facts.setCaption(`${m.name} in bf16: one token in one layer, then ${format.integer(n)} tokens in all layers`);
    facts.update([
      row(`MHA: ${heads} KV heads`, full(heads), `2 x ${heads} x ${width}`),
      row(`here: ${kept} KV heads`, full(kept), `2 x ${kept} x ${width}`),
      row("MQA: 1 KV head", full(1), `2 x 1 x ${width}`),
      row("MLA: DeepSeek-V3's row", latent, `1 x ${latent.key_dim}`),
    ]);
    const cell = layer_kv_bytes_per_token(full(kept)) / 2;
    tensors.update([
      ["query", `[1, ${heads}, 1, ${width}]`, format.integer(2 * heads * width)],
      ["K in the cache", `[1, ${kept}, ${format.integer(n)}, ${width}]`, format.gib(n * cell)],
      ["V in the cache", `[1, ${kept}, ${format.integer(n)}, ${width}]`, format.gib(n * cell)],
      ["scores", `[1, ${heads}, 1, ${format.integer(n)}]`, format.gib(2 * heads * n)],
    ]);
    const text = `Query head ${j} reads KV head ${j} // ${group} = ${mine}, with query heads ${mine * group} to ${(mine + 1) * group - 1}.`;
    said.say(what === "head" ? text : `${heads} query heads on ${kept} KV heads. ${text}`);
  }

  function diagram(heads, kept, j) {
    const [width, top, bottom, height] = [640, 14, 118, 136];
    const group = heads / kept;
    const mine = Math.floor(j / group);
    const x = (i, count) => ((i + 0.5) * width) / count;
    const radius = Math.max(2, Math.min(11, width / heads / 2.4));
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, role: "img",
      "aria-label": `${heads} query heads in ${kept} groups of ${group}; query head ${j} reads KV head ${mine}`,
    });
    for (let i = 0; i < heads; i += 1) {
      const to = Math.floor(i / group);
      image.append(svg("line", {
        x1: x(i, heads), y1: top + radius, x2: x(to, kept), y2: bottom - 12,
        stroke: i === j ? colour("fg") : to === mine ? colour("cache") : "var(--kv-line)",
        "stroke-width": i === j ? 3 : to === mine ? 1.8 : 1,
      }));
    }
    for (let i = 0; i < heads; i += 1) {
      image.append(svg("circle", { cx: x(i, heads), cy: top, r: radius, fill: i === j ? colour("fg") : colour("q") }));
    }
    const side = Math.max(4, Math.min(26, width / kept / 1.5));
    for (let i = 0; i < kept; i += 1) {
      image.append(svg("rect", {
        x: x(i, kept) - side / 2, y: bottom - 12, width: side, height: 24, rx: 3, fill: colour("cache"),
        stroke: i === mine ? colour("fg") : "none", "stroke-width": 3,
      }));
      if (side > 18) image.append(svg("text", { x: x(i, kept), y: bottom + 5, "text-anchor": "middle", style: "fill: #14181d" }, String(i)));
    }
    return image;
  }

  setHeads(model.get("num_kv_heads"));
  head.setLimits(0, shape().num_heads - 1);
  head.set(model.get("query_head"));
  model.on("change:num_kv_heads change:query_head change:tokens", () => {
    const all = divisors(shape().num_heads);
    if (all[kv.value] !== model.get("num_kv_heads") && all.includes(model.get("num_kv_heads"))) kv.set(all.indexOf(model.get("num_kv_heads")));
    if (head.value !== model.get("query_head")) head.set(model.get("query_head"));
    draw("shape");
  });
  draw("all");
}

export default { render };
