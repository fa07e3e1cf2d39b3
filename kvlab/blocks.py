"""The pool of fixed blocks: who holds each one, which are free, which may be found again.

A block is room for `block_size` tokens of K and V in every layer. This file never sees K or V:
it hands out block ids. Three kinds of block (block 0, the null block, is none of them: it is
never handed out, and stands in tables where there is nothing to read):

    in use            ref_count > 0, in at least one block table
    free, cached      ref_count 0, still found by its prefix hash until it is handed out again
    free, empty       ref_count 0, no hash

The free list is also the eviction order. Its front is handed out first: empty blocks, then the
cached block that was released longest ago, and of one request the tail before the head, because
a tail without its head can never be hit. No call changes anything when it raises.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.errors import BlockError, OutOfBlocks, whole

NULL_BLOCK = 0


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the one place where tokens become blocks.

    >>> [blocks_for(n, 16) for n in (0, 1, 16, 17, 257)]
    [0, 1, 1, 2, 17]
    """
    return -(-num_tokens // block_size)


def slot_of(block_table: Sequence[int], block_size: int, position: int) -> int:
    """The slot of one position: one token's room in every layer's pool.

    The write side turns positions into slots, the read side walks the table. Both must meet at
    the same place, so this is the only function that does the arithmetic.

    >>> slot_of([5, 2], 8, 9)
    17

    Raises BlockError for a position that the table does not cover, or whose block is gone.
    """
    entry = position // block_size
    if not 0 <= entry < len(block_table) or block_table[entry] == NULL_BLOCK:
        raise BlockError(
            f"position {position} asked for; this table covers 0 to "
            f"{len(block_table) * block_size - 1}, less the null blocks that a window left behind: "
            f"call grow() before writing"
        )
    return block_table[entry] * block_size + position % block_size


class PrefixKey(NamedTuple):
    """What a full block is found by: the hash of all tokens up to its end, and its own tokens.

    The tokens are compared on every hit, so that a stale entry is a miss and no foreign text.
    """

    block_hash: bytes
    token_ids: tuple[int, ...]


@dataclass
class Block:
    """One block's bookkeeping. prefix is set while the block can be found by its hash."""

    block_id: int
    ref_count: int = 0
    prefix: PrefixKey | None = None


class BlockPool:
    """num_blocks blocks of block_size tokens; num_blocks counts the null block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = whole("num_blocks, the null block among them", num_blocks, 2, BlockError)
        self.block_size = whole("block_size", block_size, 1, BlockError)
        self.blocks = [Block(i) for i in range(self.num_blocks)]
        self.free_list: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks))
        self.cached: dict[bytes, int] = {}  # block hash -> block id
        self.num_evictions = 0

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that allocate() can hand out, cached ones included."""
        return len(self.free_list)

    @property
    def num_evictable_blocks(self) -> int:
        """Free blocks that are still cached. In blocks, not in tokens."""
        return sum(self.blocks[i].prefix is not None for i in self.free_list)

    # -- taking and giving back ---------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks` blocks with ref_count 1, all or none.

        Cached blocks among them are evicted first: their hash leaves the map before anybody can
        write into them. Raises OutOfBlocks.
        """
        if whole("num_blocks", num_blocks, 0, BlockError) > self.num_free_blocks:
            raise OutOfBlocks(
                f"{num_blocks} block(s) needed, {self.num_free_blocks} free: preempt or finish a "
                "request, or make the pool larger (nothing was allocated)"
            )
        taken = []
        for _ in range(num_blocks):
            block_id, _ = self.free_list.popitem(last=False)
            self.num_evictions += self.blocks[block_id].prefix is not None
            self._drop_prefix(block_id)
            self.blocks[block_id].ref_count = 1
            taken.append(block_id)
        return taken

    def ref(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; a free cached block comes back into use.

        Raises BlockError, also for a free block without a hash: it has nothing to share.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            block = self.block(block_id)
            if block.ref_count == 0 and block.prefix is None:
                raise BlockError(
                    f"block {block_id} is free and empty, so it has nothing to share: "
                    "allocate() it, or look the prefix up again (nothing was changed)"
                )
        for block_id in block_ids:
            self.free_list.pop(block_id, None)
            self.blocks[block_id].ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Release one hold on each block, given in table order (head first).

        A block whose last holder leaves joins the free list: at the back if cached, else at the
        front. Raises BlockError for a block that is not held as often as it is released.
        """
        block_ids = list(block_ids)
        for block_id, releases in Counter(block_ids).items():
            if releases > self.block(block_id).ref_count:
                raise BlockError(
                    f"block {block_id} released {releases} time(s) but held "
                    f"{self.blocks[block_id].ref_count} time(s): each holder releases its own "
                    "table once (nothing was released)"
                )
        for block_id in self.release_order(block_ids):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_list[block_id] = None
                if block.prefix is None:
                    self.free_list.move_to_end(block_id, last=False)

    def release_order(self, block_ids: list[int]) -> Iterable[int]:
        """The eviction rule: blocks of one table in the order in which they may be lost.

        The tail goes first. Another rule is a subclass with another order here.
        """
        return reversed(block_ids)

    # -- prefix hashes ------------------------------------------------------------------

    def lookup(self, key: PrefixKey) -> int | None:
        """The cached block with this hash and these tokens, or None."""
        block_id = self.cached.get(key.block_hash)
        if block_id is None or self.blocks[block_id].prefix != key:
            return None
        return block_id

    def publish(self, block_id: int, key: PrefixKey) -> bool:
        """Let a full, computed block in use be found by its hash. False: the hash is taken."""
        block = self.block(block_id)
        assert block.ref_count > 0, f"block {block_id} is free: only one in use can be published"
        assert len(key.token_ids) == self.block_size, "a partial block still changes: never shared"
        if key.block_hash in self.cached or block.prefix is not None:
            return False
        block.prefix = key
        self.cached[key.block_hash] = block_id
        return True

    def forget(self, block_id: int) -> None:
        """Drop a block's hash. A free block stays free and moves to the front of the list."""
        if self.block(block_id).prefix is not None:
            self._drop_prefix(block_id)
            if block_id in self.free_list:
                self.free_list.move_to_end(block_id, last=False)

    def _drop_prefix(self, block_id: int) -> None:
        key = self.blocks[block_id].prefix
        if key is not None and self.cached.get(key.block_hash) == block_id:
            del self.cached[key.block_hash]
        self.blocks[block_id].prefix = None

    def block(self, block_id: int) -> Block:
        """A block's bookkeeping. Raises BlockError for an id that the pool does not hand out."""
        is_id = isinstance(block_id, int) and not isinstance(block_id, bool)
        if not is_id or not 0 < block_id < self.num_blocks:
            raise BlockError(
                f"block id {block_id!r} given, expected 1 to {self.num_blocks - 1} (block 0 is the "
                "null block): look for a stale table row or a token count passed as a block id"
            )
        return self.blocks[block_id]
