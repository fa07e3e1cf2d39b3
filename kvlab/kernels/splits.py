"""How a decode kernel cuts one sequence's KV range: splits, tiles, and how many of them.

A program handles (one sequence, one KV head, one split). A split is a run of whole tiles; a tile
is the group of keys that one turn of the program's loop loads. Everything here is plain integer
arithmetic, so that the page, the launcher and the tests use the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.errors import KvlabError

#: Below this share of the card's program slots a launch counts as "not filling it".
FILLED = 0.8
#: A candidate is good enough when its wave efficiency reaches this share of the best one.
GOOD_ENOUGH = 0.85
#: Programs that should share a multiprocessor: one loads while the other waits for its softmax.
PROGRAMS_PER_MULTIPROCESSOR = 2
#: More splits than this are never used: the merge would read more than it saves.
MAX_SPLITS = 128


class SplitError(KvlabError):
    """A launch that cannot be cut into splits as it was described."""


def require(least: int, **counts: int) -> None:
    """Raise SplitError unless every count is `least` or more."""
    for name, count in counts.items():
        if count < least:
            raise SplitError(
                f"{name}={count}; expected {least} or more: take it from the tensors or the device"
            )


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def num_tiles(seq_len: int, tile: int, window: int | None = None) -> int:
    """Tiles that hold at least one key the query may see. Tiles start at multiples of `tile`."""
    require(1, tile=tile, window=1 if window is None else window)
    first = max(seq_len - window, 0) if window else 0
    return ceil_div(seq_len, tile) - first // tile


def split_range(
    seq_len: int, split: int, num_splits: int, tile: int, window: int | None = None
) -> tuple[int, int]:
    """Positions [begin, end) that split number `split` walks over; empty when begin >= end.

    The kernel computes the same two numbers. With a window the first tile may begin before the
    first visible position: those keys are masked, not loaded.
    """
    require(1, num_splits=num_splits)
    require(0, seq_len=seq_len, split=split)
    first = max(seq_len - window, 0) if window else 0
    per_split = ceil_div(num_tiles(seq_len, tile, window), num_splits)
    begin = (first // tile + split * per_split) * tile
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
    max_splits: int = MAX_SPLITS,
    programs_per_multiprocessor: int = PROGRAMS_PER_MULTIPROCESSOR,
) -> int:
    """How many programs share one (sequence, KV head).

    1. If sequences x KV heads fill 0.8 of the card's slots, one split: splitting further only
       adds partial results to merge.
    2. Otherwise try every count that makes the splits shorter, and take the smallest whose wave
       efficiency is within 85 % of the best. Each extra split costs a partial result, so fewest
       wins among the good ones. A fixed table ("8 splits above 2,048 tokens") makes a cliff
       where it steps; this rule has none to fall from.

    Nothing to do (no sequence, no token) is one split. Raises SplitError for counts that no
    launch has.
    """
    require(0, num_seqs=num_seqs, num_kv_heads=num_kv_heads, max_seq_len=max_seq_len)
    require(1, num_multiprocessors=num_multiprocessors, max_splits=max_splits)
    require(1, programs_per_multiprocessor=programs_per_multiprocessor)
    pairs = num_seqs * num_kv_heads
    slots = num_multiprocessors * programs_per_multiprocessor
    tiles = num_tiles(max_seq_len, tile, window)
    if pairs == 0 or tiles <= 1 or pairs >= FILLED * slots:
        return 1
    candidates = {
        splits: wave_efficiency(pairs * splits, slots)
        for splits in range(1, min(tiles, max_splits, slots) + 1)
        if splits == 1 or ceil_div(tiles, splits) != ceil_div(tiles, splits - 1)
    }
    best = max(candidates.values())
    return min(splits for splits, share in candidates.items() if share >= GOOD_ENOUGH * best)


@dataclass(frozen=True)
class TileRead:
    """One turn of a program's loop: what it looks up and which cache rows it loads."""

    first_position: int
    positions: tuple[int, ...]  # the visible ones; the others are masked and not loaded
    table_entries: tuple[int, ...]  # logical block numbers looked up in the block table
    block_ids: tuple[int, ...]  # physical block of each position
    slots: tuple[int, ...]  # block_id * block_size + offset, of each position


def replay(
    block_table: list[int],
    block_size: int,
    seq_len: int,
    split: int,
    num_splits: int,
    tile: int,
    window: int | None = None,
) -> list[TileRead]:
    """What program (this sequence, any KV head, `split`) reads, tile after tile."""
    first = max(seq_len - window, 0) if window else 0
    begin, end = split_range(seq_len, split, num_splits, tile, window)
    turns = []
    for start in range(begin, end, tile):
        positions = tuple(p for p in range(start, start + tile) if first <= p < end)
        block_ids = tuple(block_table[p // block_size] for p in positions)
        slots = tuple(
            block_id * block_size + p % block_size
            for block_id, p in zip(block_ids, positions, strict=True)
        )
        entries = tuple(sorted({p // block_size for p in positions}))
        turns.append(TileRead(start, positions, entries, block_ids, slots))
    return turns


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
