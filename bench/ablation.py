"""What each plain means buys: the loop with one of them taken away, all else as it is.

Each entry changes one thing and puts it back. Their names are the rows of the recorded table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

import kvlab.attention as attention_module
import kvlab.model as model_module
from kvlab.attention import CachedAttention, causal_mask
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.model import Decoder


@contextmanager
def _replaced(module: object, **functions: Callable) -> Iterator[None]:
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


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


def _separate(weight: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float):
    """Q, K, V, gate and up each by a product of their own."""
    normed = model_module.rms_norm(x, norm, eps)
    parts = _SPLITS.get(weight.shape[0])
    if parts is None:
        return model_module.project(weight, normed)
    return torch.cat([model_module.project(w, normed) for w in weight.split(parts)])


_SPLITS: dict[int, tuple[int, ...]] = {}


def step(model: Decoder, context: int, cache=None) -> Callable[[], object]:
    """One cached step at a context, on a cache that is filled to it."""
    spec = model.spec
    if cache is None:
        cache = ContiguousKVCache(spec, 1, context, model.dtype)
        cache.advance(context - 1)
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
    _SPLITS.clear()
    _SPLITS[q + 2 * kv] = (q, kv, kv)
    _SPLITS[2 * spec.intermediate_size] = (spec.intermediate_size, spec.intermediate_size)
    plain = step(model, context)

    def with_(module: object, **functions: Callable) -> Callable[[], object]:
        def run() -> object:
            with _replaced(module, **functions):
                return plain()

        return run

    def one_row_matrix(weight, x, norm, eps):
        return _linear(weight, model_module.rms_norm(x, norm, eps))

    def added(residual, weight, x):
        return residual + model_module.project(weight, x)

    return {
        "all of them": plain,
        "Q, K, V, gate and up projected separately": with_(model_module, norm_project=_separate),
        "matrices stored as the checkpoint has them": step(row_major, context),
        "F.linear in place of a matrix-vector product": with_(
            model_module, project=_linear, norm_project=one_row_matrix, add_project=added
        ),
        "library norm in place of one dot product": with_(
            model_module,
            rms_norm=_plain_norm,
            norm_project=lambda w, x, n, e: model_module.project(w, _plain_norm(x, n, e)),
        ),
        "cache grown by concatenation": step(
            model, context, _Concatenating(spec, context, model.dtype)
        ),
        "K and V repeated for every query head": with_(attention_module, attention=_repeat),
        "a mask tensor for one query": with_(attention_module, attention=_masked),
    }


def row_major_copy(checkpoint_weights: dict[str, torch.Tensor], model: Decoder) -> Decoder:
    """The same decoder without lay_out."""
    with _replaced(model_module, lay_out=lambda weight: weight.contiguous()):
        return Decoder(model.spec, checkpoint_weights)
