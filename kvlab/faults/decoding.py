"""Faults of one sequence: the plain loop, positions and rotation, the contiguous cache.

Each function is the wrong one, under the name of its fault. `at` is where it answers while the
fault is on; data/faults.toml says what a user sees of it, and what the right answer is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import kvlab.attention as attention_module
import kvlab.generate as generate_module
import kvlab.model as model_module
from kvlab.cache import ContiguousKVCache, KVCache
from kvlab.faults import detectors, scenes
from kvlab.faults.detectors import FORWARD
from kvlab.faults.drift import ChangedAttend, mean_kl
from kvlab.faults.registry import Opener, Place, bug
from kvlab.rope import RopeTable, apply_rope, rope_inv_freq, rope_tables
from kvlab.specs import RopeSpec

ATTENTION: Place = (attention_module, "attention")
ROPE_ROWS: Place = (RopeTable, "rows")


def tiny_bug(
    at: Place, watch: Opener, measure: Callable[[], float] | None = None, **run: Any
) -> Callable:
    """A fault that `watch` finds in a tiny cached run; run: options of scenes.run_tiny."""
    scene = functools.partial(scenes.run_tiny, **run)
    return bug(at=at, run=scene, measure=measure or mean_kl(), watch=watch)


# --- the plain loop ---------------------------------------------------------------------------


@bug(at=ATTENTION, run=detectors.check_growing_keys, measure=scenes.naive_kl)
def causal_mask_missing(original, query, key, value, *, scale=None, window=None):
    """Every token sees every other one; all shapes stay."""
    group = query.shape[2] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, scale=scale)
    return out.transpose(1, 2)


@bug(at=FORWARD, run=detectors.check_last_row, measure=scenes.naive_kl)
def logits_row_before_last(original, model, token_ids, positions, attend, rows=None):
    """Row i of the logits is handed out as row i + 1."""
    logits = original(model, token_ids, positions, attend, rows)
    return logits.roll(1, dims=-2) if rows is None else logits


# --- positions: the right rotation by the wrong number ----------------------------------------


def handed_over(change: Callable) -> Callable:
    """Decorator: change(positions, cached tokens, prompt length) alters what the model is given."""

    @functools.wraps(change)
    def forward(original, model, token_ids, positions, attend, *rest, **options):
        cache = getattr(attend, "cache", None)
        if cache is not None and not hasattr(attend, "mask"):
            if cache.length == 0:
                attend.first_fed = positions.shape[-1]
            prompt = getattr(attend, "first_fed", cache.length)
            positions = change(positions, cache.length, prompt)
        return original(model, token_ids, positions, attend, *rest, **options)

    return forward


@tiny_bug(FORWARD, detectors.watch_positions)
@handed_over
def decode_position_off_by_one(positions, cached, prompt):
    return positions + 1 if cached else positions


@tiny_bug(FORWARD, detectors.watch_positions)
@handed_over
def decode_position_restarts(positions, cached, prompt):
    return positions - prompt if cached else positions


@tiny_bug(FORWARD, detectors.watch_positions)
@handed_over
def decode_offset_adds_prompt(positions, cached, prompt):
    return prompt * (cached - prompt + 1) + positions - cached if cached else positions


@tiny_bug(FORWARD, detectors.watch_positions, mean_kl(chunk_size=8, num_steps=8), chunk_size=2)
@handed_over
def chunk_shares_one_offset(positions, cached, prompt):
    return torch.full_like(positions, cached) if cached else positions


@tiny_bug(FORWARD, detectors.watch_positions)
@handed_over
def uniform_shift(positions, cached, prompt):
    return positions + 5


@bug(
    at=(generate_module, "next_positions"),
    run=scenes.run_padded,
    measure=scenes.padded_kl,
    watch=detectors.watch_positions,
)
def shared_counter_under_padding(original, attention_mask):
    """Every row counts the columns of the batch."""
    return torch.full((attention_mask.shape[0], 1), attention_mask.shape[1])


@tiny_bug(FORWARD, detectors.watch_rotation)
def query_offset_mutated_in_place(original, model, token_ids, positions, attend, *rest, **options):
    """The query is rotated after the cache has advanced the offset that both of them share."""
    cos, sin = model.rope.rows(torch.ones_like(positions))

    def turned_on(layer, query, key, value):
        return apply_rope(query, cos, sin), key, value

    if getattr(getattr(attend, "cache", None), "length", 0):
        attend = ChangedAttend(attend, turned_on)
    return original(model, token_ids, positions, attend, *rest, **options)


# --- the table and the rotation itself: the right number, turned wrongly ----------------------


def _rope(rope_type: str, dim: int = 64, **params) -> RopeSpec:
    """The checkpoint's own base under a rule that it does not have, for measuring."""
    return RopeSpec(100_000.0, dim, rope_type, tuple(sorted(params.items())))


LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=256,
)  # fmt: skip
YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=1024)
PARTIAL = _rope("default", dim=32)


