"""How a decode kernel's work is cut: the shape of a tile, and the number of splits.

A program handles (one sequence, one KV head, one split). A split is a run of whole tiles; a tile
is the group of keys that one turn of the program's loop loads. Everything here is plain integer
arithmetic, so that the page, the launcher and the tests use the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.kernels import refuse

#: The first compute capability, times ten, that Triton's maintainers support. It is also the first
#: with arithmetic in bf16, and with copies that run beside the arithmetic.
SUPPORTED_FROM = 80
#: Bytes of one tile of K and V. It waits in shared memory, of which a T4 has 64 KiB.
TILE_BYTES = 24 * 1024
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


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tile:
    """The shape of one program's work and how the compiler schedules it."""

    keys: int  # keys per turn of the loop
    block_g: int  # rows of the score tile: the query heads of one KV head, rounded up
    block_d: int  # head_dim rounded up
    block_v: int  # value_dim rounded up
    num_warps: int
    num_stages: int  # tiles in flight: 3 looks up one tile and loads another meanwhile

    def constants(self, group: int, head_dim: int, value_dim: int, block_size: int) -> dict:
        """What `decode_split` is compiled for: the case's sizes and the tile's."""
        case = {"GROUP": group, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim}
        case |= {"BLOCK_SIZE": block_size, "TILE": self.keys}
        return case | {"BLOCK_G": self.block_g, "BLOCK_D": self.block_d, "BLOCK_V": self.block_v}

    def merge_constants(self, value_dim: int, num_splits: int) -> dict[str, int]:
        """What `merge_splits` is compiled for."""
        block_s = next_power_of_2(num_splits)
        sizes = {"VALUE_DIM": value_dim, "BLOCK_V": self.block_v}
        return sizes | {"BLOCK_S": block_s, "CHUNK": min(block_s, 16)}


def choose_tile(
    group: int, head_dim: int, value_dim: int, bytes_per_element: int, capability: int
) -> Tile:
    """The shipped tile for one shape. capability is 75, 80, 90, ...

    Tensor cores multiply 16 rows at a time, so from sm_80 on the group is padded to 16. On sm_75
    Triton uses plain FMA instructions: padding there would be work for nothing, and would push
    the kernel past 128 registers a thread. Three stages keep two loads ahead of the arithmetic:
    the block table's entry, and then the keys and values that it points to.
    """
    block_d = max(16, next_power_of_2(head_dim))
    block_v = max(16, next_power_of_2(value_dim))
    block_g = next_power_of_2(group)
    row_bytes = (block_d + block_v) * bytes_per_element
    keys = 32 if 32 * row_bytes <= TILE_BYTES else 16
    num_stages = 3 if keys * row_bytes <= 2 * TILE_BYTES else 1
    if capability >= SUPPORTED_FROM:
        block_g = max(16, block_g)
    else:
        keys = keys if block_g <= 4 else 16
        num_stages = 1  # no asynchronous copies before sm_80: nothing to keep in flight
    return Tile(keys, block_g, block_d, block_v, 4 if block_d <= 512 else 8, num_stages)


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
