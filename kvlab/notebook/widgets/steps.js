// The step-through of chapter 7. A row is a request, a column is an engine step, and the number in
// a cell is how many of its tokens ran. The first trace was recorded; the others Python computes.

const KINDS = {
  prefill: ["one", "prefill: prompt tokens"],
  decode: ["two", "decode: one new token"],
  verify: ["four", "decode with drafts"],
  recompute: ["waste", "computed again after a preemption"],
};

function render({ model, el }) {
  const root = frame({ model, el }, "Engine steps: who runs, and who waits");
  let question = structuredClone(model.get("questions")[model.get("workload")]);
  let trace = model.get("trace");
  let asked = 0;
  const reasons = model.get("reason_text");

  // --- controls ------------------------------------------------------------------------
  const ready = h("fieldset", { class: "kvlab-plain", disabled: true, style: "border:0;padding:0;margin:0;min-width:0" });
  const started = startButton(() => { ready.disabled = false; });
  const setting = (name, control) => { controls.push([() => control.set(question.settings[name])]); return control; };
  const controls = [];
  const number = (name, label, min, max) => setting(name, numberControl({
    label, min, max, value: question.settings[name],
    onInput: (value) => { question.settings[name] = value; ask_again(); },
  }));
  const choice = (name, label, options) => setting(name, selectControl({
    label, options, value: question.settings[name],
    onInput: (value) => { question.settings[name] = value; ask_again(); },
  }));
  const workload = selectControl({
    label: "workload", options: Object.entries(model.get("titles")), value: model.get("workload"),
    onInput: (name) => {
      question = structuredClone(model.get("questions")[name]);
      fill_controls();
      ask_again();
    },
  });
  const budget = number("max_num_batched_tokens", "token budget of a step", 1, 128);
  const threshold = number("long_prefill_token_threshold", "long-prefill threshold (0: off)", 0, 128);
  const seqs = number("max_num_seqs", "requests at once", 1, 12);
  const pool = numberControl({
    label: `pool, blocks of ${question.block_size} tokens`, min: 1, max: 64, value: question.num_blocks,
    onInput: (value) => { question.num_blocks = value; ask_again(); },
  });
  const admission = choice("admission", "admission", [
    ["first_chunk", "first chunk fits"], ["full_length", "whole prompt fits"]]);
  const line = choice("head_of_line", "if the first in line does not fit", [
    ["strict", "nobody passes"], ["skip", "lighter ones pass"]]);
  const caching = checkControl({
    label: "prefix caching", value: question.prefix_caching,
    onInput: (value) => { question.prefix_caching = value; ask_again(); },
  });
  const arrivals = h("div", {});
  ready.append(
    h("div", { class: "kvlab-row" }, workload.element, budget.element, threshold.element, pool.element,
      seqs.element, admission.element, line.element, caching.element),
    h("details", {}, h("summary", {}, "The requests: when they come, how long they are"), arrivals),
  );

  function fill_controls() {
    controls.forEach(([set]) => set());
    pool.set(question.num_blocks);
    caching.input.checked = question.prefix_caching;
    const fields = [["step", "comes at step", 0, 60], ["prompt", "prompt tokens", 1, 120],
      ["outputs", "outputs", 1, 60], ["shared", "of the prompt, shared with others", 0, 120]];
    arrivals.replaceChildren(...question.arrivals.map((arrival) => h("div", { class: "kvlab-row", role: "group", "aria-label": `request ${arrival.id}` },
      h("strong", { style: "min-width:3.5em" }, arrival.id),
      fields.map(([name, label, min, max]) => numberControl({
        label, min, max, value: arrival[name],
        onInput: (value) => { arrival[name] = value; ask_again(); },
      }).element))));
  }

  // --- picture -------------------------------------------------------------------------
  const problem = h("p", { class: "kvlab-error", role: "alert" });
  const picture = h("div", { class: "kvlab-scroll", tabindex: "0", role: "region", "aria-label": "requests and steps" });
  const totals = h("p", { class: "kvlab-muted" });
  const steps = player({
    label: "step", min: 0, max: 1, value: model.get("step"), seconds: 8,
    onFrame: (value) => { model.set("step", value); model.save_changes(); draw_step(); },
  });
  const said = liveRegion();
  const people = tableView({ caption: "This step, request by request", head: ["request", "tokens", "positions", "what happens"] });
  people.element.classList.add("kvlab-text");
  const rows = tableView({ caption: "Its ragged batch, one row a token", head: ["row", "request", "req_indices", "query_pos", "position", "slot", "logits"] });
  const lengths = h("p", { class: "kvlab-muted" });
  root.append(
    legend([...Object.values(KINDS), ["cache", "left edge: found in the prefix cache"], ["padding", "waits (× preempted)"]]),
    picture, totals, steps.element, said.element, started.element, problem, ready, people.element,
    h("details", { open: true }, h("summary", {}, "The ragged batch of this step"), lengths, rows.element),
  );

  function draw() {
    const last = trace.steps.length - 1;
    steps.setLimits(0, last);
    steps.set(Math.min(model.get("step"), last));
    const t = trace.totals;
    totals.textContent = `${t.num_steps} steps, ${t.num_scheduled_tokens} tokens computed, ${t.num_cached_tokens} spared by prefix hits, `
      + `${t.num_preemptions} preemptions: ${t.num_dropped_tokens} tokens dropped, ${t.num_resumed_tokens} of them found again, ${t.num_recomputed_tokens} computed again.`;
    problem.textContent = Object.values(trace.refused).join(" ");
    picture.replaceChildren(grid());
    draw_step();
  }

  const SIZE = { cell: 30, gap: 3, left: 58, top: 20 };
  function grid() {
    const { cell, gap, left, top } = SIZE;
    const names = question.arrivals.map((arrival) => arrival.id);
    const height = top + names.length * (cell + gap) + 44;
    const width = left + trace.steps.length * (cell + gap) + 4;
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, style: "max-width:none", role: "img",
      "aria-label": `${names.length} requests over ${trace.steps.length} steps; the table below says the selected step`,
    });
    const mark = svg("rect", { y: 0, width: cell + gap + 2, height: height - 1, rx: 5, fill: "none", stroke: "var(--kv-focus)", "stroke-width": 2 });
    image.mark = mark;
    names.forEach((name, row) => image.append(svg("text", { x: 2, y: top + row * (cell + gap) + cell / 2 + 4, "font-weight": 600 }, name)));
    const floor = top + names.length * (cell + gap);
    image.append(svg("text", { x: 2, y: floor + 14 }, "tokens"), svg("text", { x: 2, y: floor + 34 }, "free"));
    trace.steps.forEach((record, column) => {
      const x = left + column * (cell + gap);
      image.append(svg("text", { x: x + cell / 2, y: 13, "text-anchor": "middle" }, String(record.step)));
      names.forEach((name, row) => draw_cell(image, record, name, x, top + row * (cell + gap)));
      const filled = (cell * record.used) / record.budget;
      image.append(
        svg("rect", { x, y: floor + 2, width: cell, height: 15, fill: "none", stroke: "var(--kv-line)" }),
        svg("rect", { x, y: floor + 2, width: filled, height: 15, fill: colour("padding"), "fill-opacity": 0.7 }),
        svg("text", { x: x + cell / 2, y: floor + 14, "text-anchor": "middle" }, String(record.used)),
        svg("text", { x: x + cell / 2, y: floor + 34, "text-anchor": "middle" }, String(record.free_after)),
        svg("rect", {
          x, y: 0, width: cell + gap, height, fill: "transparent", style: "cursor:pointer",
          onClick: () => { steps.stop(); steps.set(column); model.set("step", column); model.save_changes(); draw_step(); },
        }),
      );
    });
    image.append(mark);
    return image;
  }

  function draw_cell(image, record, name, x, y) {
    const { cell } = SIZE;
    const share = record.shares.find((one) => one.id === name);
    const middle = { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" };
    if (share) {
      image.append(svg("rect", { x, y, width: cell, height: cell, rx: 4, fill: colour(KINDS[share.kind][0]), "fill-opacity": 0.5 }));
      if (share.cached) image.append(svg("rect", { x, y, width: 7, height: cell, rx: 2, fill: colour("cache") }));
      image.append(svg("text", { ...middle, x: middle.x + (share.cached ? 3 : 0), "font-weight": 600, style: "fill:var(--kv-fg)" }, String(share.tokens)));
    } else if (record.reasons[name]) {
      const lost = record.preempted.includes(name);
      image.append(
        svg("rect", { x: x + 1, y: y + 1, width: cell - 2, height: cell - 2, rx: 4, fill: "none", stroke: colour(lost ? "waste" : "padding"), "stroke-width": lost ? 2.5 : 1.5, "stroke-dasharray": lost ? null : "3 3" }),
        svg("text", middle, lost ? "×" : ""),
      );
    }
  }

  function draw_step() {
    const record = trace.steps[steps.value];
    if (!record) return;
    const { cell, gap, left } = SIZE;
    const image = picture.firstChild;
    const x = left + steps.value * (cell + gap) - 2.5;
    image.mark.setAttribute("x", x);
    if (x < picture.scrollLeft || x + cell + 12 > picture.scrollLeft + picture.clientWidth) {
      picture.scrollLeft = x - picture.clientWidth / 2;
    }
    const waiting = Object.entries(record.reasons);
    people.update([
      ...record.shares.map((share) => [share.id, share.tokens, span(share.start, share.seq_len), share_text(share, record)]),
      ...waiting.map(([name, reason]) => [name, 0, "", `waits: ${reasons[reason]}`]),
    ]);
    const batch = record.batch;
    const sampled = new Set(batch.logits_rows);
    lengths.textContent = `mode ${record.mode.toUpperCase()}; query_start_loc [${batch.query_start_loc.join(", ")}], seq_lens [${batch.seq_lens.join(", ")}]`;
    rows.update(batch.positions.map((position, row) => [row, batch.request_ids[batch.req_indices[row]],
      batch.req_indices[row], batch.query_pos[row], position, batch.slot_mapping[row], sampled.has(row) ? "sampled" : ""]));
    said.say(`Step ${record.step}, ${record.mode.toUpperCase()}: ${record.used} of ${record.budget} tokens for ${record.shares.length} requests; `
      + `${waiting.length} wait; ${record.free_after} of ${record.usable_blocks} blocks free after it.`);
  }

  const span = (start, stop) => (stop - start === 1 ? String(start) : `${start} to ${stop - 1}`);

  function share_text(share, record) {
    const parts = [share.kind === "recompute" ? `computes ${share.recomputed} again` : share.kind];
    if (share.cached) parts.push(`${share.cached} found in the prefix cache`);
    if (share.limited_by) parts.push(reasons[share.limited_by]);
    if (record.outputs[share.id]) parts.push("samples");
    return parts.join(", ");
  }

  // --- asking --------------------------------------------------------------------------
  let timer = null;
  function ask_again() {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      asked += 1;
      const mine = asked;
      try {
        const answer = await ask(model, "schedule_trace", question);
        if (mine !== asked) return;
        trace = answer;
        draw();
      } catch (error) {
        if (mine === asked) problem.textContent = error.message;
      }
    }, 200);
  }

  fill_controls();
  draw();
}

export default { render };
