"""Paged attention in torch: gather K and V by block table, then attend as ever.

A batch is ragged: sequence r has rows query_start_loc[r] .. query_start_loc[r + 1] of the
query, which are the LAST of its seq_lens[r] tokens. What is gathered, and what is masked, is the
same in every layer of a forward, so it is worked out once (GatherPlan) and used num_layers times.

    one query each (decode)   all sequences in one call, padded to the longest
    several (a prompt chunk)  one sequence at a time, through kvlab.attention

Slots that hold nothing may hold NaN, and 0 * NaN is NaN. They are therefore never gathered:
padding repeats a slot of the same sequence that was written, and is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvlab.attention import AttentionError, attention, layer_windows
from kvlab.paged_cache import PagedKVCache
from kvlab.slots import SlotOutOfRange, TableEntryOutOfRange
from kvlab.specs import ModelSpec

__all__ = ["GatherPlan", "PagedAttention", "TableEntryOutOfRange", "paged_attention"]


@dataclass
class DecodeGroup:
    """Sequences with one query each: their rows, slots [R, S] and mask [R, 1, 1, S] or None."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Chunk:
    """One sequence with several queries: rows [start, stop) and the slots they may see."""

    start: int
    stop: int
    slots: torch.Tensor


class GatherPlan:
    """Which slots each query row reads, for one window and all layers that share it."""

    def __init__(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
    ) -> None:
        if window is not None and window < 1:
            raise AttentionError(f"window {window}: expected at least 1, the token itself")
        for tensor, rank in ((block_tables, 2), (seq_lens, 1), (query_start_loc, 1)):
            if tensor.dim() != rank or tensor.is_floating_point():
                raise AttentionError(
                    f"{list(tensor.shape)} in {tensor.dtype} given; expected whole numbers: "
                    "block_tables [R, B], seq_lens [R], query_start_loc [R + 1]"
                )
        self.window, self.block_size = window, block_size
        self.groups: list[DecodeGroup] = []
        self.chunks: list[Chunk] = []
        lens, starts = seq_lens.tolist(), query_start_loc.tolist()
        if len(starts) != len(lens) + 1 or len(block_tables) < len(lens) or starts[0] < 0:
            raise AttentionError(
                f"{len(lens)} seq_lens, {len(starts)} query_start_loc from {starts[:1]} on and "
                f"{len(block_tables)} block tables: expected R, R + 1 from row 0 on, and R"
            )
        self.num_rows = starts[-1]
        decode: list[tuple[int, int, int]] = []  # row, sequence, first visible position
        for r, seq_len in enumerate(lens):
            num_queries = starts[r + 1] - starts[r]
            if num_queries < 0 or seq_len < 0 or num_queries > seq_len > 0:
                raise AttentionError(
                    f"sequence {r} has {num_queries} queries and {seq_len} tokens: the queries "
                    "are the last of the tokens"
                )
            if num_queries == 0 or seq_len == 0:
                continue  # idle: its rows stay 0
            first = 0 if window is None else max(0, seq_len - num_queries - window + 1)
            self._check_row(r, block_tables[r], first, seq_len, num_blocks)
            if num_queries == 1:
                decode.append((starts[r], r, first))
            else:
                visible = torch.arange(first, seq_len, device=block_tables.device)
                slots = self._slots(block_tables[r : r + 1], visible[None])[0]
                self.chunks.append(Chunk(starts[r], starts[r + 1], slots))
        for group in _similar_lengths([(lens[r] - first, row, r) for row, r, first in decode]):
            self.groups.append(self._group(group, block_tables, lens))

    def _check_row(
        self, row: int, table: torch.Tensor, first: int, seq_len: int, num_blocks: int
    ) -> None:
        start, stop = first // self.block_size, -(-seq_len // self.block_size)
        if len(table) < stop:
            raise SlotOutOfRange(
                f"sequence {row} has {seq_len} tokens, which take {stop} blocks of "
                f"{self.block_size}; its table has {len(table)}"
            )
        for entry, block_id in enumerate(table[start:stop].tolist(), start):
            if not 0 <= block_id < num_blocks:
                raise TableEntryOutOfRange(row, entry, block_id, num_blocks)

    def _slots(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of positions [R, S] through block tables [R, blocks]."""
        entries = torch.div(positions, self.block_size, rounding_mode="floor")
        return tables.gather(1, entries).long() * self.block_size + positions % self.block_size

    def _group(
        self, group: list[tuple[int, int, int]], block_tables: torch.Tensor, lens: list[int]
    ) -> DecodeGroup:
        device = block_tables.device
        widest = max(width for width, _, _ in group)
        widths = torch.tensor([width for width, _, _ in group], device=device)[:, None]
        sequences = torch.tensor([r for _, _, r in group], device=device)
        ends = torch.tensor([lens[r] for _, _, r in group], device=device)[:, None]
        steps = torch.arange(widest, device=device)[None]
        visible = steps < widths
        # Past a sequence's end: its first visible position once more, which is written for sure.
        positions = ends - widths + torch.where(visible, steps, 0)
        slots = self._slots(block_tables[sequences], positions)
        mask = None if bool(visible.all()) else visible[:, None, None]
        return DecodeGroup(torch.tensor([row for _, row, _ in group], device=device), slots, mask)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """query [T, h, d] over one layer's pools -> [T, h, d_v]; rows of nobody are 0."""
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
        value_dim = value_cache.shape[3]
        if num_heads % num_kv_heads or query.shape[0] < self.num_rows:
            raise AttentionError(
                f"query {tuple(query.shape)} for {self.num_rows} rows and {num_kv_heads} KV heads: "
                "expected at least that many rows, and a multiple of the KV heads"
            )
        out = query.new_zeros(query.shape[0], num_heads, value_dim)
        for group in self.groups:
            key = _gather(key_cache, group.slots).transpose(1, 2)  # [R, h_kv, S, d]
            value = _gather(value_cache, group.slots).transpose(1, 2)
            folded = query[group.rows].unflatten(1, (num_kv_heads, -1))  # [R, h_kv, group, d]
            result = F.scaled_dot_product_attention(
                folded, key, value, attn_mask=group.mask, scale=scale
            )
            out[group.rows] = result.flatten(1, 2)
        for chunk in self.chunks:
            rows = slice(chunk.start, chunk.stop)
            key = _gather(key_cache, chunk.slots[None]).transpose(1, 2)
            value = _gather(value_cache, chunk.slots[None]).transpose(1, 2)
            out[rows] = attention(query[None, rows], key, value, scale=scale, window=self.window)[0]
        return out


def _similar_lengths(rows: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Rows that may be padded to a common width: one group unless that doubles the reads."""
    if not rows or max(rows)[0] * len(rows) <= 2 * sum(width for width, _, _ in rows):
        return [rows] if rows else []
    groups: dict[int, list[tuple[int, int, int]]] = {}
    for row in rows:
        groups.setdefault(row[0].bit_length(), []).append(row)
    return list(groups.values())


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a pool [blocks, block_size, heads, width] at slots [R, S] -> [R, S, heads, width]."""
    num_blocks, block_size, heads, width = pool.shape
    if pool.is_contiguous():
        flat = pool.view(num_blocks * block_size, heads * width)
        return F.embedding(slots, flat).unflatten(-1, (heads, width))
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    return pool[blocks, slots - blocks * block_size]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch against paged K and V.

    query            [T, h, d], rotated; T >= query_start_loc[-1]
    key_cache        [num_blocks, block_size, h_kv, d], any strides (see PagedKVCache)
    value_cache      [num_blocks, block_size, h_kv, d_v]
    block_tables     [R, B] integers; entries past a sequence's blocks are never read
    seq_lens         [R] tokens of each sequence in the cache, those of this forward included
    query_start_loc  [R + 1] first query row of each sequence, and the end
    scale            multiplies the scores; 1 / sqrt(d) by default
    window           keys a query sees at most, its own included

    Returns [T, h, d_v]; rows that belong to no sequence, or to an empty one, are 0.
    Raises AttentionError, TableEntryOutOfRange, SlotOutOfRange.
    """
    shapes = [tuple(tensor.shape) for tensor in (query, key_cache, value_cache)]
    if shapes[0][-1] != shapes[1][-1] or shapes[1][:3] != shapes[2][:3] or 0 in shapes[1][1:]:
        raise AttentionError(
            f"query, key_cache and value_cache of shapes {shapes}; expected one head_dim of query "
            "and keys, and as many blocks, slots and KV heads of values as of keys"
        )
    num_blocks, block_size = key_cache.shape[:2]
    plan = GatherPlan(block_tables, seq_lens, query_start_loc, num_blocks, block_size, window)
    return plan.attend(query, key_cache, value_cache, scale)


class PagedAttention:
    """The `attend` of a decoder over a paged cache: write by slot, read by block table.

    Made anew for every forward. slot_mapping [T] says where the new K and V go; the other
    arguments are those of paged_attention.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: PagedKVCache,
        *,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> None:
        self.cache = cache
        self.slots = cache.check_slots(slot_mapping)
        self.windows = layer_windows(spec)
        self.plans = {
            window: GatherPlan(
                block_tables,
                seq_lens,
                query_start_loc,
                cache.num_blocks,
                cache.block_size,
                window,
            )
            for window in set(self.windows)
        }

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [T, h, d], key and value [T, h_kv, d] of the new tokens -> [T, h, d]."""
        self.cache.write(layer, key, value, self.slots)
        plan = self.plans[self.windows[layer]]
        return plan.attend(query, self.cache.key_cache(layer), self.cache.value_cache(layer))
