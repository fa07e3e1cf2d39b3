"""The paged KV cache, and attention that reads it: one pool of K and one of V per layer.

    layer 0   K [num_blocks, block_size, h_kv, d_h]   V [num_blocks, block_size, h_kv, d_h]
    layer 1   ...                                     a block id means the same in every layer

The cache knows slots and blocks. Whose they are is the business of BlockManager (kvlab.tables).
K and V of a token go to one slot: slot = block id * block_size + offset.

Attention here is the plain way: gather K and V by block table, then attend as ever. A batch is
ragged: sequence r has rows query_start_loc[r] .. query_start_loc[r + 1] of the query, which are
the LAST of its seq_lens[r] tokens. What is gathered, and what is masked, is the same in every
layer of a forward, so it is worked out once (GatherPlan) and used num_layers times.

    one query each (decode)   all sequences in one call, padded to the longest
    several (a prompt chunk)  one sequence at a time, through kvlab.attention

Slots that hold nothing may hold NaN, and 0 * NaN is NaN. They are therefore never gathered:
padding repeats a slot of the same sequence that was written, and is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from kvlab.attention import attention, check_options, layer_windows
from kvlab.blocks import NULL_BLOCK, blocks_for
from kvlab.errors import AttentionError, BlockError, CacheError, whole
from kvlab.specs import ModelSpec

LAYOUTS = ("NHD", "HND")


class PagedKVCache:
    """Pools of K and V for every layer of one model.

    num_blocks   blocks of each pool, the null block included
    layout       order in memory. Two hold the same bytes: "NHD" keeps a token's heads together,
                 "HND" a head's tokens. key_cache() and value_cache() show both as
                 [block, offset, head, d_h], so that no reader can mix them up.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> None:
        self.num_blocks = whole("num_blocks", num_blocks, 1, CacheError)
        self.block_size = whole("block_size", block_size, 1, CacheError)
        kinds = {layer.kind for layer in spec.layers} - {"full", "sliding", "chunked"}
        if layout not in LAYOUTS or kinds:
            raise CacheError(
                f"layout {layout!r} and layers of kind {sorted(kinds)} given; expected one of "
                f"{LAYOUTS}, and full, sliding or chunked attention layers: no other keeps plain "
                "K and V"
            )
        self.spec, self.layout = spec, layout
        self._pools = [
            [self._pool(layer.num_kv_heads, width, dtype, device)
             for width in (layer.key_dim, layer.value_dim)]
            for layer in spec.layers
        ]  # fmt: skip
        self.device = torch.device(device)

    def _pool(
        self, num_kv_heads: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Zeros, as [num_blocks, block_size, num_kv_heads, width] whatever the layout."""
        if self.layout == "NHD":
            shape = (self.num_blocks, self.block_size, num_kv_heads, width)
            return torch.zeros(shape, dtype=dtype, device=device)
        shape = (self.num_blocks, num_kv_heads, self.block_size, width)
        return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)

    def key_cache(self, layer: int) -> torch.Tensor:
        """K of one layer, [num_blocks, block_size, num_kv_heads, head_dim]; a view."""
        return self._pools[layer][0]

    def value_cache(self, layer: int) -> torch.Tensor:
        """V of one layer, [num_blocks, block_size, num_kv_heads, head_dim]; a view."""
        return self._pools[layer][1]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(key.nbytes + value.nbytes for key, value in self._pools)

    def check_slots(self, slot_mapping: torch.Tensor | list[int]) -> CheckedSlots:
        """Look at a slot mapping once, so that every layer of a forward can write with it.

        Negative slots are padding: their rows are written nowhere. (As a Python index, -1 would
        be the last slot of the pool.) Raises CacheError for what is no row of slots of this
        pool: 3.7 would quietly become slot 3.
        """
        if isinstance(slot_mapping, torch.Tensor):
            slot_mapping = slot_mapping.tolist()
        slots = slot_mapping
        wrong = [slot for slot in slots if type(slot) is not int or slot >= self.num_slots]
        if wrong:
            raise CacheError(
                f"slot_mapping holds {wrong[0]!r}; expected one whole number for each row of K and "
                f"V, below {self.num_slots} ({self.num_blocks} blocks of {self.block_size}): "
                "nothing was written"
            )
        rows = [row for row, slot in enumerate(slots) if slot >= 0]
        written = torch.tensor([slots[row] for row in rows], dtype=torch.long, device=self.device)
        where = None
        if len(rows) < len(slots):
            where = torch.tensor(rows, dtype=torch.long, device=self.device)
        return CheckedSlots(len(slots), written, where, self.block_size)

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor | list[int] | CheckedSlots,
    ) -> None:
        """Store row i of K and V in slot slot_mapping[i] of one layer.

        key, value     [T, num_kv_heads, head_dim], K already rotated
        slot_mapping   [S], S <= T; rows past S and rows with a negative slot are ignored

        Raises CacheError; nothing is written then.
        """
        slots = slot_mapping
        if not isinstance(slots, CheckedSlots):
            slots = self.check_slots(slots)
        pools = self._pools[layer]
        for rows, pool, name in zip((key, value), pools, ("K", "V"), strict=True):
            if rows.shape[1:] != pool.shape[2:] or rows.shape[0] < slots.num_rows:
                raise CacheError(
                    f"layer {layer} was given {name} of shape {tuple(rows.shape)} for "
                    f"{slots.num_rows} slots, expected [{slots.num_rows} or more, "
                    f"{pool.shape[2]}, {pool.shape[3]}] (tokens, KV heads, head_dim). K and V "
                    "are stored per KV head: do not repeat them for the query heads."
                )
        for rows, pool in zip((key, value), pools, strict=True):
            slots.scatter(rows, pool)

    def read(
        self, layer: int, block_table: list[int], seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions 0 .. seq_len - 1, each [seq_len, num_kv_heads, head_dim]; copies.

        The read side in its plainest form: whole blocks in table order, cut to the length.
        """
        entries = block_table[: blocks_for(seq_len, self.block_size)]
        check_table(entries, 0, seq_len, self.num_blocks, self.block_size)
        table = torch.tensor(entries, dtype=torch.long, device=self.device)
        key, value = (pool[table].flatten(0, 1)[:seq_len] for pool in self._pools[layer])
        return key, value

    def copy_block(self, src: int, dst: int) -> None:
        """Copy K and V of a whole block in every layer: what copy on write asks for."""
        assert 0 <= src < self.num_blocks and 0 <= dst < self.num_blocks, f"blocks {src}, {dst}"
        for key, value in self._pools:
            key[dst] = key[src]
            value[dst] = value[src]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Do the (src, dst) copies that BlockManager.grow() returned, in order."""
        for src, dst in copies:
            self.copy_block(src, dst)


class CheckedSlots:
    """A slot mapping that fits one pool: made by PagedKVCache.check_slots()."""

    def __init__(
        self, num_rows: int, slots: torch.Tensor, rows: torch.Tensor | None, block_size: int
    ) -> None:
        self.num_rows = num_rows  # rows of K and V that the mapping speaks about
        self.slots = slots  # of the rows that are written
        self.rows = rows  # which rows those are; None: the first num_rows, all of them
        self.blocks = torch.div(slots, block_size, rounding_mode="floor")
        self.offsets = slots - self.blocks * block_size

    def scatter(self, rows: torch.Tensor, pool: torch.Tensor) -> None:
        """Put rows [T, heads, width] into pool [blocks, block_size, heads, width]."""
        rows = rows[: self.num_rows] if self.rows is None else rows[self.rows]
        rows = rows.detach()  # the pool keeps values, not the graph of every forward
        if pool.is_contiguous():
            pool.flatten(0, 1).index_copy_(0, self.slots, rows.to(pool.dtype))
        else:
            pool[self.blocks, self.offsets] = rows.to(pool.dtype)


def check_table(
    table: list[int], first: int, seq_len: int, num_blocks: int, block_size: int, row: int = 0
) -> None:
    """Raise BlockError unless positions first .. seq_len - 1 can be read through a block table."""
    start, stop = first // block_size, blocks_for(seq_len, block_size)
    if len(table) < stop:
        raise BlockError(
            f"sequence {row} has {seq_len} tokens, which take {stop} blocks of {block_size}; its "
            f"table has {len(table)}"
        )
    for entry in range(start, stop):
        if not NULL_BLOCK < table[entry] < num_blocks:
            raise BlockError(
                f"block_tables[{row}][{entry}] is {table[entry]}; the pool has blocks 1 to "
                f"{num_blocks - 1}, and block 0 holds nothing to read: a stale row, or a table of "
                f"another pool or window"
            )


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
    """Which slots each query row reads, for one window and all layers that share it.

    This is the door of paged attention: tables, lengths and rows that do not fit each other
    raise AttentionError or BlockError here. All is worked out on lists, and a few rows of numbers
    go to the device: nothing is read back from it.
    """

    def __init__(
        self,
        block_tables: list[list[int]],
        seq_lens: list[int],
        query_start_loc: list[int],
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_options(None, window)
        self.window, self.block_size, self.device = window, block_size, device
        lens, starts = seq_lens, query_start_loc
        counts = [stop - start for start, stop in pairwise(starts)]
        is_fit = len(starts) == len(lens) + 1 and len(block_tables) >= len(lens) and starts[0] >= 0
        if not is_fit or any(not (0 <= q <= n or n == 0 <= q) for q, n in zip(counts, lens)):
            raise AttentionError(
                f"seq_lens {lens} and query_start_loc {starts} for {len(block_tables)} block "
                "tables; expected R, R + 1 and R or more, and for each sequence at most as many "
                "queries as tokens: the queries are the last of the tokens"
            )
        self.num_rows = starts[-1]
        self.groups: list[DecodeGroup] = []
        self.chunks: list[Chunk] = []
        tables = table_rows(block_tables, device)
        decode: list[tuple[int, int, int]] = []  # visible tokens, row, sequence
        for r, (num_queries, seq_len) in enumerate(zip(counts, lens)):
            if num_queries == 0 or seq_len == 0:
                continue  # idle: its rows stay 0
            first = 0 if window is None else max(0, seq_len - num_queries - window + 1)
            check_table(block_tables[r], first, seq_len, num_blocks, block_size, r)
            if num_queries == 1:
                decode.append((seq_len - first, starts[r], r))
            else:
                visible = torch.arange(first, seq_len, device=device)
                slots = self._slots(tables[r : r + 1], visible[None])[0]
                self.chunks.append(Chunk(starts[r], starts[r + 1], slots))
        for group in _similar_lengths(decode):
            self.groups.append(self._group(group, tables, lens))

    def _slots(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of positions [R, S] through block tables [R, blocks]."""
        entries = torch.div(positions, self.block_size, rounding_mode="floor")
        return tables.gather(1, entries) * self.block_size + positions % self.block_size

    def _group(
        self, group: list[tuple[int, int, int]], tables: torch.Tensor, lens: list[int]
    ) -> DecodeGroup:
        numbers = [(width, row, r, lens[r]) for width, row, r in group]
        widths, rows, sequences, ends = torch.tensor(numbers, device=self.device).unbind(1)
        steps = torch.arange(max(group)[0], device=self.device)[None]
        visible = steps < widths[:, None]
        # Past a sequence's end: its first visible position once more, which is written for sure.
        positions = (ends - widths)[:, None] + torch.where(visible, steps, 0)
        slots = self._slots(tables[sequences], positions)
        is_even = len({width for width, _, _ in group}) == 1
        return DecodeGroup(rows, slots, None if is_even else visible[:, None, None])

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """query [T, h, d] over one layer's pools -> [T, h, d_v]; rows of nobody are 0."""
        num_heads, num_kv_heads, value_dim = query.shape[1], *value_cache.shape[2:]
        assert query.shape[0] >= self.num_rows, f"{len(query)} rows for {self.num_rows} queries"
        assert num_heads % num_kv_heads == 0, "query heads are a multiple of the KV heads"
        out = query.new_zeros(query.shape[0], num_heads, value_dim)
        for group in self.groups:
            key = _gather(key_cache, group.slots).transpose(1, 2)
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
    Raises AttentionError, and BlockError for a table that cannot be read.
    """
    check_options(scale, window)
    shapes = [tuple(tensor.shape) for tensor in (query, key_cache, value_cache)]
    if shapes[0][-1] != shapes[1][-1] or shapes[1][:3] != shapes[2][:3] or 0 in shapes[1][1:]:
        raise AttentionError(
            f"query, key_cache and value_cache of shapes {shapes}; expected one head_dim of query "
            "and keys, and as many blocks, slots and KV heads of values as of keys"
        )
    for tensor, rank in ((block_tables, 2), (seq_lens, 1), (query_start_loc, 1)):
        if tensor.dim() != rank or tensor.is_floating_point():
            raise AttentionError(
                f"{list(tensor.shape)} in {tensor.dtype} given; expected whole numbers: "
                "block_tables [R, B], seq_lens [R], query_start_loc [R + 1]"
            )
    plan = GatherPlan(
        block_tables.tolist(),
        seq_lens.tolist(),
        query_start_loc.tolist(),
        num_blocks=key_cache.shape[0],
        block_size=key_cache.shape[1],
        window=window,
        device=query.device,
    )
    return plan.attend(query, key_cache, value_cache, scale)


class PagedAttention:
    """The `attend` of a decoder over a paged cache: write by slot, read by block table.

    Made anew for every forward. slot_mapping [T] says where the new K and V go; the other
    arguments are those of paged_attention, as lists.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: PagedKVCache,
        *,
        slot_mapping: list[int],
        block_tables: list[list[int]],
        seq_lens: list[int],
        query_start_loc: list[int],
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
                cache.device,
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


def table_rows(
    block_tables: list[list[int]], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Ragged tables as one rectangle [R, most blocks]; the null block fills the ends."""
    width = max((len(table) for table in block_tables), default=0)
    rows = [[*table, *[NULL_BLOCK] * (width - len(table))] for table in block_tables]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(rows), width)
