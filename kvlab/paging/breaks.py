"""Ways to break a pool by hand, so that check_integrity() can be heard.

Each is a bug that some engine has had, done directly to the data: no function of kvlab would.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlab.errors import KvlabError
from kvlab.tables import BlockManager

Break = Callable[[BlockManager, int], str]


class NothingToBreak(KvlabError):
    """The pool has nothing of the kind that was to be broken."""


def _held(manager: BlockManager) -> list[int]:
    return [b.block_id for b in manager.pool.blocks[1:] if b.ref_count > 0]


def _pick(choices: list, number: int, what: str):
    if not choices:
        raise NothingToBreak(f"there is {what} to break; do something else first")
    return choices[number % len(choices)]


def _lose(manager: BlockManager, number: int) -> str:
    block_id = _pick(list(manager.pool.free_list), number, "no free block")
    del manager.pool.free_list[block_id]
    return f"Block {block_id} is taken off the free list and given to nobody."


def _free_in_use(manager: BlockManager, number: int) -> str:
    block_id = _pick(_held(manager), number, "no block in use")
    manager.pool.free_list[block_id] = None
    manager.pool.free_list.move_to_end(block_id, last=False)
    return f"Block {block_id} goes to the front of the free list while it is still in a table."


def _miscount(manager: BlockManager, number: int) -> str:
    block_id = _pick(_held(manager), number, "no block in use")
    manager.pool.blocks[block_id].ref_count += 1
    return f"Block {block_id} counts one holder too many: it can never be freed."


def _wrong_entry(manager: BlockManager, number: int) -> str:
    holders = [seq for seq in manager.sequences.values() if seq.block_table]
    seq = _pick(holders, number, "no block table")
    seq.block_table[-1] = manager.pool.num_blocks
    return f"The last table entry of {seq.request_id} names a block past the pool."


def _stale_hash(manager: BlockManager, number: int) -> str:
    block_hash = _pick(list(manager.pool.cached), number, "no published block")
    block_id = manager.pool.cached[block_hash]
    manager.pool.blocks[block_id].prefix = None
    return f"Block {block_id} loses its hash, but the map still leads to it."


def _swap_entries(manager: BlockManager, number: int) -> str:
    holders = [seq for seq in manager.sequences.values() if len(seq.block_table) > 1]
    seq = _pick(holders, number, "no table of two blocks")
    table = seq.block_table
    table[0], table[1] = table[1], table[0]
    return f"The first two table entries of {seq.request_id} change places."


#: name -> (what a menu says, what is done)
BREAKS: dict[str, tuple[str, Break]] = {
    "free_in_use": ("free a block that is in use", _free_in_use),
    "miscount": ("count one holder too many", _miscount),
    "lose": ("lose a free block", _lose),
    "wrong_entry": ("a table entry past the pool", _wrong_entry),
    "swap_entries": ("swap two table entries", _swap_entries),
    "stale_hash": ("leave a stale hash in the map", _stale_hash),
}


def break_pool(manager: BlockManager, what: str, number: int = 1) -> str:
    """Do one of BREAKS to the number-th candidate; returns what was done, in words."""
    if what not in BREAKS:
        raise NothingToBreak(f"{what!r} is no way to break a pool; there are {', '.join(BREAKS)}")
    return BREAKS[what][1](manager, number)
