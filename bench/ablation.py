"""What each plain means buys: the loop with one of them taken away, all else as it is.

Each entry changes one thing and puts it back. Their names are the rows of the recorded table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F

import kvlab.attention as attention_module
from kvlab.attention import CachedAttention, causal_mask
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.fast import FastProducts, rms_scale
from kvlab.model import Decoder, Products


@contextmanager
def _attention(function: Callable) -> Iterator[None]:
    """Another attention for a while."""
    before = attention_module.attention
    attention_module.attention = function
    try:
        yield
    finally:
        attention_module.attention = before


@contextmanager
def _multiplied_by(model: Decoder, products: Products) -> Iterator[None]:
    """The same decoder with other products for a while."""
    owners = [model, *model.layers]
    before = model.products
    for owner in owners:
        owner.products = products
    try:
        yield
    finally:
        for owner in owners:
            owner.products = before


class _RowMajor(FastProducts):
    def lay_out(self, weight):
        return weight.contiguous()


class _Separate(FastProducts):
    """Q, K, V, gate and up each by a product of their own."""

    def __init__(self, splits: dict[int, tuple[int, ...]]) -> None:
        self.splits = splits

    def norm_project(self, weight, x, norm, eps):
        parts = weight.split(self.splits.get(weight.shape[0], weight.shape[0]))
        normed = x.mul(rms_scale(x, eps)).mul_(norm)
        return torch.cat([torch.mv(part, normed) for part in parts])


class _Linear(FastProducts):
    """F.linear where there is a vector."""

    def norm_project(self, weight, x, norm, eps):
        return F.linear(x.mul(rms_scale(x, eps)).mul_(norm), weight)

    def add_project(self, residual, weight, x):
        return residual + F.linear(x, weight)


class _LibraryNorm(FastProducts):
    def norm_project(self, weight, x, norm, eps):
        return torch.mv(weight, F.rms_norm(x, norm.shape, norm, eps))


def _repeat(query, key, value, *, scale=None, window=None):
    """K and V repeated for every query head, as many implementations do."""
    group = query.shape[2] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, scale=scale)
    return out.transpose(1, 2)


def _masked(query, key, value, *, scale=None, window=None):
    """A mask tensor for the one query, which hides nothing."""
    batch, _, heads, width = query.shape
    mask = causal_mask(1, key.shape[2]).repeat(heads // key.shape[1], 1)
    folded = query.view(batch, key.shape[1], -1, width)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask)
    return out.view(batch, 1, heads, width)


def step(model: Decoder, context: int, cache=None) -> Callable[[], object]:
    """One cached step at a context, on a cache that is filled to it."""
    spec = model.spec
    if cache is None:
        cache = ContiguousKVCache(spec, 1, context, model.dtype)
        cache.length = context - 1  # as if so many tokens had been written
    attend = CachedAttention(spec, cache)
    token, position = torch.tensor([[11]]), torch.tensor([[context - 1]])

    def run() -> object:
        out = model.forward(token, position, attend, "last").argmax(-1)
        if isinstance(cache, ContiguousKVCache):
            cache.truncate_to(context - 1)
        return out

    return run


class _Concatenating(ConcatenatedKVCache):
    """A grown cache that forgets the new token after each step, so that all steps are alike."""

    def __init__(self, spec, context: int, dtype: torch.dtype) -> None:
        super().__init__(spec)
        old = torch.zeros(1, spec.num_kv_heads, context - 1, spec.head_dim, dtype=dtype)
        self.first_keys = [old.clone() for _ in spec.layers]
        self.first_values = [old.clone() for _ in spec.layers]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer], self.values[layer] = self.first_keys[layer], self.first_values[layer]
        super().write(layer, key, value)


def variants(model: Decoder, row_major: Decoder, context: int) -> dict[str, Callable[[], object]]:
    """name -> one step. row_major is the same model with every matrix as the checkpoint has it."""
    spec = model.spec
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    splits = {q + 2 * kv: (q, kv, kv), 2 * spec.intermediate_size: (spec.intermediate_size,) * 2}
    plain = step(model, context)

    def within(change: Callable[[], AbstractContextManager[None]]) -> Callable[[], object]:
        def run() -> object:
            with change():
                return plain()

        return run

    def by(products: Products) -> Callable[[], object]:
        return within(lambda: _multiplied_by(model, products))

    return {
        "all of them": plain,
        "Q, K, V, gate and up projected separately": by(_Separate(splits)),
        "matrices stored as the checkpoint has them": step(row_major, context),
        "F.linear in place of a matrix-vector product": by(_Linear()),
        "library norm in place of one dot product": by(_LibraryNorm()),
        "cache grown by concatenation": step(
            model, context, _Concatenating(spec, context, model.dtype)
        ),
        "K and V repeated for every query head": within(lambda: _attention(_repeat)),
        "a mask tensor for one query": within(lambda: _attention(_masked)),
    }


def row_major_copy(checkpoint_weights: dict[str, torch.Tensor], model: Decoder) -> Decoder:
    """The same decoder without lay_out."""
    return Decoder(model.spec, checkpoint_weights, _RowMajor())
