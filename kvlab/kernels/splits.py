"""How a decode kernel cuts one sequence's KV range: splits, tiles, and how many of them.

A program handles (one sequence, one KV head, one split). A split is a run of whole tiles; a tile
is the group of keys that one turn of the program's loop loads. Everything here is plain integer
arithmetic, so that the page, the launcher and the tests use the same rule.
"""

from __future__ import annotations

from typing import Any

from kvlab.kernels import refuse

#: Below this share of the card's program slots a launch counts as "not filling it".
FILLED = 0.8
#: A candidate is good enough when its wave efficiency reaches this share of the best one.
GOOD_ENOUGH = 0.85
#: Programs that should share a multiprocessor: one loads while the other waits for its softmax.
PROGRAMS_PER_MULTIPROCESSOR = 2
#: More splits than this are never used: the merge would read more than it saves.
MAX_SPLITS = 128


def require(least: int, **counts: int) -> None:
    """Raise KernelError unless every count is `least` or more."""
    refuse(
        f"{name}={count}; expected {least} or more: take it from the tensors or the device"
        for name, count in counts.items()
        if count < least
    )


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def first_visible(seq_len: int, window: int | None = None) -> int:
    """The first position that the query, the last of seq_len tokens, may look back on."""
    return max(seq_len - window, 0) if window else 0


def num_tiles(seq_len: int, tile: int, window: int | None = None) -> int:
    """Tiles that hold at least one key the query may see. Tiles start at multiples of `tile`."""
    require(1, tile=tile, window=1 if window is None else window)
    return ceil_div(seq_len, tile) - first_visible(seq_len, window) // tile


def split_range(
    seq_len: int, split: int, num_splits: int, tile: int, window: int | None = None
) -> tuple[int, int]:
    """Positions [begin, end) that split number `split` walks over; empty when begin >= end.

    The kernel computes the same two numbers. With a window the first tile may begin before the
    first visible position: those keys are masked, not loaded.
    """
    require(1, num_splits=num_splits)
    require(0, seq_len=seq_len, split=split)
    per_split = ceil_div(num_tiles(seq_len, tile, window), num_splits)
    begin = (first_visible(seq_len, window) // tile + split * per_split) * tile
    return begin, min(begin + per_split * tile, seq_len)


def wave_efficiency(num_programs: int, num_slots: int) -> float:
    """Share of a card's program slots that have work, over the whole launch.

    265 programs on 264 slots take two waves and leave 263 slots idle: 265 / 528.
    """
    require(1, num_slots=num_slots)
    if num_programs == 0:
        return 0.0
    return num_programs / (ceil_div(num_programs, num_slots) * num_slots)


def choose_num_splits(
    num_seqs: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_multiprocessors: int,
    tile: int,
    window: int | None = None,
) -> int:
    """How many programs share one (sequence, KV head).

    1. If sequences x KV heads fill 0.8 of the card's slots, one split: splitting further only
       adds partial results to merge.
    2. Otherwise try every count that makes the splits shorter, and take the smallest whose wave
       efficiency is within 85 % of the best. Each extra split costs a partial result, so fewest
       wins among the good ones. A fixed table ("8 splits above 2,048 tokens") makes a cliff
       where it steps; this rule has none to fall from.

    Nothing to do (no sequence, no token) is one split. Raises KernelError for counts that no
    launch has.
    """
    require(0, num_seqs=num_seqs, num_kv_heads=num_kv_heads, max_seq_len=max_seq_len)
    require(1, num_multiprocessors=num_multiprocessors)
    pairs = num_seqs * num_kv_heads
    slots = num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    tiles = num_tiles(max_seq_len, tile, window)
    if pairs == 0 or tiles <= 1 or pairs >= FILLED * slots:
        return 1
    candidates = {
        splits: wave_efficiency(pairs * splits, slots)
        for splits in range(1, min(tiles, MAX_SPLITS, slots) + 1)
        if splits == 1 or ceil_div(tiles, splits) != ceil_div(tiles, splits - 1)
    }
    best = max(candidates.values())
    return min(splits for splits, share in candidates.items() if share >= GOOD_ENOUGH * best)


def split_table(
    num_seqs: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_multiprocessors: int,
    tile: int,
    num_splits: int | None = None,
) -> dict[str, Any]:
    """Everything the split widget shows about one launch, as plain JSON values."""
    chosen = choose_num_splits(num_seqs, num_kv_heads, max_seq_len, num_multiprocessors, tile)
    splits = chosen if num_splits is None else num_splits
    require(1, num_splits=splits)
    ranges = [split_range(max_seq_len, i, splits, tile) for i in range(splits)]
    programs = num_seqs * num_kv_heads * splits
    slots = num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    return {
        "chosen_splits": chosen,
        "num_splits": splits,
        "num_tiles": num_tiles(max_seq_len, tile),
        "ranges": ranges,
        "num_programs": programs,
        "num_slots": slots,
        "num_waves": ceil_div(programs, slots),
        "efficiency": wave_efficiency(programs, slots),
    }
