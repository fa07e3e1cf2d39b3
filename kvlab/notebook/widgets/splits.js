// The launch of chapter 6. Every number comes from Python (facts); here they are only drawn.

function render({ model, el }) {
  const root = frame({ model, el }, "How splits fill a card");
  const names = model.get("names");
  const facts = model.get("facts");
  const cards = model.get("cards");
  const heads = model.get("num_kv_heads");
  const numbers = (table) => Object.keys(table).map(Number).sort((a, b) => a - b);
  const byCard = Object.values(facts)[0];
  const bySequence = Object.values(byCard)[0];
  const choices = numbers(Object.values(bySequence)[0]);
  const plain = (list) => list.map((n) => [String(n), format.integer(n)]);

  const card = selectControl({
    label: "card", options: Object.entries(cards), value: model.get("card"), onInput: relaunch,
  });
  const sequences = selectControl({
    label: "sequences", options: plain(numbers(byCard)), value: String(model.get("num_seqs")), onInput: relaunch,
  });
  const context = selectControl({
    label: "tokens in each", options: plain(numbers(bySequence)), value: String(model.get("context")), onInput: relaunch,
  });
  const splits = selectControl({
    label: "splits", value: String(model.get("splits")), onInput: relaunch,
    options: choices.map((n) => [String(n), n === 0 ? "by the rule" : n === 1 ? "none" : String(n)]),
  });
  const turns = player({ label: "turn", min: 0, max: 1, value: 0, seconds: 6, format: (v) => format.integer(v), onFrame: draw });
  const slots = h("div", {});
  const range = h("div", {});
  const table = tableView({ caption: "This launch", head: ["", ""] });
  const said = liveRegion();
  root.append(
    h("div", { class: "kvlab-row" }, card.element, sequences.element, context.element, splits.element),
    turns.element,
    legend([["cache", "reads a tile in this turn"], ["one", "read before"], ["padding", "slot without work"]]),
    h("h4", {}, "The card: one square is one slot for a program"), slots,
    h("h4", {}, "K and V of one sequence and one KV head, cut into splits"), range,
    table.element, said.element,
  );

  let now = {};

  function relaunch() {
    const row = facts[card.value][sequences.value][context.value][splits.value];
    now = Object.fromEntries(names.map((name, i) => [name, row[i]]));
    now.pairs = Number(sequences.value) * heads;
    turns.setLimits(0, now.waves * now.per_split);
    turns.set(1);
    draw();
  }

  /** Tiles of a split: all the same, but for the last; splits past it are empty. */
  function tilesOf(split) {
    if (split >= now.used) return 0;
    return split === now.used - 1 ? now.last : now.per_split;
  }

  /** Tiles that a program has read after a number of turns. Programs run wave after wave. */
  function progress(program, turn) {
    const wave = Math.floor(program / now.slots);
    const split = Math.floor(program / now.pairs);
    return Math.max(0, Math.min(tilesOf(split), turn - wave * now.per_split));
  }

  function draw() {
    const turn = turns.value;
    const wave = Math.min(now.waves - 1, Math.max(0, Math.floor((turn - 1) / now.per_split)));
    let [reading, read] = [0, 0];
    const state = [];
    for (let program = 0; program < now.programs; program += 1) {
      const done = progress(program, turn);
      const moved = turn > 0 && done > progress(program, turn - 1);
      read += done;
      reading += moved ? 1 : 0;
      const slot = program - wave * now.slots;
      if (slot >= 0 && slot < now.slots) state[slot] = moved ? "cache" : done > 0 ? "one" : null;
    }
    slots.replaceChildren(slotPicture(state, reading, wave));
    range.replaceChildren(rangePicture(turn));
    const bytes = reading * model.get("tile_bytes");
    table.update([
      ["splits", now.splits === 1 ? "none" : format.integer(now.splits)],
      ["programs = sequences × KV heads × splits", format.integer(now.programs)],
      ["slots on the card", format.integer(now.slots)],
      ["waves", format.integer(now.waves)],
      ["slots busy, over the launch", format.percent(now.busy, 0)],
      ["tiles a program reads", format.integer(now.per_split)],
      ["turns one after another", format.integer(now.waves * now.per_split)],
      ["K and V read, in all", format.gib(now.kv_bytes)],
      ["partial results for the merge", now.part_bytes ? format.gib(now.part_bytes) : "none"],
    ], [`${model.get("model_name")}, one layer, bf16`, cards[card.value]]);
    said.say(turn === 0 ? "Nothing is read yet."
      : `Turn ${format.integer(turn)}: ${format.integer(reading)} of ${format.integer(now.slots)} slots read a tile, `
        + `${format.gib(bytes)} at once. So far ${format.percent(read / (now.tiles * now.pairs), 0)} of K and V.`);
  }

  function slotPicture(state, reading, wave) {
    const [cell, gap, columns] = [14, 3, 33];
    const rows = Math.ceil(now.slots / columns);
    const width = columns * (cell + gap);
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${rows * (cell + gap)}`, width: "100%", style: `max-width: ${width}px`, role: "img",
      "aria-label": `Wave ${wave + 1} of ${now.waves}: ${reading} of ${now.slots} slots read a tile`,
    });
    for (let slot = 0; slot < now.slots; slot += 1) {
      const kind = state[slot] ?? "padding";
      image.append(svg("rect", {
        x: (slot % columns) * (cell + gap), y: Math.floor(slot / columns) * (cell + gap),
        width: cell, height: cell, rx: 3, fill: colour(kind), "fill-opacity": kind === "padding" ? 0.35 : 1,
      }));
    }
    return image;
  }

  function rangePicture(turn) {
    const [width, height] = [561, 34];
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width: "100%", style: `max-width: ${width}px`, role: "img",
      "aria-label": `${now.tiles} tiles in ${now.used} splits of up to ${now.per_split}`,
    });
    const scale = width / now.tiles;
    image.append(svg("rect", { x: 0, y: 4, width, height: 26, fill: colour("padding"), "fill-opacity": 0.35 }));
    for (let split = 0; split < now.used; split += 1) {
      const x = split * now.per_split * scale;
      const done = progress(split * now.pairs, turn);
      const moved = turn > 0 && done > progress(split * now.pairs, turn - 1);
      image.append(svg("rect", { x, y: 4, width: done * scale, height: 26, fill: colour("one") }));
      if (moved) {
        const tile = Math.max(scale, 3);
        image.append(svg("rect", { x: x + done * scale - tile, y: 4, width: tile, height: 26, fill: colour("cache") }));
      }
      if (split > 0) image.append(svg("line", { x1: x, x2: x, y1: 0, y2: height, stroke: "currentColor" }));
    }
    return image;
  }

  relaunch();
}

export default { render };
