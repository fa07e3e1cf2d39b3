"""What the kernel is held against, in torch: slow and short on purpose.

    paged_decode_reference   the mathematics, in float64, by gather
    paged_decode_torch       the kernel's programs one after another, where Triton does not run
    replay                   what one program looks up and loads, turn by turn
    trace_loads              what the kernel really loaded, in Triton's interpreter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvlab.kernels import KernelError, refuse
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.paged_decode import check_block_tables, misfits
from kvlab.kernels.splits import first_visible, split_range

if kernels.INTERPRETED:
    from triton.runtime import interpreter
else:
    interpreter = None


# -- the mathematics --------------------------------------------------------------------


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of the keys, with what a merge needs.

    query [G, d], key [n, d], value [n, dv] -> out [G, dv], lse [G], where lse is the logarithm
    of the sum of exp(score). No keys: out is 0 and lse is -inf.
    """
    if key.shape[0] == 0:
        no_sum = query.new_full((query.shape[0],), float("-inf"))
        return query.new_zeros(query.shape[0], value.shape[1]), no_sum
    scores = query @ key.T * scale  # [G, n]
    lse = torch.logsumexp(scores, dim=1)
    return torch.exp(scores - lse[:, None]) @ value, lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint keys: outs [S, ..., dv], lses [S, ...].

    Each part weighs exp(lse), the sum its softmax was divided by. Where every part is empty
    (lse -inf) the result is 0 with lse -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    top = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    return (outs * torch.exp(lses - top)[..., None]).sum(dim=0), lse


def paged_decode_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention in float64, one sequence and one KV head at a time.

    query [num_seqs, num_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, dim],
    block_tables [num_seqs, max_blocks], seq_lens [num_seqs]
    -> out [num_seqs, num_heads, value_dim], lse [num_seqs, num_heads].
    """
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    out = query.new_zeros(num_seqs, num_heads, value_dim, dtype=torch.float64)
    lse = query.new_zeros(num_seqs, num_heads, dtype=torch.float64)
    for seq in range(num_seqs):
        seq_len = int(seq_lens[seq])
        first = first_visible(seq_len, window)
        positions = torch.arange(first, seq_len, device=query.device)
        blocks = block_tables[seq].long()[positions // block_size]
        keys = key_cache[blocks, positions % block_size].double()  # [n, num_kv_heads, d]
        values = value_cache[blocks, positions % block_size].double()
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            out[seq, heads], lse[seq, heads] = partial_attention(
                query[seq, heads].double(), keys[:, head], values[:, head], scale
            )
    return out, lse


# -- the kernel's programs, one after another -------------------------------------------
# Each of the kernel's pieces stands alone here, to be read, tried and broken on purpose
# (kvlab.faults). The programs take them from this module by name.


def strides_of(cache: torch.Tensor) -> tuple[int, int, int]:
    """Elements from one block, token and head to the next; taken from the tensor."""
    block, token, head, _ = cache.stride()
    return block, token, head


def kv_offset(
    block_id: torch.Tensor, slot: torch.Tensor, head: int, strides: tuple[int, int, int]
) -> torch.Tensor:
    """Elements from the cache's first to row (block_id, slot, head). Give 64-bit integers."""
    return block_id * strides[0] + slot * strides[1] + head * strides[2]


