"""The pool of fixed blocks: who holds each one, which are free, which may be found again.

A block is room for `block_size` tokens of K and V in every layer. This file never sees K or V:
it hands out block ids. Three kinds of block (block 0, the null block, is none of them: it is
never handed out, and stands in tables where there is nothing to read):

    in use            ref_count > 0, in at least one block table
    free, cached      ref_count 0, still found by its prefix hash until it is handed out again
    free, empty       ref_count 0, no hash

The free list is also the eviction order. Its front is handed out first: empty blocks, then the
cached block that was released longest ago, and of one sequence the tail before the head, because
a tail without its head can never be hit. No call changes anything when it raises.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.errors import KvlabError
from kvlab.prefix import PrefixKey

NULL_BLOCK = 0
EVICTION_POLICIES = ("lru", "head_first")


class BlockError(KvlabError):
    """Any misuse of the pool."""


class OutOfBlocks(BlockError):
    """More blocks were asked for than are free. Nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        self.needed, self.free = needed, free
        super().__init__(
            f"{needed} block(s) needed, {free} free: preempt or finish a request, or make the "
            "pool larger (nothing was allocated)"
        )


class DoubleFree(BlockError):
    """A block was released more often than it is held. Nothing was released."""

    def __init__(self, block_id: int, releases: int, ref_count: int) -> None:
        self.block_id = block_id
        super().__init__(
            f"block {block_id} released {releases} time(s) but held {ref_count} time(s): each "
            "holder releases its own table once (nothing was released)"
        )


class BlockOutOfRange(BlockError):
    """A block id that the pool does not hand out."""

    def __init__(self, block_id: int, num_blocks: int) -> None:
        self.block_id = block_id
        super().__init__(
            f"block id {block_id!r} given, expected 1 to {num_blocks - 1} (block 0 is the null "
            "block): look for a stale table row or a token count passed as a block id"
        )


class BlockNotHeld(BlockError):
    """A free, empty block was treated as if it held K and V."""


class PoolCorrupt(BlockError):
    """check_integrity() found a broken invariant; the message lists every finding."""

    def __init__(self, findings: list[str]) -> None:
        self.findings = findings
        super().__init__("the pool is corrupt: " + "; ".join(findings))


@dataclass
class Block:
    """One block's bookkeeping. prefix is set while the block can be found by its hash."""

    block_id: int
    ref_count: int = 0
    prefix: PrefixKey | None = None


def is_whole(value: object, least: int) -> bool:
    """A whole number, `least` or more? True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the one place where tokens become blocks.

    >>> [blocks_for(n, 16) for n in (0, 1, 16, 17, 257)]
    [0, 1, 1, 2, 17]
    """
    return -(-num_tokens // block_size)


class BlockPool:
    """num_blocks blocks of block_size tokens; num_blocks counts the null block.

    eviction: "lru" (the default), or "head_first", which releases a table in order and so evicts
    a chain's head before its tail. It is here to be compared: it turns hits into misses.
    """

    def __init__(self, num_blocks: int, block_size: int, *, eviction: str = "lru") -> None:
        if not (is_whole(num_blocks, 2) and is_whole(block_size, 1)):
            raise BlockError(
                f"num_blocks={num_blocks!r}, block_size={block_size!r}: a pool needs at least 2 "
                "blocks (one is the null block) of at least 1 token"
            )
        if eviction not in EVICTION_POLICIES:
            raise BlockError(f"eviction={eviction!r}: choose one of {EVICTION_POLICIES}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.eviction = eviction
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_list: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.cached: dict[bytes, int] = {}  # block hash -> block id
        self.num_evictions = 0

    # -- counts -------------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that allocate() can hand out, cached ones included."""
        return len(self.free_list)

    @property
    def num_evictable_blocks(self) -> int:
        """Free blocks that are still cached. In blocks; num_evictable_tokens is in tokens."""
        return sum(self.blocks[i].prefix is not None for i in self.free_list)

    @property
    def num_evictable_tokens(self) -> int:
        return self.num_evictable_blocks * self.block_size

    # -- taking and giving back ---------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks` blocks with ref_count 1, all or none.

        Cached blocks among them are evicted first: their hash leaves the map before anybody can
        write into them. Raises OutOfBlocks.
        """
        if not is_whole(num_blocks, 0):
            raise BlockError(f"{num_blocks!r} blocks asked for: expected a whole number, 0 or more")
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(num_blocks, self.num_free_blocks)
        taken = []
        for _ in range(num_blocks):
            block_id, _ = self.free_list.popitem(last=False)
            if self.blocks[block_id].prefix is not None:
                self._drop_prefix(block_id)
                self.num_evictions += 1
            self.blocks[block_id].ref_count = 1
            taken.append(block_id)
        return taken

    def ref(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; a free cached block comes back into use.

        Raises BlockOutOfRange, or BlockNotHeld for a free block without a hash.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            block = self._block(block_id)
            if block.ref_count == 0 and block.prefix is None:
                raise BlockNotHeld(
                    f"block {block_id} is free and empty, so it has nothing to share: "
                    "allocate() it, or look the prefix up again (nothing was changed)"
                )
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_list[block_id]
            block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Release one hold on each block, given in table order (head first).

        A block whose last holder leaves joins the free list: at the back if cached, else at the
        front. Raises DoubleFree or BlockOutOfRange.
        """
        block_ids = list(block_ids)
        for block_id, releases in Counter(block_ids).items():
            if releases > self._block(block_id).ref_count:
                raise DoubleFree(block_id, releases, self.blocks[block_id].ref_count)
        for block_id in reversed(block_ids) if self.eviction == "lru" else block_ids:
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_list[block_id] = None
                if block.prefix is None:
                    self.free_list.move_to_end(block_id, last=False)

    def check_id(self, block_id: int) -> None:
        """Raise BlockOutOfRange unless the pool hands out this id."""
        if not (is_whole(block_id, 1) and block_id < self.num_blocks):
            raise BlockOutOfRange(block_id, self.num_blocks)

    # -- prefix hashes ------------------------------------------------------------------

    def lookup(self, key: PrefixKey) -> int | None:
        """The cached block with this identity, or None. Tokens and extra keys are compared."""
        block_id = self.cached.get(key.block_hash)
        if block_id is None or self.blocks[block_id].prefix != key:
            return None
        return block_id

    def publish(self, block_id: int, key: PrefixKey) -> bool:
        """Let a full, computed block in use be found by its hash. False: the hash is taken."""
        block = self._block(block_id)
        if block.ref_count == 0:
            raise BlockNotHeld(f"block {block_id} is free: only a block in use can be published")
        if len(key.token_ids) != self.block_size:
            raise BlockError(
                f"block {block_id}: {len(key.token_ids)} tokens given, expected a full block of "
                f"{self.block_size}; a partial block still changes, so it is never shared"
            )
        if key.block_hash in self.cached or block.prefix is not None:
            return False
        block.prefix = key
        self.cached[key.block_hash] = block_id
        return True

    def forget(self, block_id: int) -> None:
        """Drop a block's hash. A free block stays free and moves to the front of the list."""
        if self._block(block_id).prefix is not None:
            self._drop_prefix(block_id)
            if block_id in self.free_list:
                self.free_list.move_to_end(block_id, last=False)

    def _drop_prefix(self, block_id: int) -> None:
        key = self.blocks[block_id].prefix
        if key is not None and self.cached.get(key.block_hash) == block_id:
            del self.cached[key.block_hash]
        self.blocks[block_id].prefix = None

    def _block(self, block_id: int) -> Block:
        self.check_id(block_id)
        return self.blocks[block_id]