def _longrope(dim: int, original_len: int) -> RopeSpec:
    short, long = (1.0,) * (dim // 2), (4.0,) * (dim // 2)
    return _rope(
        "longrope", dim, short_factor=short, long_factor=long,
        original_max_position_embeddings=original_len, max_position_embeddings=original_len,
    )  # fmt: skip


@tiny_bug((model_module, "apply_rope"), detectors.watch_rotation)
def interleaved_for_half_split(original, x, cos, sin, interleaved=False):
    return original(x, cos, sin, interleaved=not interleaved)


@tiny_bug(
    ROPE_ROWS,
    detectors.watch_tables,
    mean_kl(LLAMA3, prompt_len=300),
    prompt_len=200,
    rope=replace(LLAMA3, rotary_dim=16),
)
def scaling_parsed_not_applied(original, table, positions):
    return rope_tables(replace(table.rope, rope_type="default", params=()), positions)


@tiny_bug(ROPE_ROWS, detectors.watch_tables, mean_kl(YARN), rope=replace(YARN, rotary_dim=16))
def yarn_factor_dropped(original, table, positions):
    _, factor = rope_inv_freq(table.rope, table.planned_len)
    cos, sin = rope_tables(table.rope, positions, seq_len=table.planned_len)
    return cos / factor, sin / factor


@tiny_bug(ROPE_ROWS, detectors.watch_tables, mean_kl(prompt_len=300), prompt_len=100)
def bf16_angles(original, table, positions):
    inv_freq, factor = rope_inv_freq(table.rope, table.planned_len)
    angles = positions.to(torch.bfloat16)[..., None] * inv_freq.to(torch.bfloat16)
    return angles.float().cos() * factor, angles.float().sin() * factor


# Both runs cross the original length with keys in the cache.
@tiny_bug(
    ROPE_ROWS,
    detectors.watch_tables,
    mean_kl(_longrope(64, 64), prompt_len=64),
    rope=_longrope(16, 8),
)
def table_switch_leaves_keys_stale(original, table, positions):
    return rope_tables(table.rope, positions, seq_len=int(positions.max()) + 1)


@tiny_bug(FORWARD, detectors.watch_rotation, mean_kl(PARTIAL), rope=replace(PARTIAL, rotary_dim=8))
def partial_rotary_ignored(original, model, *arguments, **options):
    whole = copy.copy(model)  # its spec still says how much ought to turn
    whole.rope = RopeTable(replace(model.spec.rope, rotary_dim=model.spec.head_dim))
    return original(whole, *arguments, **options)


# --- attention: which head, which keys --------------------------------------------------------


@tiny_bug(ATTENTION, detectors.watch_heads)
def heads_tiled(original, query, key, value, **options):
    """Query head j reads KV head j % h_kv."""
    heads, kv_heads = query.shape[2], key.shape[1]
    j = torch.arange(heads)
    seat = (j % kv_heads) * (heads // kv_heads) + j // kv_heads
    return original(query[:, :, seat.argsort()], key, value, **options)[:, :, seat]


@tiny_bug(ATTENTION, detectors.watch_heads, mean_kl(num_steps=8))
def top_left_mask(original, query, key, value, **options):
    """Query i of this step sees keys 0..i, as if it stood at the start of the sequence."""
    q = query.shape[1]
    return original(query, key[:, :, :q], value[:, :, :q], **options)


@tiny_bug(ATTENTION, detectors.watch_heads, mean_kl(window=16))
def window_off_by_one(original, query, key, value, *, scale=None, window=None):
    wider = None if window is None else window + 1
    return original(query, key, value, scale=scale, window=wider)


# --- the contiguous cache: what is written, what is kept, what is read back -------------------


@tiny_bug(FORWARD, detectors.watch_rotation)
def write_before_rotate(original, model, token_ids, positions, attend, *rest, **options):
    """K goes into the cache as the projection made it; attention reads it as if rotated."""
    cos, sin = model.rope.rows(positions)

    def turned_back(layer, query, key, value):
        return query, apply_rope(key, cos, -sin), value

    attend = ChangedAttend(attend, turned_back)
    return original(model, token_ids, positions, attend, *rest, **options)


@tiny_bug(FORWARD, detectors.watch_rotation)
def keys_rotated_twice(original, model, token_ids, positions, attend, *rest, **options):
    """K comes rotated, and whatever writes the cache rotates it once more."""
    cos, sin = model.rope.rows(positions)

    def turned_again(layer, query, key, value):
        return query, apply_rope(key, cos, sin), value

    attend = ChangedAttend(attend, turned_again)
    return original(model, token_ids, positions, attend, *rest, **options)


@tiny_bug((ContiguousKVCache, "__init__"), detectors.watch_size, scenes.excess_bytes)
def heads_expanded_before_write(original, cache, spec, *arguments, **options):
    """The cache is made for h heads, and K and V are repeated before they are written."""
    layers = tuple(replace(layer, num_kv_heads=spec.num_heads) for layer in spec.layers)
    original(cache, replace(spec, layers=layers), *arguments, **options)
    write, group = cache.write, spec.num_heads // spec.layers[0].num_kv_heads
    cache.write = lambda layer, key, value: write(
        layer, *(x.repeat_interleave(group, dim=2) for x in (key, value))
    )


@tiny_bug((ContiguousKVCache, "write"), detectors.watch_cache, mean_kl(num_steps=8))
def layout_confused(original, cache, layer, key, value):
    """[b, t, h, d] taken for [b, h, t, d]: the same bytes under other strides."""
    batch, num_new, heads, width = key.shape
    key, value = (x.reshape(batch, heads, num_new, width).transpose(1, 2) for x in (key, value))
    original(cache, layer, key, value)


@bug(
    at=(KVCache, "truncate_to"),
    run=scenes.run_rollbacks,
    measure=scenes.second_conversation_kl,
    watch=detectors.watch_rollback,
)
def stale_rollback(original, cache, length):
    """`if length: ...` around the cut: a cut to nothing cuts nothing."""
    if length:
        original(cache, length)


@tiny_bug((ContiguousKVCache, "read"), detectors.watch_cache, mean_kl(slack=64), slack=8)
def unwritten_rows_read(original, cache, layer):
    return cache.keys[layer], cache.values[layer]
