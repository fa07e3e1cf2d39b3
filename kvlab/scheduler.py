"""The scheduler: two queues, one subtraction, and a reason for everybody who has to wait.

    add ->  waiting  --admit-->  running  --finish-->  gone
               ^                    |
               +-----preempt--------+      blocks given back, outputs kept

Each step serves the running requests first and then admits waiting ones, both in first-come
order. "First come" survives preemption: a request keeps its number. So the oldest request can
always take blocks from the youngest, it always moves, and nobody waits for ever. The design
follows vLLM's v1/core/sched/scheduler.py at a556f3f; differences are said where they are.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from kvlab.admission import first_share, refuse_what_never_fits
from kvlab.block_tables import BlockManager
from kvlab.drafts import check_outputs, computed_after, draft_list
from kvlab.policy import HeadOfLine, Order, SchedulerConfig
from kvlab.request import DuplicateRequest, Request, RequestError, Status, UnknownRequest
from kvlab.schedule import (
    Reason,
    Schedule,
    StepPlan,
    clamp_new_tokens,
    num_new_tokens,
)
from kvlab.scheduler_stats import SchedulerStats


class Scheduler:
    """Queues over one BlockManager. schedule() decides a step, update() takes its results."""

    def __init__(self, manager: BlockManager, config: SchedulerConfig) -> None:
        self.manager, self.config = manager, config
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self._num_added = 0
        self._copies: list[tuple[int, int]] = []  # asked for, and not handed out in a Schedule yet

    # -- in and out ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request in line. Raises DuplicateRequest, or NeverFits at once and not later."""
        if request.request_id in self.requests:
            raise DuplicateRequest(
                f"request {request.request_id!r} is here already; give each request its own id"
            )
        refuse_what_never_fits(self.manager, self.config, request)
        request.order, self._num_added = self._num_added, self._num_added + 1
        request.added_step = self.stats.num_steps
        request.status = Status.WAITING
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=self.place_in_line)

    def abort(self, request_id: str) -> Request:
        """Take a request out, wherever it stands, and give its blocks back."""
        request = self._known(request_id)
        self._leave(request, Status.ABORTED)
        request.finish_reason = "abort"
        return request

    def set_drafts(self, request_id: str, token_ids: Seq[int]) -> None:
        """Guesses to verify with the next token; cut so that no output can be too many."""
        request = self._known(request_id)
        drafts = draft_list(request_id, token_ids)
        request.draft_token_ids = drafts[: max(request.num_outputs_left - 1, 0)]

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # -- one step -----------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Decide one step: running requests first, then waiting ones. Blocks are taken here."""
        plan = StepPlan(self.config.max_num_batched_tokens, self._copies)
        self._schedule_running(plan)
        self._schedule_waiting(plan)
        step, self.stats.num_steps = self.stats.num_steps, self.stats.num_steps + 1
        schedule, self._copies = plan.finish(step, self.manager.block_size), []
        return schedule

    def update(self, schedule: Schedule, sampled: Mapping[str, Seq[int]]) -> dict[str, list[int]]:
        """Take the step's outputs: for each request that samples, agreed drafts and one token.

        sampled   request_id -> output ids (drafts.accept); an empty list samples nothing and
                  takes the step's last tokens back
        Returns the outputs that were kept. A request that was aborted meanwhile is passed over.
        Raises RequestError or DraftError before anything is changed.
        """
        self._check_outputs(schedule, sampled)
        kept: dict[str, list[int]] = {}
        for entry in schedule.scheduled:
            request = entry.request
            if request.status != Status.RUNNING:
                continue
            num_drafts, verified, outputs = len(entry.draft_token_ids), [], []
            computed = entry.seq_len
            if entry.samples:
                verified = list(sampled[entry.request_id])
                outputs = request.accept_outputs(verified, schedule.step)
                computed = computed_after(entry.seq_len - 1 - num_drafts, num_drafts, len(outputs))
                request.draft_token_ids = []
            self.stats.record_share(entry, len(verified))
            self.manager.mark_computed(request, computed - request.num_computed_tokens)
            request.high_water = max(request.high_water, computed)
            kept[entry.request_id] = outputs
            if request.finish_reason:
                request.finish_step = schedule.step
                self._leave(request, Status.FINISHED)
        return kept

    def _check_outputs(self, schedule: Schedule, sampled: Mapping[str, Seq[int]]) -> None:
        for entry in schedule.scheduled:
            if entry.request.status != Status.RUNNING:
                continue
            if entry.request.num_computed_tokens != entry.start:
                raise RequestError(
                    f"{entry.request_id!r} has {entry.request.num_computed_tokens} computed, "
                    f"step {schedule.step} began at {entry.start}: update with each step once"
                )
            if entry.samples:
                check_outputs(entry.request_id, sampled, len(entry.draft_token_ids))

    # -- running requests ---------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running):  # the list shrinks from its end while we walk
            request = self.running[index]
            share, reason = self._wanted(request, plan.budget)
            if share:
                share, reason = self._make_room(request, share, reason, plan)
            if request.status != Status.RUNNING:
                return  # it was the youngest and had to give way itself
            if share:
                plan.copies += self.manager.grow(request, share)
                plan.serve(request, share, reason)
            else:
                plan.reasons[request.request_id] = reason or Reason.NOTHING_NEW
            index += 1

    def _wanted(self, request: Request, budget: int) -> tuple[int, Reason | None]:
        """The subtraction and its clamps. Drafts are the first to go when the budget is short."""
        known = num_new_tokens(
            request.num_tokens, request.num_placeholders, request.num_computed_tokens
        )
        num_drafts = min(len(request.draft_token_ids), max(budget - known, 0)) if known > 0 else 0
        return clamp_new_tokens(
            known + num_drafts,
            self.config.long_prefill_token_threshold,
            budget,
            self.config.enable_chunked_prefill,
        )

    def _make_room(
        self, request: Request, share: int, reason: Reason | None, plan: StepPlan
    ) -> tuple[int, Reason | None]:
        """Cut the share to what free blocks hold; if they hold nothing, preempt the youngest."""
        while True:
            fitting = self.manager.num_tokens_that_fit(request)
            if fitting >= share:
                return share, reason
            if fitting > 0:
                return fitting, Reason.NO_BLOCKS
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return 0, Reason.PREEMPTED

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Recompute later: blocks go back, outputs and place in line stay."""
        self.running.remove(victim)
        self.stats.record_preemption(victim)
        self.manager.preempt(victim)
        victim.draft_token_ids = []
        victim.status = Status.PREEMPTED
        insort(self.waiting, victim, key=self.place_in_line)
        plan.preempted.append(victim.request_id)
        plan.reasons[victim.request_id] = Reason.PREEMPTED

    # -- waiting requests ---------------------------------------------------------------

    def _schedule_waiting(self, plan: StepPlan) -> None:
        stop = Reason.AFTER_PREEMPTION if plan.preempted else None
        head: Request | None = None  # the first one that could not be admitted
        for request in list(self.waiting):
            reason = stop or self._admit(request, plan)
            if reason is None:
                if head is not None:
                    head.num_skips += 1
            else:
                plan.reasons.setdefault(request.request_id, reason)
                head = head or request
            if reason in (Reason.MAX_SEQS, Reason.TOKEN_BUDGET):
                stop = reason  # true for everybody behind as well
            elif head is not None and stop is None and self._is_strict_behind(head):
                stop = Reason.BEHIND_HEAD
        if head is not None:
            head.head_delay += 1

    def _is_strict_behind(self, head: Request) -> bool:
        """May nobody pass this request? Under "skip" it may be passed a bounded number of times."""
        return (
            self.config.head_of_line is HeadOfLine.STRICT
            or head.num_skips >= self.config.max_head_skips
        )

    def _admit(self, request: Request, plan: StepPlan) -> Reason | None:
        """Start a waiting request with its prefix hit and a first share, or say why not."""
        if len(self.running) >= self.config.max_num_seqs:
            return Reason.MAX_SEQS
        hit = self.manager.match_prefix(request)
        share, reason = first_share(
            self.manager, self.config, request, hit, plan.budget, self.running
        )
        if not share:
            return reason
        plan.copies += self.manager.start(request, share, hit)
        self.stats.record_hit(request, hit.num_tokens)
        self.waiting.remove(request)
        request.status = Status.RUNNING
        insort(self.running, request, key=self.place_in_line)
        plan.serve(request, share, reason, num_cached=hit.num_tokens)
        return None

    # -- shared -------------------------------------------------------------------------

    def place_in_line(self, request: Request) -> tuple[float, float, int]:
        """Place in line: smaller is served earlier and preempted later."""
        urgency = request.priority if self.config.order is Order.PRIORITY else 0
        return urgency, request.arrival, request.order

    def _leave(self, request: Request, status: Status) -> None:
        """Out of both queues; blocks go back to the pool, full ones stay cached."""
        queue = self.running if request.status == Status.RUNNING else self.waiting
        queue.remove(request)
        self.manager.release(request)
        request.status = status
        request.draft_token_ids = []
        del self.requests[request.request_id]

    def _known(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise UnknownRequest(
                f"request {request_id!r} is not here: it never was, or it has finished; active "
                f"are {sorted(self.requests)[:8]}"
            )
        return self.requests[request_id]
