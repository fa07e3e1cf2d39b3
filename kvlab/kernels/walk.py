"""The kernel's walk in torch: one program after another, the same offsets, masks and merge.

Runs where Triton does not, and each of the kernel's pieces stands alone here, to be read, tried
and broken on purpose (kvlab.faults). Nothing is fast about it.

    strides_of   how far apart blocks, tokens and heads lie
    look_up      position -> block id
    kv_offset    block id, slot and head -> element offset
    load_rows    masked load of K or V rows
    fold_tile    one tile into the running softmax
    merge        partial results of the splits (kvlab.kernels.reference)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvlab.kernels.checks import check_block_tables, check_shapes
from kvlab.kernels.reference import merge
from kvlab.kernels.splits import require, split_range

Fold = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def strides_of(cache: torch.Tensor) -> tuple[int, int, int]:
    """Elements from one block, token and head to the next; taken from the tensor."""
    block, token, head, _ = cache.stride()
    return block, token, head


def look_up(table: torch.Tensor, entries: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Block ids at entries [N] of one sequence's table; masked lanes load nothing and get 0."""
    ids = torch.zeros_like(entries)
    ids[mine] = table[entries[mine]].long()
    return ids


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


def decode_split(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    seq_len: int,
    kv_head: int,
    split: int,
    num_splits: int,
    tile: int,
    scale: float,
    window: int | None,
    fold: Fold | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program: query [G, d] of one sequence and KV head -> out [G, dv], lse [G]."""
    first = max(seq_len - window, 0) if window else 0
    begin, end = split_range(seq_len, split, num_splits, tile, window)
    block_size = key_cache.shape[1]
    top = torch.full((len(query),), float("-inf"))
    total, acc = torch.zeros(len(query)), torch.zeros(len(query), value_cache.shape[-1])
    for start in range(begin, end, tile):
        position = torch.arange(start, start + tile)
        visible = (position >= first) & (position < end)
        block_id = look_up(table, position // block_size, visible)
        slot = position % block_size
        k_at = kv_offset(block_id, slot, kv_head, strides_of(key_cache))
        v_at = kv_offset(block_id, slot, kv_head, strides_of(value_cache))
        k, v = load_rows(key_cache, k_at, visible), load_rows(value_cache, v_at, visible)
        top, total, acc = (fold or fold_tile)(top, total, acc, query, k, v, visible, scale)
    empty = total == 0
    divisor = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), top + torch.log(divisor))
    return acc / divisor[:, None], lse


def paged_decode_walk(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = 2,
    tile: int = 32,
    fold: Fold | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All programs of a launch, then the merge. Arguments and results as `launch.paged_decode`."""
    check_shapes(query, key_cache, value_cache, block_tables, seq_lens)
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    num_splits = 1 if num_splits is None else num_splits
    require(1, num_splits=num_splits)
    check_block_tables(block_tables, seq_lens, key_cache.shape[0], key_cache.shape[1], window)
    out = torch.empty(num_seqs, num_heads, value_cache.shape[3])
    lse = torch.empty(num_seqs, num_heads)
    for seq in range(num_seqs):
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            parts = [
                decode_split(
                    query[seq, heads], key_cache, value_cache, block_tables[seq],
                    int(seq_lens[seq]), kv_head, split, num_splits, tile, scale, window, fold,
                )
                for split in range(num_splits)
            ]  # fmt: skip
            outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
            out[seq, heads], lse[seq, heads] = merge(outs, lses)
    return out.to(query.dtype), lse
