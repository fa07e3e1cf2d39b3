"""A cache made of a dict, to test block bookkeeping without tensors.

A slot holds what a real slot's K and V depend on: the position, every token up to it, and the
adapter. Reading a sequence back must give exactly its own tokens' content, whatever was shared,
copied, evicted or rolled back in between.
"""

from __future__ import annotations

from kvlab.blocks import NULL_BLOCK, BlockPool
from kvlab.integrity import check_tables
from kvlab.notebook.policies import FULL_HIT
from kvlab.request import Request
from kvlab.tables import BlockManager


class DictCache:
    """Slots of K/V content under a BlockManager."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.slots: dict[int, tuple] = {}

    def content(self, seq: Request, position: int) -> tuple:
        return (position, tuple(seq.token_ids[: position + 1]), seq.tags)

    def compute(self, seq: Request, num_tokens: int, copies: list[tuple[int, int]]) -> None:
        """What one forward does: copies first, then writes by slot, then the counter."""
        bs = self.manager.block_size
        for src, dst in copies:
            for offset in range(bs):
                self.slots[dst * bs + offset] = self.slots.get(src * bs + offset, ("unwritten",))
        start = seq.num_computed_tokens
        stop = start + num_tokens
        for position, slot in zip(
            range(start, stop), self.manager.slot_mapping(seq, start, stop), strict=True
        ):
            self.slots[slot] = self.content(seq, position)
        self.manager.mark_computed(seq, num_tokens)

    def check(self, seq: Request) -> None:
        """The read side, walked by table and offset, without the slot function."""
        bs = self.manager.block_size
        window = self.manager.sliding_window
        first = 0 if window is None else max(0, seq.num_computed_tokens - window + 1)
        for position in range(first, seq.num_computed_tokens):
            block_id, offset = seq.block_table[position // bs], position % bs
            assert block_id != NULL_BLOCK, (seq, position)
            got = self.slots.get(block_id * bs + offset)
            assert got == self.content(seq, position), (seq, position, got)


def snapshot(manager: BlockManager) -> tuple:
    """Everything that a failed call must leave as it was, the order of the free list included."""
    pool = manager.pool
    return (
        [(b.block_id, b.ref_count, b.prefix) for b in pool.blocks],
        list(pool.free_list),
        dict(pool.cached),
        pool.num_evictions,
        {
            name: (
                list(s.token_ids),
                list(s.block_table),
                s.num_computed_tokens,
                s.num_published_blocks,
                s.num_preemptions,
                s.num_found_tokens,
            )
            for name, s in manager.requests.items()
        },
        vars(manager.stats).copy(),
    )


def make(
    num_usable: int, block_size: int, full_hit: str = "block", pool=BlockPool, **options
) -> tuple[BlockManager, DictCache]:
    manager = FULL_HIT[full_hit](pool(num_usable + 1, block_size), **options)
    return manager, DictCache(manager)


def run(cache: DictCache, name: str, tokens: list[int], **fields) -> Request:
    """Admit a sequence and compute all its tokens."""
    seq = Request(name, tokens, **fields)
    manager = cache.manager
    hit = manager.match_prefix(seq)
    copies = manager.start(seq, seq.num_tokens - hit.num_tokens, hit)
    cache.compute(seq, seq.num_uncomputed_tokens, copies)
    return seq


def check(cache: DictCache) -> None:
    check_tables(cache.manager)
    for seq in cache.manager.requests.values():
        cache.check(seq)
