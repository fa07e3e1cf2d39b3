"""The shape inspector of chapter 3: which query head reads which KV head, and what that costs."""

from __future__ import annotations

import traitlets

from kvlab import costs, units
from kvlab.configs import preset
from kvlab.errors import KvlabError
from kvlab.specs import LayerSpec
from kvlab.widgets.base import LabWidget, Twin

#: Shapes to start from: all full attention, from one KV head a query head down to one for all.
MODELS = (
    "smollm2-135m",
    "llama-2-7b",
    "llama-3-8b",
    "llama-3.1-70b",
    "qwen3-30b-a3b",
    "phi-4",
    "gemma-2b",
    "falcon-7b",
)
HEAD = (
    "",
    "numbers",
    "bytes",
    "all layers",
    "of MHA",
)


class ShapeError(KvlabError):
    """Heads that cannot be shared out evenly."""


class Shapes(LabWidget):
    """Query heads above, KV heads below, a line where one reads the other.

    model         a name of MODELS, the shape to start from
    num_kv_heads  a divisor of the model's query heads; its own at first
    query_head    the query head that is followed
    tokens        context of the last column but one
    """

    script = "shapes.js"
    uses_formulas = True
    models: traitlets.List = traitlets.List().tag(sync=True)
    latent = traitlets.Dict().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    num_kv_heads = traitlets.Int().tag(sync=True)
    query_head = traitlets.Int(0).tag(sync=True)
    tokens = traitlets.Int(8192).tag(sync=True)

    def __init__(self, model: str = "llama-3-8b", **traits) -> None:
        models = []
        for name in MODELS:
            spec = preset(name)
            models.append(
                {
                    "slug": name,
                    "name": spec.name,
                    "num_layers": spec.num_layers,
                    "num_heads": spec.num_heads,
                    "num_kv_heads": spec.num_kv_heads,
                    "head_dim": spec.head_dim,
                }
            )
        row = preset("deepseek-v3").layers[0]
        latent = {"num_kv_heads": 1, "key_dim": row.key_dim, "value_dim": row.value_dim}
        heads = preset(model).num_kv_heads
        super().__init__(
            models=models,
            latent=latent,
            model=model,
            **{"num_kv_heads": heads, **traits},
        )
        if preset(model).num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_kv_heads: given {self.num_kv_heads}; expected a divisor of the "
                f"{preset(model).num_heads} query heads of {model}"
            )

    def twin(self) -> Twin:
        """MHA, this shape, MQA and a latent row, side by side."""
        spec = preset(self.model)
        h, h_kv, d_h, n = spec.num_heads, self.num_kv_heads, spec.head_dim, self.tokens
        group = h // h_kv
        mha = costs.layer_kv_bytes_per_token(LayerSpec("full", h, d_h, d_h))
        rows = []
        for label, layer in (
            (f"MHA: {h} KV heads", LayerSpec("full", h, d_h, d_h)),
            (f"here: {h_kv} KV heads", LayerSpec("full", h_kv, d_h, d_h)),
            ("MQA: 1 KV head", LayerSpec("full", 1, d_h, d_h)),
            ("MLA: DeepSeek-V3's row", LayerSpec("latent", **self.latent)),
        ):
            each = costs.layer_kv_bytes_per_token(layer)
            whole = spec.num_layers * n * each
            rows.append(
                (label, _kept(layer), f"{each:,}", units.binary_bytes(whole), _share(each / mha))
            )
        return Twin(
            f"{spec.name} in bf16: one token in one layer, then {n:,} tokens in all layers",
            HEAD,
            rows,
            note=(
                f"{h} query heads on {h_kv} KV heads: query head j reads KV head j // {group}. "
                f"The cache holds [batch, {h_kv}, tokens, {d_h}] of K and of V in each of "
                f"{spec.num_layers} layers; {h} is not among its numbers."
            ),
        )


def _kept(layer: LayerSpec) -> str:
    if layer.kind == "latent":
        return f"1 x {layer.key_dim}"
    return f"2 x {layer.num_kv_heads} x {layer.key_dim}"


def _share(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
