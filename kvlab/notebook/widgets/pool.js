// The block pool of chapter 5, state by state. The first trace was recorded; every other one is
// made by kvlab's own blocks.py, in the kernel or in this page.

const POOL_STYLE = `
.kvp-pool { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr)); gap: 0.4rem; margin: 0.4rem 0; padding: 0; list-style: none; }
.kvp-block { border: 1px solid var(--kv-line); border-radius: 6px; padding: 0.25rem 0.35rem 0.35rem; min-width: 0; margin: 0; }
.kvp-block.kvp-chosen { outline: 3px solid var(--kv-focus); }
.kvp-block.kvp-bad { border: 2px solid var(--kv-waste-text); }
.kvp-block.kvp-new { border-color: var(--kv-fg); border-width: 2px; }
.kvp-head { display: flex; justify-content: space-between; gap: 0.3rem; font-size: 0.8rem; white-space: nowrap; }
.kvp-cells { display: flex; gap: 2px; margin-top: 0.2rem; flex-wrap: wrap; }
.kvp-cell { flex: 1 1 0; min-width: 7px; height: 1.05rem; border-radius: 2px; border: 1px solid transparent; }
.kvp-cell.kvp-empty { border-color: var(--kv-line); }
.kvp-cell.kvp-waste { border: 1px dashed var(--kv-waste-text); }
.kvp-cell.kvp-here { outline: 3px solid var(--kv-focus); outline-offset: 1px; }
.kvp-seq { display: flex; flex-wrap: wrap; gap: 0.2rem; align-items: center; margin: 0.35rem 0; }
.kvlab .kvp-seq button { padding: 0 0.3rem; min-height: 1.75rem; min-width: 1.75rem; font-size: 0.82rem; border-radius: 3px; border-width: 0 0 4px; border-style: solid; }
.kvlab .kvp-seq button[aria-pressed="true"] { outline: 3px solid var(--kv-focus); }
.kvp-name { min-width: 8.5rem; font-size: 0.85rem; }
@media (max-width: 30rem) { .kvp-name { flex-basis: 100%; } }
.kvp-form { border: 0; border-top: 1px solid var(--kv-line); padding: 0.2rem 0 0; margin: 0.6rem 0 0; min-width: 0; }
.kvp-form legend { font-size: 0.85em; font-weight: 600; padding: 0 0.4rem 0 0; }
`;
const OWNER_HUES = ["one", "two", "four", "five", "three"];
const hueOf = (name) => OWNER_HUES[(name.charCodeAt(0) - 65) % OWNER_HUES.length];

/** One colour per owner, in stripes where a block is shared. */
function fillOf(owners) {
  const hues = [...new Set(owners)].map((name) => colour(hueOf(name)));
  if (hues.length === 1) return hues[0];
  const stops = hues.map((hue, i) => `${hue} ${(100 * i) / hues.length}% ${(100 * (i + 1)) / hues.length}%`);
  return `linear-gradient(to bottom, ${stops.join(", ")})`;
}
const CACHED_FILL = `repeating-linear-gradient(45deg, ${colour("cache")} 0 3px, transparent 3px 6px)`;

