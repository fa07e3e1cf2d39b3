"""What one engine step decided: who runs how many tokens, and why the others do not.

The arithmetic of the decision is here too, in two functions with no state: the subtraction
(num_new_tokens) and its clamps (clamp_new_tokens). Both follow vLLM's v1/core/sched/scheduler.py
(L566-L575 at a556f3f). The queues that call them are in scheduler.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvlab.request import Request


class Reason(StrEnum):
    """Why a request got no tokens, or fewer than it has left, in this step."""

    NOTHING_NEW = "nothing_new"
    TOKEN_BUDGET = "token_budget"
    THRESHOLD = "long_prefill_threshold"
    NO_BLOCKS = "no_free_blocks"
    PROMISED_BLOCKS = "blocks_promised"
    CHUNKING_OFF = "chunking_off"
    MAX_SEQS = "max_num_seqs"
    BEHIND_HEAD = "behind_head"
    PREEMPTED = "preempted"
    AFTER_PREEMPTION = "after_preemption"


#: One sentence for each reason: what the widget and the chapter print.
REASON_TEXT = {
    Reason.NOTHING_NEW: "every known token is computed already",
    Reason.TOKEN_BUDGET: "the step's token budget is spent",
    Reason.THRESHOLD: "cut to the long-prefill threshold",
    Reason.NO_BLOCKS: "no free blocks",
    Reason.PROMISED_BLOCKS: "the free blocks are promised to prompts that are half way in",
    Reason.CHUNKING_OFF: "the whole prompt does not fit the budget and chunking is off",
    Reason.MAX_SEQS: "max_num_seqs requests are running",
    Reason.BEHIND_HEAD: "strict order: an earlier request is waiting",
    Reason.PREEMPTED: "gave its blocks to an earlier request; will be computed again",
    Reason.AFTER_PREEMPTION: "nothing is admitted in a step that had to preempt",
}


def num_new_tokens(num_tokens_with_drafts: int, num_placeholders: int, num_computed: int) -> int:
    """The one subtraction of the engine: tokens known minus tokens computed.

    Prefill and decode are the same expression: a new prompt of 5 gives 5 - 0, a decoding request
    gives 1 (its last sampled token has no K and V yet), with three drafts 4. Zero or less means
    that there is nothing to run; it is the caller's duty to skip such a request.

    num_tokens_with_drafts   prompt + outputs + drafts
    num_placeholders         outputs promised by a step in flight (0 in a synchronous engine)
    """
    return num_tokens_with_drafts + num_placeholders - num_computed


def clamp_new_tokens(
    num_new: int, threshold: int, budget: int, chunked: bool = True
) -> tuple[int, Reason | None]:
    """(tokens that may run in this step, why not all of them).

    The threshold cuts long prefills, and only where chunking is on; then the budget cuts. With
    chunking off a request runs whole or not at all.
    """
    if num_new <= 0:
        return 0, Reason.NOTHING_NEW
    if budget <= 0:
        return 0, Reason.TOKEN_BUDGET
    if not chunked:
        return (num_new, None) if num_new <= budget else (0, Reason.CHUNKING_OFF)
    reason = None
    if 0 < threshold < num_new:
        num_new, reason = threshold, Reason.THRESHOLD
    if budget < num_new:
        num_new, reason = budget, Reason.TOKEN_BUDGET
    return num_new, reason


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step. Everything the batch needs is copied here.

    start            tokens computed before this step, prefix hits included; the first position
    num_tokens       tokens of this request in the step (its query length)
    token_ids        those tokens, drafts last                       [num_tokens]
    draft_token_ids  how many and which of them are guesses
    block_ids        the block table at this moment
    samples          True where the step reaches the last known token, so logits are wanted
    num_cached       tokens that a prefix hit spared in this very step
    num_recomputed   tokens of this step that had been computed before a preemption
    limited_by       what kept the share from being everything that is left, or None
    """

    request: Request
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: bool
    num_cached: int = 0
    num_recomputed: int = 0
    limited_by: Reason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def seq_len(self) -> int:
        """Context length after this step's write: tokens computed, drafts included."""
        return self.start + self.num_tokens

    @property
    def num_logits_rows(self) -> int:
        """Rows of logits wanted: none while a prompt is still half way, else 1 + drafts."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass(frozen=True)
class Schedule:
    """One step's decisions. `scheduled` keeps first-come order.

    reasons      request_id -> why it got nothing (running and waiting requests alike)
    preempted    requests that lost their blocks in this step
    block_copies (src, dst) blocks to copy before the step writes (copy on write)
    block_size   of the pool, for the slot mapping
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    reasons: dict[str, Reason] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    block_size: int = 16
    budget: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def is_idle(self) -> bool:
        """True where nothing runs: no forward is needed."""
        return not self.scheduled

    def share_of(self, request_id: str) -> int:
        """Tokens that this request got, 0 where it got none."""
        return sum(e.num_tokens for e in self.scheduled if e.request_id == request_id)


class StepPlan:
    """A step while it is being decided: what is given out so far, and the budget left.

    copies   the list that block copies are added to; it outlives a plan that is never finished
    """

    def __init__(self, budget: int, copies: list[tuple[int, int]] | None = None) -> None:
        self.budget = self._full_budget = budget
        self.scheduled: list[ScheduledRequest] = []
        self.copies: list[tuple[int, int]] = [] if copies is None else copies
        self.reasons: dict[str, Reason] = {}
        self.preempted: list[str] = []

    def serve(
        self, request: Request, share: int, reason: Reason | None, num_cached: int = 0
    ) -> None:
        """Book a share whose blocks are taken: copy all that the batch needs, spend the budget."""
        start = request.num_computed_tokens
        num_drafts = max(start + share - request.num_tokens, 0)
        drafts = tuple(request.draft_token_ids[:num_drafts])
        self.budget -= share
        self.scheduled.append(
            ScheduledRequest(
                request=request,
                start=start,
                num_tokens=share,
                token_ids=(*request.token_ids[start : start + share], *drafts),
                draft_token_ids=drafts,
                block_ids=tuple(request.block_table),
                samples=start + share >= request.num_tokens,
                num_cached=num_cached,
                num_recomputed=max(min(start + share, request.high_water) - start, 0),
                limited_by=reason,
            )
        )

    def finish(self, step: int, block_size: int) -> Schedule:
        """The step as decided; nothing changes it any more."""
        return Schedule(
            step=step,
            scheduled=tuple(self.scheduled),
            reasons=self.reasons,
            preempted=tuple(self.preempted),
            block_copies=tuple(self.copies),
            block_size=block_size,
            budget=self._full_budget,
        )
