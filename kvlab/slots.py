"""Slots: the last step of the address. A slot is one token's room in every layer's pool.

    slot = block_table[position // block_size] * block_size + position % block_size

The write side turns positions into slots (slot_mapping); the read side walks the block table.
Both must meet at the same place, so this function is the only one that does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.blocks import NULL_BLOCK, BlockError, BlockOutOfRange


class SlotOutOfRange(BlockError):
    """A position that the sequence's block table does not cover."""


class TableEntryOutOfRange(BlockOutOfRange):
    """A block table that is read names a block which the pool does not have."""

    def __init__(self, row: int, entry: int, block_id: int, num_blocks: int) -> None:
        super().__init__(block_id, num_blocks)
        self.args = (
            f"block_tables[{row}][{entry}] is {block_id}, the pool has blocks 0 to "
            f"{num_blocks - 1}: a stale row, or a table of another pool",
        )


def slot_of(block_table: Sequence[int], block_size: int, position: int) -> int:
    """The slot of one position. Writer and reader both use this and nothing else.

    >>> slot_of([5, 2], 8, 9)
    17
    """
    if not 0 <= position < len(block_table) * block_size:
        raise SlotOutOfRange(
            f"position {position} asked for, the table covers 0 to "
            f"{len(block_table) * block_size - 1}: call grow() before writing"
        )
    block_id = block_table[position // block_size]
    if block_id == NULL_BLOCK:
        raise SlotOutOfRange(
            f"position {position} lies in a block that left the sliding window: it can be "
            "neither read nor written any more"
        )
    return block_id * block_size + position % block_size
