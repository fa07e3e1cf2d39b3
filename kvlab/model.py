"""A Llama-shaped decoder that owns weights and nothing else.

Positions, the cache and the attention all come from outside:

    logits = model.forward(token_ids, positions, attend)

`attend(layer, query, key, value)` is called once a layer with q and k already rotated by
`positions`, and returns the attention output. What it does with K and V (nothing, append to a
cache, scatter into blocks) is the subject of the book's chapters; the decoder is the same in
all of them. Weights have the names of Hugging Face's LlamaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from kvlab.errors import WeightError
from kvlab.rope import RopeTable, apply_rope, prepare_rotation
from kvlab.specs import ModelSpec


class Attend(Protocol):
    """Attention as the decoder sees it; lead is the shape of token_ids.

    layer 0..L-1; query [*lead, h, d_h], key and value [*lead, h_kv, d_h] -> [*lead, h, d_h]
    """

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class Products:
    """The matrix products of a layer, as one writes them on paper.

    x is [tokens, d], a weight [out, in]. kvlab.fast has the same products in fewer and longer
    reads, for one token on a CPU.
    """

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """How a weight lies in memory."""
        return weight

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of a forward, before its first layer."""
        return x

    def norm_project(
        self, weight: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """weight times rms_norm(x)."""
        return F.linear(rms_norm(x, norm, eps), weight)

    def add_project(
        self, residual: torch.Tensor, weight: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """residual + weight times x."""
        return residual + F.linear(x, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32 at least."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Decoder:
    """Weights of one model, and its forward.

    spec      its shape
    weights   by Hugging Face name, all of one dtype; an unknown, missing or misshapen one raises
    products  how its matrices are multiplied: Products, or those of kvlab.fast

    One projection makes Q, K and V and one makes gate and up, so that a layer is four matrix
    products. `forward` takes any lead shape: [batch, q_len] or a ragged [num_tokens].
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        products: Products | None = None,
    ) -> None:
        expected = weight_shapes(spec)
        given = {name: tuple(w.shape) for name, w in weights.items()}
        if spec.tie_word_embeddings:
            given.pop("lm_head.weight", None)
        if given != expected:
            wrong = sorted(set(given.items()) ^ set(expected.items()))
            raise WeightError(f"weights and spec {spec.name!r} differ, first in {wrong[0]}")
        self.spec, self.products = spec, products or Products()
        embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        self.norm = weights["model.norm.weight"]
        self.lm_head = self.products.lay_out(weights.get("lm_head.weight", embedding))
        self.embed_tokens = self.lm_head if spec.tie_word_embeddings else embedding
        self.layers = [
            DecoderLayer(spec, weights, layer, self.products) for layer in range(spec.num_layers)
        ]
        self.rope = RopeTable(spec.rope, spec.max_position_embeddings, self.device)

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        products: Products | None = None,
    ) -> Decoder:
        """A decoder with seeded random weights, for tests."""
        return cls(spec, random_weights(spec, seed, dtype), products)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | Literal["last"] | None = None,
    ) -> torch.Tensor:
        """Logits of some or all rows of one forward.

        token_ids, positions  integers [*lead], [batch, q_len] or [num_tokens]
        attend                called once a layer, see Attend
        rows                  None: every row, logits [*lead, vocab]. "last": the last row along
                              q_len, [batch, vocab] (or [vocab] for a lead of [num_tokens]).
                              A LongTensor: these rows of the flattened lead, [len(rows), vocab].
        """
        lead = token_ids.shape
        # One position would be stretched over all the others.
        assert positions.shape[-1:] == lead[-1:], f"{lead} tokens, {positions.shape} positions"
        hidden = F.embedding(token_ids.reshape(-1), self.embed_tokens)  # [tokens, d]
        hidden = self.products.enter(hidden)
        cos, sin = prepare_rotation(*self.rope.rows(positions))  # shared by all layers
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(index, hidden, lead, cos, sin, attend)
        if isinstance(rows, str):
            hidden, lead = hidden.view(*lead, -1)[..., -1, :], lead[:-1]
        elif rows is not None:
            hidden, lead = hidden.view(-1, self.spec.hidden_size)[rows], rows.shape
        hidden = self.products.enter(hidden)
        logits = self.products.norm_project(
            self.lm_head, hidden, self.norm, self.spec.rms_norm_eps
        )
        return logits.view(*lead, self.spec.vocab_size)


class DecoderLayer:
    """One layer: attention and MLP, each normed before and added back after."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        layer: int,
        products: Products,
    ) -> None:
        def get(*names: str) -> torch.Tensor:
            parts = [weights[f"model.layers.{layer}.{name}.weight"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.products = products
        self.head_dim, self.eps = spec.head_dim, spec.rms_norm_eps
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.input_norm = get("input_layernorm")
        self.qkv_proj = products.lay_out(
            get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        )
        self.o_proj = products.lay_out(get("self_attn.o_proj"))
        self.mlp_norm = get("post_attention_layernorm")
        self.gate_up_proj = products.lay_out(get("mlp.gate_proj", "mlp.up_proj"))
        self.down_proj = products.lay_out(get("mlp.down_proj"))

    def forward(
        self,
        index: int,
        hidden: torch.Tensor,
        lead: torch.Size,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """hidden [tokens, d] -> the same shape."""
        h, h_kv, products = self.num_heads, self.num_kv_heads, self.products
        qkv = products.norm_project(self.qkv_proj, hidden, self.input_norm, self.eps)
        qkv = qkv.view(*lead, h + 2 * h_kv, self.head_dim)
        # Q and K are rotated together, and before anything is cached; V is not rotated.
        rotated, value = qkv.split((h + h_kv, h_kv), dim=-2)
        query, key = apply_rope(rotated, cos, sin).split((h, h_kv), dim=-2)
        attended = attend(index, query, key, value).reshape(*hidden.shape[:-1], h * self.head_dim)
        hidden = products.add_project(hidden, self.o_proj, attended)
        gate_up = products.norm_project(self.gate_up_proj, hidden, self.mlp_norm, self.eps)
        gate, up = gate_up.chunk(2, dim=-1)
        return products.add_project(hidden, self.down_proj, F.silu(gate) * up)


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape; matrices are [out, in].

    Raises WeightError for a model of another kind: its cache can be sized, but not run here.
    """
    d, d_ff = spec.hidden_size, spec.intermediate_size
    if d_ff is None or not spec.is_dense_llama or spec.rope_local is not None:
        raise WeightError(
            f"{spec.name!r} ({spec.model_type}) is not a dense Llama-shaped decoder that rotates "
            "all its layers alike; its cache can be sized, but this class cannot run it"
        )
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, d)}
    for layer in range(spec.num_layers):
        for name, shape in (
            ("input_layernorm", (d,)),
            ("self_attn.q_proj", (q, d)),
            ("self_attn.k_proj", (kv, d)),
            ("self_attn.v_proj", (kv, d)),
            ("self_attn.o_proj", (d, q)),
            ("post_attention_layernorm", (d,)),
            ("mlp.gate_proj", (d_ff, d)),
            ("mlp.up_proj", (d_ff, d)),
            ("mlp.down_proj", (d, d_ff)),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (d,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, d)
    return shapes


def random_weights(
    spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Seeded weights of the right shapes, wide enough that the logits are not all alike."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = 1 + 0.1 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
        weights[name] = value.to(dtype)
    return weights
