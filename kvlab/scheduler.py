"""The scheduler: one subtraction, two queues, and a reason for everybody who has to wait.

    add ->  waiting  --admit-->  running  --finish-->  gone
               ^                    |
               +-----preempt--------+      blocks given back, outputs kept

Each step serves the running requests first and then admits waiting ones, both in first-come
order (of unequal priorities, the smaller number first). "First come" survives preemption: a
request keeps its place. So the oldest request can always take blocks from the youngest, it always
moves, and nobody waits for ever. Priority orders the line; nobody is put out for it.

The two queues are views: where a request stands is its status and nothing else. The design
follows vLLM's v1/core/sched/scheduler.py at a556f3f; differences are said where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvlab.errors import RequestError, whole
from kvlab.request import Request, Status, token_row
from kvlab.tables import BlockManager, PrefixHit

# --- the subtraction --------------------------------------------------------------------------


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
    PROMPTS_FIRST = "prompts_first"


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
    chunking off a request runs whole or not at all. (vLLM: L566-L575)
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


def computed_after(num_computed: int, num_drafts: int, num_outputs: int) -> int:
    """num_computed_tokens after a step that ran one known token and its drafts.

    The step counts all 1 + num_drafts rows as computed, then takes back those that led to no
    output. An empty output takes all of them back.

    >>> [computed_after(10, 3, n) for n in (2, 1, 0)]
    [12, 11, 10]
    """
    num_rows = 1 + num_drafts
    assert 0 <= num_outputs <= num_rows, f"{num_outputs} outputs from {num_rows} rows"
    num_rejected = num_rows - num_outputs
    return num_computed + num_rows - num_rejected


# --- one step's decisions ---------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step. Everything the batch needs is copied here.

    start            tokens computed before this step, prefix hits included; the first position
    num_tokens       tokens of this request in the step (its query length)
    token_ids        those tokens, drafts last                       [num_tokens]
    draft_token_ids  how many and which of them are guesses
    block_ids        the block table at this moment
    num_known        tokens known at this moment, drafts not counted
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
    num_known: int
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
    def samples(self) -> bool:
        """True where the step reaches the last known token, so logits are wanted."""
        return self.seq_len >= self.num_known

    @property
    def num_logits_rows(self) -> int:
        """Rows of logits wanted: none while a prompt is still half way, else 1 + drafts."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass
class Schedule:
    """One step's decisions, filled in by Scheduler.schedule(). `scheduled` keeps its order.

    budget           tokens that the step may run
    reasons          request_id -> why it got nothing (running and waiting requests alike)
    preempted        requests that lost their blocks in this step
    block_copies     (src, dst) blocks to copy before the step writes (copy on write)
    num_free_blocks  of the pool, once everything is decided
    """

    step: int
    budget: int
    block_size: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    reasons: dict[str, Reason] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_free_blocks: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def budget_left(self) -> int:
        return self.budget - self.num_scheduled_tokens

    @property
    def is_idle(self) -> bool:
        """True where nothing runs: no forward is needed."""
        return not self.scheduled

    def serve(
        self, request: Request, share: int, reason: Reason | None, num_cached: int = 0
    ) -> None:
        """Book a share whose blocks are taken: copy all that the batch needs."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + share
        drafts = tuple(request.draft_token_ids[: max(stop - request.num_tokens, 0)])
        self.scheduled.append(
            ScheduledRequest(
                request=request,
                start=start,
                num_tokens=share,
                token_ids=(*request.token_ids[start:stop], *drafts),
                draft_token_ids=drafts,
                block_ids=tuple(request.block_table),
                num_known=request.num_tokens,
                num_cached=num_cached,
                num_recomputed=max(min(stop, request.high_water) - start, 0),
                limited_by=reason,
            )
        )


# --- settings and counters --------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler; bad ones raise RequestError.

    max_num_batched_tokens        token budget of a step, over all requests
    max_num_seqs                  requests running at once
    long_prefill_token_threshold  most tokens of one prompt in one step; 0 is off
    enable_chunked_prefill        False: a prompt runs whole or not at all
    max_model_len                 positions the model has; None: no limit
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        whole("max_num_seqs", self.max_num_seqs, 1)
        whole("long_prefill_token_threshold", self.long_prefill_token_threshold)
        if self.max_model_len is not None:
            whole("max_model_len", self.max_model_len, 1)
        chunked = self.enable_chunked_prefill
        if not isinstance(chunked, bool) or (self.long_prefill_token_threshold and not chunked):
            raise RequestError(
                f"enable_chunked_prefill={chunked!r}, long_prefill_token_threshold="
                f"{self.long_prefill_token_threshold}; expected True or False, and with False a "
                f"threshold of 0: it cuts prompts into chunks"
            )


@dataclass
class SchedulerStats:
    """Counters, in tokens unless they say otherwise. Each request keeps its own share of them.

    num_dropped_tokens     computed, then lost to a preemption
    num_resumed_tokens     of those, found again in the prefix cache when the request came back
    num_recomputed_tokens  computed again; what preemption really cost
    num_cached_tokens      prefix hits on what another request had computed. A request that reads
                           its own blocks again after a preemption is no hit.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_dropped_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def record_hit(self, request: Request, num_tokens: int) -> None:
        """A request was admitted with this many tokens found in the prefix cache."""
        name = "num_resumed_tokens" if request.num_preemptions else "num_cached_tokens"
        self._add(request, **{name: num_tokens})

    def record_preemption(self, request: Request) -> None:
        """A request is about to lose its blocks."""
        self.num_preemptions += 1
        self._add(request, num_dropped_tokens=request.num_computed_tokens)

    def record_share(self, entry: ScheduledRequest, num_outputs: int) -> None:
        """A share was computed and led to this many outputs, those past a stop token included."""
        num_drafts = len(entry.draft_token_ids)
        self.num_scheduled_tokens += entry.num_tokens
        self._add(
            entry.request,
            num_recomputed_tokens=entry.num_recomputed,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=min(max(num_outputs - 1, 0), num_drafts),
        )

    def _add(self, request: Request, **counts: int) -> None:
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
            setattr(request, name, getattr(request, name) + count)


