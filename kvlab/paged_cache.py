"""The paged KV cache: one pool of K and one of V per layer, cut into blocks.

    layer 0   K [num_blocks, block_size, h_kv, d_h]   V [num_blocks, block_size, h_kv, d_h]
    layer 1   ...                                     a block id means the same in every layer

The cache knows slots and blocks. Whose they are is the business of BlockManager
(block_tables.py). K and V of a token go to one slot: slot = block id * block_size + offset.

Two layouts hold the same bytes in another order. NHD keeps a token's heads together, HND keeps a
head's tokens together. key_cache() and value_cache() show both as [block, offset, head, d_h], so
that only strides differ and no reader can mix them up.
"""

from __future__ import annotations

import torch

from kvlab.blocks import BlockOutOfRange
from kvlab.cache import CacheError
from kvlab.slots import SlotOutOfRange
from kvlab.specs import ModelSpec

__all__ = ["LAYOUTS", "PagedKVCache"]

LAYOUTS = ("NHD", "HND")


class PagedKVCache:
    """Pools of K and V for every layer of one model.

    num_blocks   blocks of each pool, the null block included
    layout       order in memory: "NHD" (token-major) or "HND" (head-major)
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
        if num_blocks < 1 or block_size < 1:
            raise CacheError(
                f"num_blocks {num_blocks} and block_size {block_size} must both be at least 1"
            )
        if layout not in LAYOUTS:
            raise CacheError(f"layout {layout!r}: choose one of {LAYOUTS}")
        self.spec = spec
        self.num_blocks, self.block_size, self.layout = num_blocks, block_size, layout
        self._pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, layer in enumerate(spec.layers):
            if layer.kind not in ("full", "sliding", "chunked"):
                raise CacheError(
                    f"layer {index} is of kind {layer.kind!r} and keeps no plain K and V; this "
                    "cache serves full, sliding and chunked attention layers"
                )
            self._pools.append(
                (
                    self._pool(layer.num_kv_heads, layer.key_dim, dtype, device),
                    self._pool(layer.num_kv_heads, layer.value_dim, dtype, device),
                )
            )

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
        be the last slot of the pool.) Raises SlotOutOfRange for a slot past the pool, and
        CacheError for what is no row of whole numbers: 3.7 would quietly become slot 3.
        """
        slots = torch.as_tensor(slot_mapping)
        whole = slots.dtype in (torch.int32, torch.int64) or slots.numel() == 0
        if slots.dim() != 1 or not whole:
            raise CacheError(
                f"slot_mapping of shape {list(slots.shape)} in {slots.dtype}; expected one whole "
                "number for each row of K and V (nothing was written)"
            )
        slots = slots.long()
        if slots.numel() and int(slots.max()) >= self.num_slots:
            raise SlotOutOfRange(
                f"slot {int(slots.max())} given, the pool has slots 0 to {self.num_slots - 1} "
                f"({self.num_blocks} blocks of {self.block_size}): nothing was written"
            )
        rows = None
        if bool((slots < 0).any()):
            rows = (slots >= 0).nonzero().flatten()
            slots = slots[rows]
        return CheckedSlots(len(slot_mapping), slots, rows, self.block_size)

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

        Raises SlotOutOfRange, CacheError; nothing is written then.
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
        num_blocks = -(-seq_len // self.block_size)
        if seq_len < 0 or len(block_table) < num_blocks:
            raise SlotOutOfRange(
                f"{seq_len} tokens need {num_blocks} blocks, the table has {len(block_table)}"
            )
        for block_id in block_table[:num_blocks]:
            self._check_block(block_id)
        table = torch.tensor(block_table[:num_blocks], dtype=torch.long)
        key, value = (pool[table].flatten(0, 1)[:seq_len] for pool in self._pools[layer])
        return key, value

    def copy_block(self, src: int, dst: int) -> None:
        """Copy K and V of a whole block in every layer: what copy on write asks for."""
        self._check_block(src)
        self._check_block(dst)
        for key, value in self._pools:
            key[dst] = key[src]
            value[dst] = value[src]

    def copy_blocks(self, owed: list[tuple[int, int]]) -> None:
        """Do the (src, dst) copies that BlockManager.grow() returned, in order; empty the list.

        A copy leaves the list once it is done and no earlier: if one fails, the rest stays owed,
        and none is done a second time, when its source may be somebody else's already.
        """
        while owed:
            self.copy_block(*owed[0])
            del owed[0]

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise BlockOutOfRange(block_id, self.num_blocks)


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
        if rows.requires_grad:
            rows = rows.detach()  # the pool keeps values, not the graph of every forward
        if pool.is_contiguous():
            pool.flatten(0, 1).index_copy_(0, self.slots, rows.to(pool.dtype))
        else:
            pool[self.blocks, self.offsets] = rows.to(pool.dtype)
