"""What decoding costs: four widgets that run the formulas generated from costs.py.

The browser computes every number with the generated JavaScript; the twins say the same numbers by
Python, and tests compare the two.
"""

from __future__ import annotations

import traitlets

from kvlab import costs
from kvlab.configs import hardware, hardware_names, model_names, preset
from kvlab.notebook import require
from kvlab.notebook.formulas import FIELDS
from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.sheet import accounting_parameters, units
from kvlab.specs import LayerSpec, ModelSpec

#: Shapes of chapter 3: all full attention, from one KV head a query head down to one for all.
MODELS = (
    "smollm2-135m", "llama-2-7b", "llama-3-8b", "llama-3.1-70b", "qwen3-30b-a3b", "phi-4",
    "gemma-2b", "falcon-7b",
)  # fmt: skip
ROOFLINE_HEAD = (
    "step", "FLOP", "bytes", "FLOP per byte", "at least", "tokens per second", "bound by",
)  # fmt: skip


def _facts(slug: str) -> dict:
    """What the browser knows of a model."""
    spec = preset(slug)
    fields = {field: getattr(spec, field) for field in FIELDS["spec"]}
    return fields | {"slug": slug, "name": spec.name}


def _dense_models() -> list[dict]:
    """The presets the formulas of a step hold for, with their P in both accountings.

    They are Llama-shaped, with full attention throughout.
    """
    models = []
    for slug in model_names():
        spec = preset(slug)
        if spec.is_dense_llama and {layer.kind for _, layer in spec.layer_groups} == {"full"}:
            models.append(facts := _facts(slug))
            for name in ("coarse", "exact"):
                facts[name], facts[f"{name}_text"] = accounting_parameters(spec, name)
    return models


class Recompute(LabWidget):
    """The triangle of chapter 1: steps as rows, tokens as columns, and what is computed again.

    spec            the model whose layers are counted
    prompt, decode  p and n, small enough to draw
    step            t of the row shown last
    """

    script = "recompute.js"
    num_layers = traitlets.Int().tag(sync=True)
    prompt = traitlets.Int(6).tag(sync=True)
    decode = traitlets.Int(8).tag(sync=True)
    step = traitlets.Int(5).tag(sync=True)

    def __init__(self, spec: ModelSpec, **traits) -> None:
        self._spec = spec
        super().__init__(num_layers=spec.num_layers, **traits)

    def twin(self) -> Twin:
        """One row a step: what is fed, what of it is new, what is done again and thrown away."""
        rows = []
        for t in range(1, self.decode + 1):
            context = self.prompt + t
            again = costs.kv_rows_recomputed(self._spec, self.prompt, t)
            rows.append((t, context, 1, costs.logit_rows_discarded(context), f"{again:,}"))
        return Twin(
            f"What a naive loop repeats after a prompt of {self.prompt}",
            ("step t", "tokens fed", "new", "logit rows thrown away", "K/V rows repeated so far"),
            rows,
            f"K/V rows are counted over the {self.num_layers} layers of {self._spec.name}.",
        )