# --- the scheduler ----------------------------------------------------------------------------


class Scheduler:
    """Queues over one BlockManager. schedule() decides a step, update() takes its results.

    A policy of another kind is a subclass that answers place_in_line(), objection(), may_pass() or
    pause() in its own way.
    """

    def __init__(self, manager: BlockManager, config: SchedulerConfig) -> None:
        self.manager, self.config = manager, config
        self.requests: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self._num_added = 0

    # -- policy -------------------------------------------------------------------------

    def place_in_line(self, request: Request) -> tuple[float, float, int]:
        """Smaller is served earlier and preempted later."""
        return request.priority, request.arrival, request.order

    def objection(self, request: Request, hit: PrefixHit) -> Reason | None:
        """A reason not to admit a waiting request yet, though its first chunk would fit."""
        return None

    def may_pass(self, head: Request) -> bool:
        """May those behind the first waiting request start before it?"""
        return False

    def pause(self, request: Request) -> Reason | None:
        """A reason not to serve a running request in this step, though it could run."""
        return None

    # -- in and out ---------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Requests that hold blocks, in their order."""
        return self._in_line(Status.RUNNING)

    @property
    def waiting(self) -> list[Request]:
        """Requests that hold none: new ones and preempted ones, in their order."""
        return self._in_line(Status.WAITING, Status.PREEMPTED)

    def _in_line(self, *statuses: Status) -> list[Request]:
        found = [r for r in self.requests.values() if r.status in statuses]
        return sorted(found, key=self.place_in_line)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Put a request in line. Raises RequestError for one that can never run, now and not later.

        Such a request would wait for ever, and everybody behind it too. With chunking off the
        whole text must fit one step: after a preemption, prompt and outputs are computed again
        in one piece.
        """
        name = f"request {request.request_id!r}"
        if request.request_id in self.requests:
            raise RequestError(f"{name} is here already; give each request its own id")
        if request.status != Status.NEW or request.block_table:
            raise RequestError(
                f"{name} is {request.status} and holds {len(request.block_table)} blocks; expected "
                f"one that was never added, here or elsewhere: make a new Request from its tokens"
            )
        config, pool = self.config, self.manager.pool
        one_step = None if config.enable_chunked_prefill else config.max_num_batched_tokens
        for limit, what, cure in (
            (pool.num_usable_blocks * pool.block_size, "tokens of room in the pool",
             "make the pool larger"),
            (config.max_model_len, "positions of the model", "shorten the prompt"),
            (one_step, "tokens of one step's budget", "switch chunked prefill on"),
        ):  # fmt: skip
            if limit is not None and request.max_computed_tokens > limit:
                raise RequestError(
                    f"{name}: {request.num_prompt_tokens} prompt tokens and "
                    f"{request.max_new_tokens} outputs compute {request.max_computed_tokens} "
                    f"positions, but there are {limit} {what}; {cure}, or ask for fewer outputs"
                )
        request.order, self._num_added = self._num_added, self._num_added + 1
        request.added_step = self.stats.num_steps
        request.status = Status.WAITING
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> Request:
        """Take a request out, wherever it stands, and give its blocks back."""
        request = self._known(request_id)
        request.finish_reason = "abort"
        self._leave(request, Status.ABORTED)
        return request

    def set_drafts(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Guesses to verify with the next token; cut so that no output can be too many."""
        request = self._known(request_id)
        drafts = token_row(token_ids, f"drafts of {request_id!r}")
        request.draft_token_ids = drafts[: max(request.num_outputs_left - 1, 0)]

    def start_over(self) -> None:
        """After a step that broke off: what blocks hold is not trusted, everybody computes again.

        A request's token list is always right (update() books it in one statement), so nobody
        loses a token or gains one; what was half done in the blocks is dropped whole.
        """
        for request in self.running:
            self.stats.record_preemption(request)
            request.num_preemptions += 1
            request.draft_token_ids = []
            request.status = Status.PREEMPTED
        self.manager.reset(self.requests.values())
        for request in list(self.requests.values()):
            if request.finish_reason:  # it had ended, and only its leaving was interrupted
                self._leave(request, Status.FINISHED)

    # -- one step -----------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Decide one step: running requests first, then waiting ones. Blocks are taken here."""
        budget, block_size = self.config.max_num_batched_tokens, self.manager.block_size
        schedule = Schedule(self.stats.num_steps, budget, block_size)
        self._schedule_running(schedule)
        self._schedule_waiting(schedule)
        self.stats.num_steps += 1
        schedule.num_free_blocks = self.manager.pool.num_free_blocks
        return schedule

    def update(
        self,
        schedule: Schedule,
        sampled: Mapping[str, Sequence[int]],
        now: float | None = None,
    ) -> dict[str, list[int]]:
        """Take the step's outputs: for each request that samples, agreed drafts and one token.

        sampled   request_id -> output ids (sampling.accept); an empty list samples nothing and
                  takes the step's last tokens back
        now       a clock reading, for the request's times
        Returns the outputs that were kept. A request that was aborted meanwhile is passed over.
        Raises RequestError before anything is changed.
        """
        entries = [e for e in schedule.scheduled if e.request.status == Status.RUNNING]
        self._check_outputs(entries, sampled)
        kept: dict[str, list[int]] = {}
        for entry in entries:
            request, outputs, computed = entry.request, list[int](), entry.seq_len
            reason, num_verified, num_drafts = None, 0, len(entry.draft_token_ids)
            if entry.samples:
                outputs, reason = request.outputs_to_keep(list(sampled[entry.request_id]))
                num_verified = len(sampled[entry.request_id])
                computed = computed_after(entry.seq_len - 1 - num_drafts, num_drafts, len(outputs))
                request.draft_token_ids = []
            if outputs:
                request.first_token = now if request.first_token is None else request.first_token
                request.last_token = now
                if request.first_step is None:
                    request.first_step = schedule.step
            # One statement: whoever interrupts finds the tokens and their end, or neither.
            request.token_ids, request.finish_reason = [*request.token_ids, *outputs], reason
            kept[entry.request_id] = outputs
            self.stats.record_share(entry, num_verified)
            self.manager.mark_computed(request, computed - request.num_computed_tokens)
            request.high_water = max(request.high_water, computed)
            if reason:
                request.finish_step = schedule.step
                self._leave(request, Status.FINISHED)
        return kept

    def _check_outputs(
        self, entries: list[ScheduledRequest], sampled: Mapping[str, Sequence[int]]
    ) -> None:
        for entry in entries:
            name, computed = entry.request_id, entry.request.num_computed_tokens
            outputs = sampled.get(name) if isinstance(sampled, Mapping) else None
            is_row = isinstance(outputs, list | tuple) and len(outputs) <= entry.num_logits_rows
            fits = is_row and all(type(token) is int for token in outputs or ())
            if computed != entry.start or (entry.samples and not fits):
                raise RequestError(
                    f"{name!r} was given {outputs!r}, and has {computed} tokens computed where its "
                    f"step began at {entry.start}; expected a list of token ids for each that "
                    f"samples, at most {entry.num_logits_rows}: update with each step once"
                )

    # -- running requests ---------------------------------------------------------------

    def _schedule_running(self, schedule: Schedule) -> None:
        running = self.running
        index = 0
        while index < len(running):  # the list shrinks from its end while we walk
            request = running[index]
            share, reason = self._wanted(request, schedule.budget_left)
            if share and (paused := self.pause(request)):
                share, reason = 0, paused
            if share:
                share, reason = self._make_room(request, share, reason, running, schedule)
            if request.status != Status.RUNNING:
                return  # it was the youngest and had to give way itself
            if share:
                schedule.block_copies += self.manager.grow(request, share)
                schedule.serve(request, share, reason)
            else:
                schedule.reasons[request.request_id] = reason or Reason.NOTHING_NEW
            index += 1

    def _wanted(self, request: Request, budget: int) -> tuple[int, Reason | None]:
        """The subtraction and its clamps. Drafts are the first to go when the budget is short."""
        known = num_new_tokens(
            request.num_tokens, request.num_placeholders, request.num_computed_tokens
        )
        num_drafts = min(len(request.draft_token_ids), max(budget - known, 0)) if known > 0 else 0
        return self._clamp(known + num_drafts, budget)

    def _clamp(self, num_new: int, budget: int) -> tuple[int, Reason | None]:
        config = self.config
        return clamp_new_tokens(
            num_new, config.long_prefill_token_threshold, budget, config.enable_chunked_prefill
        )

    def _make_room(
        self,
        request: Request,
        share: int,
        reason: Reason | None,
        running: list[Request],
        schedule: Schedule,
    ) -> tuple[int, Reason | None]:
        """Cut the share to what free blocks hold; if they hold nothing, preempt the youngest."""
        while True:
            fitting = self.manager.num_tokens_that_fit(request)
            if fitting >= share:
                return share, reason
            if fitting > 0:
                return fitting, Reason.NO_BLOCKS
            victim = running.pop()
            self.preempt(victim, schedule)
            if victim is request:
                return 0, Reason.PREEMPTED

    def preempt(self, victim: Request, schedule: Schedule) -> None:
        """Recompute later: blocks go back, outputs and place in line stay."""
        self.stats.record_preemption(victim)
        self.manager.preempt(victim)
        victim.draft_token_ids = []
        victim.status = Status.PREEMPTED
        schedule.preempted.append(victim.request_id)
        schedule.reasons[victim.request_id] = Reason.PREEMPTED

    # -- waiting requests ---------------------------------------------------------------

    def _schedule_waiting(self, schedule: Schedule) -> None:
        stop = Reason.AFTER_PREEMPTION if schedule.preempted else None
        num_running = len(self.running)
        head: Request | None = None  # the first one that could not be admitted
        for request in self.waiting:
            if not stop and num_running >= self.config.max_num_seqs:
                stop = Reason.MAX_SEQS
            reason = stop or self._admit(request, schedule)
            if reason is None:
                num_running += 1
                if head is not None:
                    head.num_skips += 1
                continue
            schedule.reasons.setdefault(request.request_id, reason)
            head = head or request
            if reason is Reason.TOKEN_BUDGET:
                stop = reason  # true for everybody behind as well
            elif stop is None and not self.may_pass(head):
                stop = Reason.BEHIND_HEAD
        if head is not None:
            head.head_delay += 1

    def _admit(self, request: Request, schedule: Schedule) -> Reason | None:
        """Start a waiting request with its prefix hit and a first share, or say why not.

        What the prefix cache holds costs no budget: the share is cut from what is left of it.
        """
        hit = self.manager.match_prefix(request)
        left = num_new_tokens(request.num_tokens, request.num_placeholders, hit.num_tokens)
        share, reason = self._clamp(left, schedule.budget_left)
        if not share:
            return reason
        if objection := self.objection(request, hit):
            return objection
        fitting = self.manager.num_tokens_that_fit(request, hit)
        if fitting < share:
            share, reason = fitting, Reason.NO_BLOCKS
            if share < 1 or not self.config.enable_chunked_prefill:
                return reason
        schedule.block_copies += self.manager.start(request, share, hit)
        self.stats.record_hit(request, hit.num_tokens)
        request.status = Status.RUNNING
        schedule.serve(request, share, reason, num_cached=hit.num_tokens)
        return None

    # -- shared -------------------------------------------------------------------------

    def _leave(self, request: Request, status: Status) -> None:
        """Out of the line; blocks go back to the pool, full ones stay cached."""
        self.manager.release(request)
        request.draft_token_ids = []
        request.status = status
        del self.requests[request.request_id]

    def _known(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise RequestError(
                f"request {request_id!r} is not here: it never was, or it has finished; active "
                f"are {sorted(self.requests)[:8]}"
            )
        return self.requests[request_id]
