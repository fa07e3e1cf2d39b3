"""A Llama-shaped decoder that owns weights and nothing else: Llama and its near relatives.

Positions, the cache and the attention all come from outside:

    logits = model.forward(token_ids, positions, attend)

`attend(layer, query, key, value)` is called once a layer with q and k already rotated by
`positions`, and returns the attention output. What it does with K and V (nothing, append to a
cache, scatter into blocks) is the subject of the book's chapters; the decoder is the same in
all of them. Weights have the names of Hugging Face's classes. What a family does otherwise than
Llama is data in the spec: norms of Q and K, biases, layers without a rotation, fused matrices.
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


def plus(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x + bias, where a projection has one."""
    return x if bias is None else x + bias


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
        head = weights.get("lm_head.weight") if spec.tie_word_embeddings else None
        if head is not None:  # a file may hold the tied matrix twice
            given.pop("lm_head.weight")
            if not torch.equal(head, weights["model.embed_tokens.weight"]):
                raise WeightError(
                    f"{spec.name!r}: tie_word_embeddings is true, but lm_head.weight is another "
                    "matrix than model.embed_tokens.weight; expected one of the two: correct it"
                )
        if given != expected:
            wrong = sorted(set(given.items()) ^ set(expected.items()))
            raise WeightError(f"weights and spec {spec.name!r} differ, first in {wrong[0]}")
        self.spec, self.products = spec, products or Products()
        embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        self.norm = weights["model.norm.weight"]
        head = embedding if spec.tie_word_embeddings else weights["lm_head.weight"]
        self.lm_head = self.products.lay_out(head)
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
        def get(*names: str, kind: str = "weight") -> torch.Tensor:
            parts = [weights[f"model.layers.{layer}.{name}.{kind}"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def bias(*names: str) -> torch.Tensor | None:
            has_bias = names[0].split(".")[-1] in spec.biased
            return get(*names, kind="bias") if has_bias else None

        qkv, gate_up = fused_names(spec)
        self.products = products
        self.head_dim, self.eps = spec.head_dim, spec.rms_norm_eps
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.input_norm = get("input_layernorm")
        self.qkv_proj, self.qkv_bias = products.lay_out(get(*qkv)), bias(*qkv)
        self.o_proj = products.lay_out(get("self_attn.o_proj"))
        self.o_bias = bias("self_attn.o_proj")
        self.rotates = layer not in spec.unrotated_layers
        self.qk_norm: torch.Tensor | None = None
        if spec.qk_norm:  # a row for each head of Q and of K, [h + h_kv, d_h]
            q_norm = get("self_attn.q_norm").expand(spec.num_heads, -1)
            k_norm = get("self_attn.k_norm").expand(spec.num_kv_heads, -1)
            self.qk_norm = torch.cat((q_norm, k_norm))
        self.mlp_norm = get("post_attention_layernorm")
        self.gate_up_proj, self.gate_up_bias = products.lay_out(get(*gate_up)), bias(*gate_up)
        self.down_proj = products.lay_out(get("mlp.down_proj"))
        self.down_bias = bias("mlp.down_proj")

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
        qkv = plus(qkv, self.qkv_bias).view(*lead, h + 2 * h_kv, self.head_dim)
        qk, value = qkv.split((h + h_kv, h_kv), dim=-2)
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), eps=self.eps) * self.qk_norm
        # Q and K are rotated together, and before anything is cached; V is not rotated.
        if self.rotates:
            qk = apply_rope(qk, cos, sin)
        query, key = qk.split((h, h_kv), dim=-2)
        attended = attend(index, query, key, value).reshape(*hidden.shape[:-1], h * self.head_dim)
        hidden = plus(products.add_project(hidden, self.o_proj, attended), self.o_bias)
        gate_up = products.norm_project(self.gate_up_proj, hidden, self.mlp_norm, self.eps)
        gate, up = plus(gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return plus(products.add_project(hidden, self.down_proj, F.silu(gate) * up), self.down_bias)


def fused_names(spec: ModelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The matrices that make q, k, v, and those that make gate, up, as the file stores them."""
    if spec.fused_projections:
        return ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return qkv, ("mlp.gate_proj", "mlp.up_proj")


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape; matrices are [out, in].

    Raises WeightError for a model of another kind: its cache can be sized, but not run here.
    """
    d, d_ff = spec.hidden_size, spec.intermediate_size
    if spec.unsupported:
        raise WeightError(f"{spec.name!r} can be sized, but not run here: {spec.unsupported}")
    if d_ff is None or not spec.is_dense_llama or spec.rope_local is not None:
        raise WeightError(
            f"{spec.name!r} ({spec.model_type}) is not a dense Llama-shaped decoder that rotates "
            "all its layers alike; its cache can be sized, but this class cannot run it"
        )
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, gate_up = fused_names(spec)
    rows_of_qkv = (q + 2 * kv,) if spec.fused_projections else (q, kv, kv)
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,),
        **{name: (rows, d) for name, rows in zip(qkv, rows_of_qkv, strict=True)},
        "self_attn.o_proj": (d, q),
        "post_attention_layernorm": (d,),
        **{name: (2 * d_ff // len(gate_up), d) for name in gate_up},
        "mlp.down_proj": (d, d_ff),
    }
    if spec.qk_norm:
        in_layer |= {"self_attn.q_norm": (spec.head_dim,), "self_attn.k_norm": (spec.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, d)}
    for layer in range(spec.num_layers):
        for name, shape in in_layer.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if name.split(".")[-1] in spec.biased:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
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