class CostTable(LabWidget):
    """The book's cost table: what decode steps 1..t cost, without a cache and with one.

    model       a preset's name
    prompt      p
    decode      n
    accounting  "coarse" or "exact": which P the projections cost 2P for
    step        t; n // 2 at first
    """

    script = "cost_table.js"
    models: traitlets.List = traitlets.List().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    prompt = traitlets.Int(16).tag(sync=True)
    decode = traitlets.Int(48).tag(sync=True)
    accounting = traitlets.Unicode("coarse").tag(sync=True)
    step = traitlets.Int().tag(sync=True)

    def __init__(self, **traits) -> None:
        traits.setdefault("step", traits.get("decode", 48) // 2 or 1)
        super().__init__(models=_dense_models(), **traits)

    def rows(self, step: int) -> list[tuple[str, str, str, str]]:
        """The table after t steps, as text: what the browser shows for the same state."""
        spec = preset(self.model)
        num_parameters, _ = accounting_parameters(spec, self.accounting)
        p, s = self.prompt, self.prompt + step
        this_step = (
            costs.uncached_step_flops(spec, num_parameters, s),
            costs.cached_step_flops(spec, num_parameters, s),
        )
        projections = (
            costs.uncached_run_projection_flops(num_parameters, p, step),
            costs.cached_run_projection_flops(num_parameters, step),
        )
        attention = (
            costs.uncached_run_attention_flops(spec, p, step),
            costs.cached_run_attention_flops(spec, p, step),
        )
        flops = {
            "this step": this_step,
            "projections so far": projections,
            "attention so far": attention,
            "all so far": tuple(map(sum, zip(projections, attention))),
        }
        rows = [
            (name, units.flops(a), units.flops(b), f"{a / b:,.1f}")
            for name, (a, b) in flops.items()
        ]
        read = costs.cached_step_bytes(spec, num_parameters, s)
        a, b = (costs.intensity(x, read) for x in this_step)
        thrown = costs.sum_of_contexts(p, step) - step
        return [
            *rows,
            ("FLOP per byte, this step", f"{a:,.2f}", f"{b:,.2f}", f"{a / b:,.1f}"),
            ("logit rows thrown away, this step", f"{costs.logit_rows_discarded(s):,}", "0", "–"),
            ("logit rows thrown away so far", f"{thrown:,}", "0", "–"),
            ("cache rows kept, each layer", "0", f"{s:,}", "–"),
            ("cache kept, all layers", "0 B", units.binary_bytes(costs.kv_bytes(spec, s)), "–"),
        ]

    def twin(self) -> Twin:
        """The run at five steps: the animation, read down the table."""
        spec = preset(self.model)
        num_parameters, accounting = accounting_parameters(spec, self.accounting)
        body = []
        for t in sorted({max(1, round(self.decode * part / 4)) for part in range(5)}):
            cells = {name: row for name, *row in self.rows(t)}
            body.append((
                f"{t:,}",
                f"{self.prompt + t:,}",
                *cells["this step"][:2],
                *cells["all so far"],
                cells["logit rows thrown away so far"][0],
                cells["cache kept, all layers"][1],
            ))  # fmt: skip
        return Twin(
            f"What decoding costs: {spec.name}, prompt {self.prompt:,}, {self.decode:,} steps",
            (
                "step t", "context s", "this step, without cache", "with cache",
                "so far, without cache", "with cache", "ratio", "logit rows thrown away",
                "cache kept",
            ),
            body,
            f"Accounting: {accounting}, P = {num_parameters:,}. KV in 2 bytes an element.",
        )  # fmt: skip


class Roofline(LabWidget):
    """Three decode steps under the two roofs of a card, moving as the context grows.

    model   a preset's name
    card    a name in data/hardware
    dtype   of weights, KV and arithmetic, one that the card has a rate for
    batch   sequences decoded together
    prompt, decode, step   context s = prompt + step
    """

    script = "roofline.js"
    models: traitlets.List = traitlets.List().tag(sync=True)
    cards: traitlets.List = traitlets.List().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    card = traitlets.Unicode("h100-sxm").tag(sync=True)
    dtype = traitlets.Unicode("bf16").tag(sync=True)
    batch = traitlets.Int(32).tag(sync=True)
    prompt = traitlets.Int(2048).tag(sync=True)
    decode = traitlets.Int(512).tag(sync=True)
    step = traitlets.Int(256).tag(sync=True)

    def __init__(self, **traits) -> None:
        cards = [
            {
                "slug": slug,
                "name": card.name,
                "bandwidth": card.bandwidth_bytes_per_second,
                "peaks": dict(card.peak_flops_per_second),
            }
            for slug, card in ((slug, hardware(slug)) for slug in hardware_names())
        ]
        super().__init__(models=_dense_models(), cards=cards, **traits)

    def rows(self, step: int) -> list[tuple[str, ...]]:
        """The three steps at context prompt + step, as text: what the browser shows."""
        spec, s = preset(self.model), self.prompt + step
        width = costs.FORMATS[self.dtype].bytes_per_element
        num_parameters, _ = accounting_parameters(spec, "coarse")
        uncached = costs.uncached_step_flops(spec, num_parameters, s)
        weights = costs.weight_bytes(num_parameters, width)
        rows = [self._row("without cache", uncached, weights, 1)]
        for name, batch in (
            ("cached, one sequence", 1),
            (f"cached, batch {self.batch}", self.batch),
        ):
            flops = costs.batch_step_flops(spec, num_parameters, batch, s)
            moved = costs.batch_step_bytes(spec, num_parameters, batch, s, width)
            rows.append(self._row(name, flops, moved, batch))
        return rows

    def _row(self, name: str, flops: float, moved: float, tokens: int) -> tuple[str, ...]:
        card = hardware(self.card)
        arithmetic = costs.compute_seconds(flops, card.peak_flops_per_second[self.dtype])
        memory = costs.memory_seconds(moved, card.bandwidth_bytes_per_second)
        seconds = max(arithmetic, memory)
        return (
            name,
            units.flops(flops),
            units.decimal_bytes(moved),
            f"{costs.intensity(flops, moved):,.2f}",
            f"{seconds * 1e3:,.3f} ms",
            f"{tokens / seconds:,.1f}",
            "arithmetic" if arithmetic > memory else "bytes",
        )

    def twin(self) -> Twin:
        """The three steps at the beginning, the middle and the end of the run."""
        spec = preset(self.model)
        body = [
            (f"{name}, s = {self.prompt + step:,}", *cells)
            for step in sorted({1, max(1, self.decode // 2), self.decode})
            for name, *cells in self.rows(step)
        ]
        num_parameters, _ = accounting_parameters(spec, "coarse")
        crossover = costs.kv_weight_crossover_tokens(spec, num_parameters)
        return Twin(
            f"Decode steps under the roofs: {spec.name}, {self.dtype}, on "
            f"{hardware(self.card).name}",
            ROOFLINE_HEAD,
            body,
            f"KV outweighs the weights from {crossover:,.0f} resident tokens on. "
            "Coarse accounting; the uncached step is charged for the weights' bytes alone.",
        )


class Shapes(LabWidget):
    """The shape inspector of chapter 3: query heads, KV heads, a line where one reads the other.

    model         a name of MODELS, the shape to start from
    num_kv_heads  a divisor of the model's query heads; its own at first
    query_head    the query head that is followed
    tokens        context of the last column but one
    """

    script = "shapes.js"
    models: traitlets.List = traitlets.List().tag(sync=True)
    latent = traitlets.Dict().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    num_kv_heads = traitlets.Int().tag(sync=True)
    query_head = traitlets.Int(0).tag(sync=True)
    tokens = traitlets.Int(8192).tag(sync=True)

    def __init__(self, model: str = "llama-3-8b", **traits) -> None:
        row = preset("deepseek-v3").layers[0]
        spec = preset(model)
        super().__init__(
            models=[_facts(name) for name in MODELS],
            latent={"num_kv_heads": 1, "key_dim": row.key_dim, "value_dim": row.value_dim},
            model=model,
            **{"num_kv_heads": spec.num_kv_heads, **traits},
        )
        require(
            spec.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads: given {self.num_kv_heads}; expected a divisor of the "
            f"{spec.num_heads} query heads of {model}",
        )

    def twin(self) -> Twin:
        """MHA, this shape, MQA and a latent row, side by side."""
        spec = preset(self.model)
        h, h_kv, d_h, n = spec.num_heads, self.num_kv_heads, spec.head_dim, self.tokens
        mha = costs.layer_kv_bytes_per_token(LayerSpec("full", h, d_h, d_h))
        latent = LayerSpec("latent", **self.latent)
        heads = {f"MHA: {h} KV heads": h, f"here: {h_kv} KV heads": h_kv, "MQA: 1 KV head": 1}
        layers = {label: LayerSpec("full", kept, d_h, d_h) for label, kept in heads.items()}
        rows = []
        for label, layer in (*layers.items(), ("MLA: DeepSeek-V3's row", latent)):
            kept = "1" if layer is latent else f"2 x {layer.num_kv_heads}"
            each = costs.layer_kv_bytes_per_token(layer)
            whole = units.binary_bytes(spec.num_layers * n * each)
            share = f"{100 * each / mha:.1f} %"
            rows.append((label, f"{kept} x {layer.key_dim}", f"{each:,}", whole, share))
        return Twin(
            f"{spec.name} in bf16: one token in one layer, then {n:,} tokens in all layers",
            ("", "numbers", "bytes", "all layers", "of MHA"),
            rows,
            f"{h} query heads on {h_kv} KV heads: query head j reads KV head j // {h // h_kv}. "
            f"The cache holds [batch, {h_kv}, tokens, {d_h}] of K and of V in each of "
            f"{spec.num_layers} layers; {h} is not among its numbers.",
        )