def load_rows(cache: torch.Tensor, offsets: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Rows [N, dim] at element offsets [N]; masked rows are zeros and are not loaded.

    Like a pointer, it knows no bounds but those of the memory behind the tensor.
    """
    dim = cache.shape[-1]
    length = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    flat = cache.as_strided((length,), (1,))
    rows = cache.new_zeros(len(offsets), dim)
    rows[visible] = flat[offsets[visible][:, None] + torch.arange(dim)]
    return rows


def fold_tile(
    top: torch.Tensor,
    total: torch.Tensor,
    acc: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One tile into the running softmax, in float32: the kernel's `fold_tile`, line by line.

    top, total [G], acc [G, dv], q [G, d], k [N, d], v [N, dv], visible [N].
    """
    scores = q.float() @ k.float().T * scale
    scores = torch.where(visible[None, :], scores, float("-inf"))
    new_top = torch.maximum(top, scores.max(dim=1).values)
    p = torch.exp(scores - new_top[:, None])
    shrink = torch.exp(top - new_top)
    return new_top, total * shrink + p.sum(1), acc * shrink[:, None] + p @ v.float()


def paged_decode_torch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    num_splits: int = 2,
    fold: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All programs of a launch, then the merge. Arguments, results and errors as `paged_decode`."""
    case = (query, key_cache, value_cache, block_tables, seq_lens)
    refuse(misfits(*case, scale, window, num_splits))
    num_seqs, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, value_dim = value_cache.shape
    check_block_tables(block_tables, seq_lens, num_blocks, block_size, window)
    scale = head_dim**-0.5 if scale is None else scale
    group, tile = num_heads // num_kv_heads, 32
    out = torch.empty(num_seqs, num_heads, value_dim)
    lse = torch.empty(num_seqs, num_heads)

    def decode_split(seq: int, kv_head: int, split: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One program -> out [group, value_dim], lse [group]."""
        q = query[seq, kv_head * group : (kv_head + 1) * group]
        seq_len = int(seq_lens[seq])
        first = first_visible(seq_len, window)
        begin, end = split_range(seq_len, split, num_splits, tile, window)
        top = torch.full((group,), float("-inf"))
        total, acc = torch.zeros(group), torch.zeros(group, value_dim)
        for start in range(begin, end, tile):
            position = torch.arange(start, start + tile)
            visible = (position >= first) & (position < end)
            block_id = torch.zeros_like(position)  # a masked lane looks nothing up and keeps 0
            block_id[visible] = block_tables[seq, position[visible] // block_size].long()
            slot = position % block_size
            k_at = kv_offset(block_id, slot, kv_head, strides_of(key_cache))
            v_at = kv_offset(block_id, slot, kv_head, strides_of(value_cache))
            k, v = load_rows(key_cache, k_at, visible), load_rows(value_cache, v_at, visible)
            top, total, acc = (fold or fold_tile)(top, total, acc, q, k, v, visible, scale)
        empty = total == 0
        divisor = torch.where(empty, 1.0, total)
        part_lse = torch.where(empty, float("-inf"), top + torch.log(divisor))
        return acc / divisor[:, None], part_lse

    for seq in range(num_seqs):
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            parts = [decode_split(seq, kv_head, split) for split in range(num_splits)]
            outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
            out[seq, heads], lse[seq, heads] = merge(outs, lses)
    return out.to(query.dtype), lse


# -- what is loaded ---------------------------------------------------------------------


@dataclass(frozen=True)
class TileRead:
    """One turn of a program's loop: what it looks up and which cache rows it loads."""

    positions: tuple[int, ...]  # the visible ones; the others are masked and not loaded
    table_entries: tuple[int, ...]  # logical block numbers looked up in the block table
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
    first = first_visible(seq_len, window)
    begin, end = split_range(seq_len, split, num_splits, tile, window)
    turns = []
    for start in range(begin, end, tile):
        positions = tuple(range(max(start, first), min(start + tile, end)))
        entries = tuple(sorted({p // block_size for p in positions}))
        slots = (block_table[p // block_size] * block_size + p % block_size for p in positions)
        turns.append(TileRead(positions, entries, tuple(slots)))
    return turns


class LoadTrace:
    """What the kernels launched inside `trace_loads` loaded, in order."""

    def __init__(self) -> None:
        #: (program, addresses in bytes of the lanes that were not masked), one a load
        self.loads: list[tuple[tuple[int, ...], np.ndarray]] = []

    def elements(
        self, tensor: torch.Tensor, program: tuple[int, int, int] | None = None
    ) -> list[int]:
        """Element offsets from the tensor's first element, of what was loaded inside it.

        In order and with repeats. A view counts from its first element to its last one, and so
        includes what lies between its rows.
        """
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        found: list[int] = []
        for loader, addresses in self.loads:
            if program in (None, loader):
                offsets = (addresses - tensor.data_ptr()) // tensor.element_size()
                found += offsets[(offsets >= 0) & (offsets < span)].tolist()
        return found

    def bytes_loaded(self, tensor: torch.Tensor) -> int:
        """Bytes loaded from the tensor, repeats counted."""
        return len(self.elements(tensor)) * tensor.element_size()


@contextmanager
def trace_loads() -> Iterator[LoadTrace]:
    """Record every load of every kernel launched in the block; Triton's interpreter only.

    A masked lane that is not loaded leaves no record, so the trace proves what the kernel does
    not touch as well as what it does.
    """
    if interpreter is None:
        raise KernelError("this needs Triton's interpreter: start with TRITON_INTERPRET=1.")
    trace = LoadTrace()
    builder = type(interpreter.interpreter_builder)
    load = builder.create_masked_load

    def traced_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        lanes = np.broadcast_to(mask.data, pointers.data.shape)
        trace.loads.append((tuple(self.grid_idx), pointers.data[lanes].astype(np.int64)))
        return load(self, pointers, mask, *rest)

    builder.create_masked_load = traced_load
    try:
        yield trace
    finally:
        builder.create_masked_load = load
