"""Policies that chapters 5 and 7 compare with the engine's own, each one hook of the core.

    eviction      HeadFirst    a chain loses its head first, and so all of its hits
    full hit      TokenRule    a prompt that is cached to its last token computes that token only
    admission     FullLength   a prompt starts once there are blocks for all of it
    head of line  PassHead     lighter requests may pass one that does not fit

    Engine(model, tables=TokenRule, scheduler=FullLength)
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.blocks import BlockPool, blocks_for
from kvlab.errors import RequestError
from kvlab.request import Request
from kvlab.scheduler import Reason, Scheduler
from kvlab.tables import BlockManager, PrefixHit


class HeadFirst(BlockPool):
    """Releases a table in order, so that a chain's head is evicted before its tail."""

    def release_order(self, block_ids: list[int]) -> Iterable[int]:
        return block_ids


class TokenRule(BlockManager):
    """Keeps the last block of a prompt that is cached whole; others' hold on it is copied."""

    def reusable_tokens(self, request: Request) -> int:
        return request.num_tokens


class FullLength(Scheduler):
    """Admits a prompt once there are blocks for all its tokens, those promised to others aside."""

    def objection(self, request: Request, hit: PrefixHit) -> Reason | None:
        manager = self.manager
        needed = manager.num_blocks_needed(request, request.num_tokens - hit.num_tokens, hit)
        free = manager.pool.num_free_blocks
        promised = sum(
            max(blocks_for(r.num_tokens, manager.block_size) - len(r.block_table), 0)
            for r in self.running
        )
        if needed > free:
            return Reason.NO_BLOCKS
        return Reason.PROMISED_BLOCKS if needed > free - promised else None


class PassHead(Scheduler):
    """Lets those behind the first waiting request start before it, a bounded number of times."""

    max_head_skips = 64

    def may_pass(self, head: Request) -> bool:
        return head.num_skips < self.max_head_skips


class PassHeadFullLength(PassHead, FullLength):
    """Both at once."""


#: Each policy by the name that widgets and workloads use.
EVICTION: dict[str, type[BlockPool]] = {"lru": BlockPool, "head_first": HeadFirst}
FULL_HIT: dict[str, type[BlockManager]] = {"block": BlockManager, "token": TokenRule}
#: (admission, head_of_line) -> the scheduler.
SCHEDULERS: dict[tuple[str, str], type[Scheduler]] = {
    ("first_chunk", "strict"): Scheduler,
    ("first_chunk", "skip"): PassHead,
    ("full_length", "strict"): FullLength,
    ("full_length", "skip"): PassHeadFullLength,
}


def scheduler_for(admission: str = "first_chunk", head_of_line: str = "strict") -> type[Scheduler]:
    """The scheduler class of two policies. Raises RequestError for an unknown one."""
    if (admission, head_of_line) not in SCHEDULERS:
        raise RequestError(
            f"admission={admission!r}, head_of_line={head_of_line!r}; expected first_chunk or "
            f"full_length, and strict or skip"
        )
    return SCHEDULERS[admission, head_of_line]
