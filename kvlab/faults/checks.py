"""The detectors of the position and cache faults, put into every forward.

    watch_positions   positions[-1] == seq_lens - 1, ascending by one
    watch_tables      the cos and sin in use equal float64 ones computed from the spec
    watch_rotation    the first layer's q and k, as attention gets them, equal R(position) W x
    watch_heads       query head j reads KV head j // group; masks are aligned bottom right
    watch_cache       what is read back is what was written, no more and no less
    watch_size        the cache holds h_kv heads and the bytes that the cost model plans
    watch_rollback    a reset leaves nothing, drop_last(k) leaves k fewer

Each is a context manager. Inside it a wrong step raises FaultDetected before it does harm.
None of them looks at logits: several of these faults leave the logits as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

import kvlab.attention as attention_module
from kvlab import costs
from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.errors import WrongPosition
from kvlab.faults.registry import FaultDetected
from kvlab.faults.seams import watched
from kvlab.model import Decoder, project, rms_norm
from kvlab.rope import check_positions, rope_inv_freq


def seq_lens_of(attend: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """[batch] cached plus new tokens of a contiguous run, or None where it is not one."""
    if positions.dim() != 2:
        return None  # a ragged batch: the engine has its own check
    if hasattr(attend, "mask"):
        return attend.mask.sum(-1)
    attend = getattr(attend, "attend", attend)  # a counter around the real one
    if not hasattr(attend, "cache") and not isinstance(attend, UncachedAttention):
        return None
    cached = attend.cache.length if hasattr(attend, "cache") else 0
    return torch.full((positions.shape[0],), cached + positions.shape[1])


@contextmanager
def watch_positions() -> Iterator[None]:
    """Every forward's positions against cached + new tokens, row by row."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        lengths = seq_lens_of(attend, positions)
        if lengths is not None:
            fed = positions[:, -1:] if hasattr(attend, "mask") else positions
            try:
                check_positions(fed, lengths)
            except WrongPosition as error:
                raise FaultDetected(str(error)) from error
        return original(model, token_ids, positions, attend, rows)

    with watched(Decoder, "forward", forward):
        yield


