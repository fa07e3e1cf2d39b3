"""Reference attention over contiguous K and V, and the two ways a decoder is served with it.

    5 tokens known, 3 cached: the queries are tokens 3 and 4, the keys are tokens 0..4
        query 3 sees keys 0 1 2 3
        query 4 sees keys 0 1 2 3 4          the mask is aligned bottom right

The queries are always the tail of the keys. One query therefore sees every key, and needs no
mask at all. A group of query heads shares one KV head: its queries are laid side by side on
the query axis, [b, h_kv, group * q, d], so K and V are read as they lie and never repeated.
(Only a prompt fed whole goes another way, through torch's own triangle.)
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Protocol

import torch
import torch.nn.functional as F

from kvlab.errors import AttentionError, whole
from kvlab.specs import ModelSpec


class KVCache(Protocol):
    """What CachedAttention asks of a cache."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None: ...

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def causal_mask(
    num_queries: int,
    num_keys: int,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """True where a query may look: [num_queries, num_keys], aligned bottom right.

    window  keys a query sees at most, its own included: with window 3, position 5 sees 3, 4, 5
    """
    query_pos = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_pos = torch.arange(num_keys, device=device)[None, :]
    mask = key_pos <= query_pos
    if window is not None:
        mask &= key_pos > query_pos - window
    return mask


def check_options(scale: float | None, window: int | None) -> None:
    """Raise AttentionError for a scale that is no positive number, or a window without the token.

    torch computes with such a scale, and gives NaN on some paths and numbers on others.
    """
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    if scale is not None and not (is_number and 0 < scale < math.inf):
        raise AttentionError(f"scale={scale!r}; expected a positive number, or None: 1 / sqrt(d)")
    if window is not None:
        whole("window (the token itself included)", window, 1, AttentionError)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last q of s tokens.

    query       [b, q, h, d], rotated
    key, value  [b, h_kv, s, d] and [b, h_kv, s, d_v], s >= q, h a multiple of h_kv
    scale       multiplies the scores; 1 / sqrt(d) by default
    window      keys a query sees at most, its own included

    Returns [b, q, h, d_v]. Query head j reads KV head j // (h / h_kv).
    """
    check_options(scale, window)
    batch, num_queries, num_heads, head_dim = query.shape
    kv_batch, num_kv_heads, num_keys, key_dim = key.shape
    assert num_heads and num_kv_heads and num_heads % num_kv_heads == 0, "whole groups of heads"
    assert 0 < num_queries <= num_keys, "the queries are the last of the keys"
    # torch would stretch a batch or a head of 1 over the others, and answer wrongly.
    assert (kv_batch, key_dim) == (batch, head_dim), "query and key have one batch and head_dim"
    assert key.shape[:3] == value.shape[:3], "there is a value for each key"
    group = num_heads // num_kv_heads
    if num_queries == 1:
        # A window only cuts the front off what a single query sees; still no mask.
        if window is not None and num_keys > window:
            key, value = key[:, :, -window:], value[:, :, -window:]
        folded = query.view(batch, num_kv_heads, group, head_dim)
        out = F.scaled_dot_product_attention(folded, key, value, scale=scale)
        return out.view(batch, 1, num_heads, value.shape[-1])
    if num_queries == num_keys and (window is None or window >= num_keys):
        # A prompt from its start: the triangle needs no mask tensor, and half the work is skipped.
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, is_causal=True, scale=scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    # [b, q, h_kv, group, d] -> [b, h_kv, group * q, d]: each group's queries share K and V
    folded = query.view(batch, num_queries, num_kv_heads, group, head_dim)
    folded = folded.permute(0, 2, 3, 1, 4).reshape(
        batch, num_kv_heads, group * num_queries, head_dim
    )
    mask = causal_mask(num_queries, num_keys, window, query.device).repeat(group, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    out = out.view(batch, num_kv_heads, group, num_queries, value.shape[-1])
    return out.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, value.shape[-1])


def layer_windows(spec: ModelSpec) -> list[int | None]:
    """Each layer's window, None where it sees everything.

    A chunked layer is refused: it looks back to the start of its chunk, which is no window.
    """
    for index, layer in enumerate(spec.layers):
        if layer.kind not in ("full", "sliding"):
            raise AttentionError(
                f"layer {index} is of kind {layer.kind!r}; expected full or sliding: other kinds "
                "can be sized, but not run here"
            )
    return [layer.window for layer in spec.layers]


class CachedAttention:
    """The `attend` of a decoder that keeps K and V: write, read back, attend."""

    def __init__(self, spec: ModelSpec, cache: KVCache) -> None:
        self.cache = cache
        self.windows = layer_windows(spec)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [b, q, h, d], key and value [b, q, h_kv, d] of the new tokens -> [b, q, h, d]."""
        self.cache.write(layer, key, value)
        keys, values = self.cache.read(layer)
        return attention(query, keys, values, window=self.windows[layer])


class UncachedAttention:
    """The `attend` of a decoder that keeps nothing: K and V of this forward are all there is."""

    def __init__(self, spec: ModelSpec) -> None:
        self.windows = layer_windows(spec)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [b, s, h, d], key and value [b, s, h_kv, d] of every token -> [b, s, h, d]."""
        return attention(
            query, key.transpose(1, 2), value.transpose(1, 2), window=self.windows[layer]
        )


class CountingAttention:
    """Counts the K/V rows a decoder hands to another `attend`: one per token and layer."""

    def __init__(self, attend) -> None:
        self.attend = attend
        self.kv_rows = 0

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.kv_rows += key.shape[0] * key.shape[1]
        return self.attend(layer, query, key, value)