function render({ model, el }) {
  const root = frame({ model, el }, "The pool: who holds which block");
  const menus = model.get("menus");
  const [maxBlocks, maxSize, maxOperations] = menus.limits;
  let trace = model.get("trace");
  const settings = {
    num_blocks: model.get("num_blocks"), block_size: model.get("block_size"),
    prefix_caching: true, eviction: "lru", full_hit: "block",
  };
  let size = settings.block_size; // of the trace that is shown
  let asked = 0;
  let chosen = null; // {name, position}

  // --- the picture --------------------------------------------------------------------------
  const said = h("p", { role: "status", "aria-live": "polite", class: "kvlab-say", style: "min-height: 2.9em" });
  const counts = h("p", {});
  const blocks = h("ul", { class: "kvp-pool", "aria-label": "Blocks of the pool" });
  const freeList = h("p", {});
  const sequences = h("div", { role: "group", "aria-label": "Sequences and their tokens" });
  const path = h("p", { role: "status", "aria-live": "polite", style: "min-height: 2.9em" });
  const integrity = h("div", { role: "status", "aria-live": "polite" });
  const problem = h("p", { class: "kvlab-error", role: "alert" });

  const time = player({
    label: "operation", min: 0, max: trace.states.length - 1, value: Math.min(model.get("step"), trace.states.length - 1),
    seconds: 20, format: (v) => `${v} of ${trace.states.length - 1}`, onFrame: (v) => show(v),
  });
  const state = () => trace.states[time.value];

  function show(step) {
    if (model.get("step") !== step) { model.set("step", step); model.save_changes(); }
    draw();
  }

  function draw() {
    const now = state();
    const before = trace.states[time.value - 1];
    said.replaceChildren(h("span", { class: now.refused ? "kvlab-error" : null }, now.text));
    const c = now.counts;
    const rate = c.queried_tokens ? ` Prefix hits so far: ${c.hit_tokens} of ${c.queried_tokens} tokens.` : "";
    counts.textContent = `${c.in_use} blocks in use, ${c.free} free (${c.cached} of them cached), ${c.evictions} evicted.${rate}`;
    if (chosen && !now.sequences.some((s) => s.name === chosen.name && chosen.position < s.computed)) chosen = null;
    drawBlocks(now, before);
    const freeIds = now.free.map((id) => (now.blocks[id]?.cached ? `${id}*` : `${id}`));
    freeList.textContent = `Free list, next out first (* cached): ${freeIds.join(" ") || "empty"}`;
    drawSequences(now);
    drawPath(now);
    drawIntegrity(now);
  }

  function drawBlocks(now, before) {
    const free = new Set(now.free);
    const spot = chosen && place(now);
    blocks.replaceChildren(...now.blocks.map((block) => {
      const old = before?.blocks[block.id];
      const fresh = old && block.ref > 0 && (old.ref === 0 || old.owners.join() !== block.owners.join());
      const bad = now.findings.some((text) => new RegExp(`\\bblock ${block.id}\\b`).test(text));
      const status = block.id === 0 ? "null block" : block.ref > 0 ? block.owners.join(" ") || "?"
        : block.cached ? "cached" : free.has(block.id) ? "free" : "lost";
      const cells = Array.from({ length: size }, (_, offset) => {
        const cell = h("span", { class: "kvp-cell" });
        if (block.id === 0) cell.style.background = colour("padding");
        else if (block.ref > 0 && offset < block.filled) cell.style.background = block.owners.length ? fillOf(block.owners) : colour("waste");
        else if (block.ref > 0) cell.classList.add("kvp-waste");
        else if (block.cached) cell.style.background = CACHED_FILL;
        else cell.classList.add("kvp-empty");
        if (spot && spot.block === block.id && spot.offset === offset) cell.classList.add("kvp-here");
        return cell;
      });
      const held = block.ref > 1 ? `, held ${block.ref} times` : "";
      const words = block.id === 0 ? "block 0: the null block, never handed out"
        : `block ${block.id}: ${block.ref > 0 ? `held by ${status}${held}, ${block.filled} of ${size} slots filled` : status}`
          + `${block.ref > 0 && block.cached ? ", published" : ""}`;
      const classes = ["kvp-block", spot?.block === block.id && "kvp-chosen", bad && "kvp-bad", fresh && "kvp-new"];
      return h("li", { class: classes.filter(Boolean).join(" ") },
        h("span", { class: "kvlab-hidden" }, words),
        h("div", { class: "kvp-head", "aria-hidden": "true" }, h("strong", {}, String(block.id)),
          h("span", {}, status + (block.ref > 1 ? ` ×${block.ref}` : "") + (block.ref > 0 && block.cached ? " #" : ""))),
        h("div", { class: "kvp-cells", "aria-hidden": "true" }, cells));
    }));
  }

  function drawSequences(now) {
    const focused = sequences.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    sequences.replaceChildren(...now.sequences.map((seq) => h("div", { class: "kvp-seq" },
      h("span", { class: "kvp-name" }, h("strong", {}, seq.name), ` table [${seq.table.join(", ")}]`),
      seq.words.map((word, position) => {
        const key = `${seq.name}/${position}`;
        const pressed = chosen?.name === seq.name && chosen.position === position;
        const button = h("button", {
          type: "button", "data-key": key, "aria-pressed": String(pressed),
          "aria-label": `${seq.name}, position ${position}: ${word}`,
          onClick: () => { chosen = pressed ? null : { name: seq.name, position }; draw(); },
        }, word);
        button.style.borderColor = colour(hueOf(seq.name));
        if (position % size === 0 && position) button.style.marginInlineStart = "0.6rem";
        return button;
      }))));
    if (!now.sequences.length) sequences.append(h("p", { class: "kvlab-muted" }, "No sequence is here."));
    if (focused) sequences.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  /** Block and offset of the chosen token. */
  function place(now) {
    const seq = now.sequences.find((s) => s.name === chosen.name);
    const entry = Math.floor(chosen.position / size);
    return { table: seq.table, entry, block: seq.table[entry], offset: chosen.position % size };
  }

  function drawPath(now) {
    if (!chosen) { path.textContent = "Press a token to see its way to a slot."; return; }
    const { table, entry, block, offset } = place(now);
    path.textContent = `Position ${chosen.position} of ${chosen.name}: table entry ${chosen.position} // ${size} = ${entry}, `
      + `[${table.join(", ")}][${entry}] = block ${block}, offset ${chosen.position} % ${size} = ${offset}, `
      + `slot ${block} × ${size} + ${offset} = ${block * size + offset}.`;
  }

  function drawIntegrity(now) {
    const well = now.findings.length === 0;
    integrity.replaceChildren(h("p", {}, h("span", { class: well ? "kvlab-good" : "kvlab-error" },
      well ? "check_integrity(): all is well." : `check_integrity() found ${now.findings.length}:`)));
    if (!well) integrity.append(h("ul", {}, now.findings.map((text) => h("li", {}, text))));
  }

  // --- controls: all of them ask Python --------------------------------------------------------
  const ready = h("fieldset", { disabled: true, style: "border:0;padding:0;margin:0;min-width:0" });
  const started = startButton(() => { ready.disabled = false; });

  async function rerun(operations, at = null, more = {}) {
    asked += 1;
    const mine = asked;
    time.stop();
    problem.textContent = "";
    try {
      const used = { ...settings };
      const answer = await ask(model, "pool_trace", { operations, ...used, ...more });
      if (mine !== asked) return;
      trace = answer;
      size = used.block_size;
      const last = trace.states.length - 1;
      time.setLimits(0, last);
      time.set(Math.min(at ?? last, last));
      fillNames();
      show(time.value);
    } catch (error) {
      if (mine === asked) problem.textContent = `${error.name}: ${error.message}`;
    }
  }

  /** One more operation after the state that is shown; later ones are dropped. */
  function act(operation) {
    const kept = trace.operations.slice(0, time.value);
    if (kept.length >= maxOperations) {
      problem.textContent = `${maxOperations} operations are enough for one pool: start again.`;
      return;
    }
    rerun([...kept, operation]);
  }

  const change = (name) => (value) => { settings[name] = value; rerun(trace.operations, time.value); };
  const option = (value, words) => [value, words];
  const numBlocks = numberControl({ label: "blocks", min: 1, max: maxBlocks, value: settings.num_blocks, onInput: change("num_blocks") });
  const blockSize = numberControl({ label: "block size, tokens", min: 1, max: maxSize, value: settings.block_size, onInput: change("block_size") });
  const eviction = selectControl({
    label: "eviction", value: settings.eviction, onInput: change("eviction"),
    options: [option("lru", "oldest chain, tail first"), option("head_first", "oldest chain, head first")],
  });
  const fullHit = selectControl({
    label: "a prompt that is fully cached", value: settings.full_hit, onInput: change("full_hit"),
    options: [option("block", "computes its last block"), option("token", "computes one token")],
  });
  const caching = checkControl({ label: "prefix caching", value: true, onInput: change("prefix_caching") });

  const text = selectControl({ label: "text", options: Object.entries(menus.texts), value: Object.keys(menus.texts)[0] });
  const words = numberControl({ label: "tokens", min: 1, max: menus.longest, value: 9 });
  const arrive = buttonControl({ label: "Arrive", onPress: () => {
    if (words.valid) act({ op: "arrive", text: text.value, length: words.value });
  } });

  const who = selectControl({ label: "sequence", options: ["A"], value: "A" });
  const doTo = (label, op, more = {}) => buttonControl({ label, onPress: () => {
    if (who.value) act({ op, name: who.value, ...more });
  } }).element;
  function fillNames() {
    const names = state().sequences.map((s) => s.name);
    const had = who.value;
    who.input.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    who.input.value = names.includes(had) ? had : names.at(-1) ?? "";
  }

  const what = selectControl({ label: "by hand", options: Object.entries(menus.breaks), value: Object.keys(menus.breaks)[0] });
  const which = numberControl({ label: "which one", min: 0, max: 99, value: 1 });
  const breakIt = buttonControl({ label: "Break it", onPress: () => {
    if (which.valid) act({ op: "break", what: what.value, number: which.value });
  } });
  const seed = numberControl({ label: "seed", min: 0, max: 9999, value: 7 });
  const random = buttonControl({ label: "Random workload", onPress: () => {
    if (seed.valid) rerun(null, 0, { seed: seed.value, length: 40 });
  } });
  const restart = buttonControl({ label: "Empty pool", onPress: () => rerun([], 0) });

  const form = (title, ...parts) => h("fieldset", { class: "kvp-form" }, h("legend", {}, title), h("div", { class: "kvlab-row" }, parts));
  ready.append(
    form("Pool and policy", numBlocks.element, blockSize.element, eviction.element, fullHit.element, caching.element),
    form("A new sequence", text.element, words.element, arrive.element, seed.element, random.element, restart.element),
    form("One that is here", who.element, doTo("Append", "append"), doTo("Fork", "fork"),
      doTo("Roll back 3", "truncate", { drop: 3 }), doTo("Free", "free"), doTo("Preempt", "preempt")),
    form("Break the pool", what.element, which.element, breakIt.element),
  );

  root.append(h("style", {}, POOL_STYLE), time.element, said, counts, blocks,
    h("p", { class: "kvlab-muted" }, "Stripes: shared. ×n: number of holders. #: published, others can find it. "
      + "Dashed: taken and empty. Hatched: free, still cached."),
    freeList, sequences, path, integrity, started.element, problem, ready);
  fillNames();
  draw();
  model.on("change:step", () => {
    if (model.get("step") !== time.value) { time.set(model.get("step")); draw(); }
  });
}

export default { render };
