// The triangle of chapter 1. One cell is one token in one forward: new, or computed again.

function render({ model, el }) {
  const root = frame({ model, el }, "What a naive loop computes again");
  const spec = { num_layers: model.get("num_layers") };
  const prompt = rangeControl({ label: "prompt p", min: 1, max: 16, value: model.get("prompt"), onInput: draw });
  const decode = rangeControl({
    label: "decode steps n", min: 1, max: 16, value: model.get("decode"),
    onInput: () => { steps.setLimits(1, decode.value); draw(); },
  });
  const cached = checkControl({ label: "with a KV cache", onInput: draw });
  const steps = player({
    label: "step t", min: 1, max: model.get("decode"), value: model.get("step"), seconds: 5, onFrame: draw,
  });
  const picture = h("div", {});
  const facts = tableView({ caption: "Up to this step", head: ["", "without cache", "with cache"] });
  const said = liveRegion();
  root.append(
    h("div", { class: "kvlab-row" }, prompt.element, decode.element, cached.element),
    steps.element,
    legend([["k", "new key"], ["v", "new value"], ["waste", "computed again"], ["cache", "read from the cache"]]),
    picture, facts.element, said.element,
  );

  function draw() {
    const [p, t, keep] = [prompt.value, steps.value, cached.value];
    const context = p + t;
    const repeated = kv_rows_recomputed(spec, p, t);
    const discarded = sum_of_contexts(p, t) - t;
    picture.replaceChildren(triangle(p, t, keep));
    facts.update([
      ["tokens fed in this step", context, 1],
      ["logit rows thrown away in this step", logit_rows_discarded(context), 0],
      ["logit rows thrown away so far", format.integer(discarded), 0],
      [`K/V rows computed again so far (${spec.num_layers} layers)`, format.integer(repeated), 0],
    ]);
    said.say(keep
      ? `Step ${t}: one token is fed, ${context - 1} are read from the cache.`
      : `Step ${t}: ${context} tokens are fed, ${context - 1} of them for the second time or more.`);
  }

  function triangle(p, t, keep) {
    const [cell, gap, left] = [18, 3, 58];
    const rows = t + 1;
    const width = left + (p + t) * (cell + gap);
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${rows * (cell + gap)}`, width, role: "img",
      "aria-label": `Prefill and ${t} decode steps; each row has one more token than the row above`,
    });
    for (let row = 0; row < rows; row += 1) {
      const y = row * (cell + gap);
      image.append(svg("text", { x: 0, y: y + cell - 5 }, row ? `t = ${row}` : "prefill"));
      for (let token = 0; token < p + row; token += 1) {
        const fresh = row === 0 || token === p + row - 1;
        const [x, half] = [left + token * (cell + gap), cell / 2];
        const part = (shift, width, kind) => svg("rect", { x: x + shift, y, width, height: cell, rx: 2, fill: colour(kind) });
        if (fresh) image.append(part(0, half, "k"), part(half, half, "v"));
        else image.append(part(0, cell, keep ? "cache" : "waste"));
      }
    }
    return image;
  }

  draw();
}

export default { render };