def exact_angles(model: Decoder, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Angles [*positions, pairs] in float64 straight from the spec, and the attention factor."""
    inv_freq, factor = rope_inv_freq(model.spec.rope, model.rope.planned_len)
    return positions.double()[..., None] * inv_freq.double(), factor


@contextmanager
def watch_tables() -> Iterator[None]:
    """The rows of cos and sin that this forward uses against the same rows in float64."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        cos, sin = model.rope.rows(positions)
        angles, factor = exact_angles(model, positions)
        wrong = max(
            (cos - angles.cos() * factor).abs().max().item(),
            (sin - angles.sin() * factor).abs().max().item(),
        )
        if wrong > 5e-3:  # a float32 angle of 8192 radians is good to 1e-3
            raise FaultDetected(
                f"the table's cos or sin is off by {wrong:.3g} at positions up to "
                f"{int(positions.max())}, expected at most 0.005 for rope_type "
                f"{model.spec.rope.rope_type!r}. Compute angles in float32, from the scaled "
                "frequencies, times the attention factor."
            )
        return original(model, token_ids, positions, attend, rows)

    with watched(Decoder, "forward", forward):
        yield


def first_layer(model: Decoder, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Layer 0's rotated q and k [*lead, h + h_kv, d_h] by complex multiplication, in float64."""
    layer, heads = model.layers[0], model.spec.num_heads + model.spec.num_kv_heads
    hidden = rms_norm(F.embedding(token_ids, model.embed_tokens), layer.input_norm, layer.eps)
    qkv = project(layer.qkv_proj, hidden).double()
    x = qkv.view(*token_ids.shape, -1, model.spec.head_dim)[..., :heads, :]
    half = model.spec.rope.rotary_dim // 2
    angles, factor = exact_angles(model, positions)
    turn = torch.polar(torch.full_like(angles, factor), angles)[..., None, :]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


@contextmanager
def watch_rotation() -> Iterator[None]:
    """q and the newest k of layer 0 at the door of attention, against first_layer."""
    expected: list[torch.Tensor] = []

    def forward(original, model, token_ids, positions, attend, rows=None):
        lengths = seq_lens_of(attend, positions)
        expected.clear()
        if lengths is not None and not hasattr(attend, "mask"):
            own = lengths[:, None] - torch.arange(positions.shape[1], 0, -1)
            expected.append(first_layer(model, token_ids, own))
        return original(model, token_ids, positions, attend, rows)

    def attention(original, query, key, value, **options):
        if expected and query.shape[:2] == expected[0].shape[:2]:
            right = expected.pop()
            got = torch.cat((query, key[:, :, -query.shape[1] :].transpose(1, 2)), dim=2)
            if got.shape == right.shape:
                wrong = ((got - right).norm() / right.norm()).item()
                if wrong > 0.02:
                    raise FaultDetected(
                        f"q and k of the first layer differ from R(position) W x by {wrong:.1%}, "
                        "expected under 2 %. Rotate q and k alike, by the token's own position, "
                        "with the checkpoint's pairing, before k is cached."
                    )
        return original(query, key, value, **options)

    with ExitStack() as stack:
        stack.enter_context(watched(Decoder, "forward", forward))
        stack.enter_context(watched(attention_module, "attention", attention))
        yield


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Ask attention which KV head each query head reads, and which keys each query sees.

    All scores are zero, so a query takes the plain average of what it sees; values are chosen
    so that the average tells: KV head i holds i, then key i holds a one in column i.
    """
    ask = attention_module.attention
    query = torch.zeros(1, 1, num_heads, 4)
    key = torch.zeros(1, num_kv_heads, 2, 4)
    label = torch.arange(float(num_kv_heads)).view(1, -1, 1, 1).expand(1, num_kv_heads, 2, 4)
    reads = ask(query, key, label.contiguous())[0, 0, :, 0].round().int().tolist()
    right = [head // (num_heads // num_kv_heads) for head in range(num_heads)]
    if reads != right:
        raise FaultDetected(
            f"query heads read KV heads {reads}, expected {right}: repeat each KV head for its "
            "group (0,0,1,1), do not tile them (0,1,0,1)"
        )
    for queries, keys, window in ((2, 5, None), (1, 5, None), (1, 5, 3)):
        one_hot = torch.eye(keys).view(1, 1, keys, keys)
        query, key = torch.zeros(1, queries, 1, 4), torch.zeros(1, 1, keys, 4)
        seen = ask(query, key, one_hot, window=window)[0, :, 0] > 1e-6
        mask = torch.ones(queries, keys).tril(keys - queries).bool()
        if window:
            mask &= torch.ones(queries, keys).triu(keys - queries - window + 1).bool()
        if not torch.equal(seen, mask):
            raise FaultDetected(
                f"{queries} queries on {keys} keys (window {window}) see {seen.int().tolist()}, "
                f"expected {mask.int().tolist()}: queries are the tail of the keys, and a window "
                "counts the query's own key"
            )


@contextmanager
def watch_heads() -> Iterator[None]:
    """check_heads before every forward."""

    def forward(original, model, *arguments, **options):
        check_heads(model.spec.num_heads, model.spec.num_kv_heads)
        return original(model, *arguments, **options)

    with watched(Decoder, "forward", forward):
        yield


@contextmanager
def watch_cache() -> Iterator[None]:
    """After each layer's attention: the cache has exactly length + q rows, the last q as given."""

    def call(original, attend, layer, query, key, value):
        out = original(attend, layer, query, key, value)
        keys, values = attend.cache.read(layer)
        rows, expected = keys.shape[2], attend.cache.length + key.shape[1]
        if rows != expected:
            raise FaultDetected(
                f"layer {layer}: attention was given {rows} rows, expected {expected} "
                "(cached + new). Rows past the length were never written."
            )
        if keys.shape[1] == key.shape[2]:
            for name, stored, given in (("K", keys, key), ("V", values, value)):
                if not torch.equal(stored[:, :, -key.shape[1] :], given.transpose(1, 2)):
                    raise FaultDetected(
                        f"layer {layer}: the newest {name} read back is not what was written: "
                        "transpose [b, t, h, d] to [b, h, t, d], do not reshape it"
                    )
        return out

    with watched(CachedAttention, "__call__", call):
        yield


@contextmanager
def watch_size() -> Iterator[None]:
    """The cache's shape and bytes against the cost model, at every forward."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        cache = getattr(attend, "cache", None)
        if isinstance(cache, ContiguousKVCache):
            heads, right = cache.keys[0].shape[1], model.spec.layers[0].num_kv_heads
            width = cache.keys[0].element_size()
            planned = cache.batch_size * costs.kv_bytes_per_token(model.spec, width) * cache.max_len
            if heads != right or cache.nbytes != planned:
                raise FaultDetected(
                    f"the cache has {heads} heads and {cache.nbytes:,} bytes, expected {right} "
                    f"heads and {planned:,} bytes: store K and V per KV head, expand on read"
                )
        return original(model, token_ids, positions, attend, rows)

    with watched(Decoder, "forward", forward):
        yield


@contextmanager
def watch_rollback() -> Iterator[None]:
    """The length after reset and drop_last."""

    def reset(original, cache):
        original(cache)
        if cache.length != 0:
            raise FaultDetected(f"reset left {cache.length} tokens, expected 0")

    def drop_last(original, cache, num_tokens):
        expected = max(cache.length - num_tokens, 0)
        original(cache, num_tokens)
        if cache.length != expected:
            raise FaultDetected(
                f"drop_last({num_tokens}) left {cache.length} tokens, expected {expected}"
            )

    with ExitStack() as stack:
        stack.enter_context(watched(ContiguousKVCache, "reset", reset))
        stack.enter_context(watched(ContiguousKVCache, "drop_last", drop_last))
        yield
