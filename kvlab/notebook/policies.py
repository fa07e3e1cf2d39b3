"""Policies that chapters 5 and 7 compare with the engine's own, each one hook of the core.

    eviction      HeadFirst       a chain loses its head first, and so all of its hits
    full hit      TokenRule       a prompt that is cached to its last token computes that token only
    admission     FullLength      a prompt starts once there are blocks for all of it
    head of line  PassHead        lighter requests may pass one that does not fit
    prompts       PromptsFirst    while a prompt can run, nobody decodes

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


class PromptsFirst(Scheduler):
    """Runs prompts by themselves: a stream stands still while any prompt can run."""

    def pause(self, request: Request) -> Reason | None:
        decodes = request.num_uncomputed_tokens == 1
        return Reason.PROMPTS_FIRST if decodes and self._a_prompt_can_run() else None

    def _a_prompt_can_run(self) -> bool:
        half_way = [r for r in self.running if r.num_uncomputed_tokens > 1]
        if half_way:  # one without room would wait for streams that wait for it
            return any(self.manager.num_tokens_that_fit(r) > 0 for r in half_way)
        head = next(iter(self.waiting), None)
        if head is None or len(self.running) >= self.config.max_num_seqs:
            return False
        hit = self.manager.match_prefix(head)
        whole = head.num_tokens - hit.num_tokens
        needed = 1 if self.config.enable_chunked_prefill else whole
        fits = self.manager.num_tokens_that_fit(head, hit) >= needed
        return fits and self.objection(head, hit) is None


#: Each policy by the name that widgets and workloads use.
EVICTION: dict[str, type[BlockPool]] = {"lru": BlockPool, "head_first": HeadFirst}
FULL_HIT: dict[str, type[BlockManager]] = {"block": BlockManager, "token": TokenRule}
#: What of a scheduler can be chosen, and its answers; the engine's own come first.
SCHEDULING: dict[str, dict[str, type[Scheduler]]] = {
    "admission": {"first_chunk": Scheduler, "full_length": FullLength},
    "head_of_line": {"strict": Scheduler, "skip": PassHead},
    "prompts": {"mixed": Scheduler, "first": PromptsFirst},
}


def scheduler_for(**chosen: str) -> type[Scheduler]:
    """The scheduler class of some policies: scheduler_for(admission="full_length").

    Raises RequestError for an unknown one.
    """
    bases: list[type[Scheduler]] = []
    for what, name in chosen.items():
        answers = SCHEDULING.get(what, {})
        if name not in answers:
            expected = ", ".join(answers) or f"a policy out of {', '.join(SCHEDULING)}"
            raise RequestError(f"{what}={name!r}; expected {expected}")
        if answers[name] is not Scheduler:
            bases.append(answers[name])
    return type("ChosenScheduler", (*bases, Scheduler), {})
