"""Engine steps without a model: workloads through the real scheduler, and each step as a record.

Nothing here is a second implementation: the decisions are those of kvlab.scheduler, in the page
(Pyodide) as in a notebook. Only the forward is left out, because who runs when does not depend on
what the tokens say. An engine that keeps its steps writes the same record, so a picture of the one
explains the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.batch import Batch, build_batch
from kvlab.blocks import BlockPool
from kvlab.errors import KvlabError
from kvlab.notebook import NotebookError, require
from kvlab.notebook.policies import SCHEDULING, scheduler_for
from kvlab.request import Request
from kvlab.scheduler import Reason, Schedule, ScheduledRequest, Scheduler, SchedulerConfig
from kvlab.specs import DATA_DIR
from kvlab.tables import BlockManager

MAX_REQUESTS, MAX_STEPS, MAX_TOKENS = 12, 400, 2000


SCENES = json.loads((DATA_DIR / "scenes.json").read_text("utf-8"))
#: One sentence for each reason: what the widget and the chapter print.
REASON_TEXT = {Reason(name): text for name, text in SCENES["reasons"].items()}


# -- a step and a request as plain values -------------------------------------------------------


def _kind(entry: ScheduledRequest) -> str:
    """prefill, decode, verify (a decode with drafts) or recompute (after a preemption)."""
    if entry.num_recomputed:
        return "recompute"
    if entry.start >= entry.request.num_prompt_tokens:
        return "verify" if entry.draft_token_ids else "decode"
    return "prefill"


def _share(entry: ScheduledRequest) -> dict:
    """One request's share."""
    return {
        "id": entry.request_id,
        "kind": _kind(entry),
        "start": entry.start,
        "tokens": entry.num_tokens,
        "seq_len": entry.seq_len,
        "known": entry.num_known,
        "cached": entry.num_cached,
        "recomputed": entry.num_recomputed,
        "drafts": len(entry.draft_token_ids),
        "samples": entry.samples,
        "limited_by": str(entry.limited_by) if entry.limited_by else None,
        "blocks": list(entry.block_ids),
    }


def step_record(
    schedule: Schedule, batch: Batch, outputs: Mapping[str, Seq[int]], pool: BlockPool
) -> dict:
    """A step as JSON values: its decisions, its batch, and the outputs that were kept."""
    return {
        "step": schedule.step,
        "mode": str(batch.mode),
        "budget": schedule.budget,
        "used": schedule.num_scheduled_tokens,
        "free_blocks": schedule.num_free_blocks,
        "usable_blocks": pool.num_usable_blocks,
        "shares": [_share(entry) for entry in schedule.scheduled],
        "reasons": {name: str(reason) for name, reason in schedule.reasons.items()},
        "preempted": list(schedule.preempted),
        "batch": {**asdict(batch), "mode": str(batch.mode)},
        "outputs": {name: list(tokens) for name, tokens in outputs.items() if tokens},
        "free_after": pool.num_free_blocks,
    }


def request_record(request: Request) -> dict:
    """A request's story in numbers: steps are engine steps, tokens are counts."""
    return {
        "id": request.request_id,
        "prompt": request.num_prompt_tokens,
        "outputs": request.num_output_tokens,
        "status": str(request.status),
        "finish_reason": request.finish_reason,
        "added_step": request.added_step,
        "first_step": request.first_step,
        "finish_step": request.finish_step,
        "hit_tokens": request.num_cached_tokens,
        "preemptions": request.num_preemptions,
        "dropped_tokens": request.num_dropped_tokens,
        "recomputed_tokens": request.num_recomputed_tokens,
        "resumed_tokens": request.num_resumed_tokens,
        "draft_tokens": request.num_draft_tokens,
        "accepted_tokens": request.num_accepted_tokens,
        "head_delay": request.head_delay,
        "skips": request.num_skips,
    }


# -- workloads ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """One request of a workload: when it comes, how long it is, what it shares.

    shared    the first `shared` prompt tokens are the same in all requests of one group
    """

    id: str
    step: int = 0
    prompt: int = 8
    outputs: int = 8
    shared: int = 0
    group: int = 0
    priority: int = 0

    def tokens(self, index: int) -> list[int]:
        """Prompt ids: the group's own first, then ids that nobody else has."""
        shared = min(self.shared, self.prompt)
        common = [10_000_000 * (self.group + 1) + i for i in range(shared)]
        return common + [10_000 * (index + 1) + i for i in range(shared, self.prompt)]


def simulate(
    arrivals: Seq[Arrival],
    settings: Mapping[str, Any],
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    prefix_caching: bool = True,
    max_steps: int = MAX_STEPS,
) -> dict:
    """Run a workload to its end and return its trace.

    settings     fields of SchedulerConfig; and the policies of SCHEDULING
    num_blocks   usable blocks; the null block comes on top

    Returns {"steps": [step_record], "requests": [request_record], "refused": {id: message},
    "totals": counters}. A request that can never fit is refused and the others run.
    """
    pool = BlockPool(num_blocks + 1, block_size)
    kind, config = _policy(settings)
    scheduler = kind(BlockManager(pool, prefix_caching=prefix_caching), config)
    records: list[dict] = []
    made: list[Request] = []
    refused: dict[str, str] = {}
    pending = sorted(enumerate(arrivals), key=lambda item: (item[1].step, item[0]))
    while pending or scheduler.has_requests:
        require(
            len(records) < max_steps,
            f"{len(records)} steps and {len(scheduler.requests)} requests still there; give "
            "fewer or shorter requests, or a larger budget",
        )
        while pending and pending[0][1].step <= len(records):
            index, arrival = pending.pop(0)
            try:
                request = Request(
                    arrival.id,
                    arrival.tokens(index),
                    max_new_tokens=arrival.outputs,
                    priority=arrival.priority,
                )
                scheduler.add(request)
                made.append(request)
            except KvlabError as error:
                refused[arrival.id] = str(error)
        schedule = scheduler.schedule()
        batch = build_batch(schedule)
        # Outputs that no other request has: a hit is then always a hit on a prompt.
        sampled = {
            e.request_id: [-(e.request.order * MAX_TOKENS + e.request.num_tokens) - 1]
            for e in schedule.scheduled
            if e.samples
        }
        records.append(step_record(schedule, batch, scheduler.update(schedule, sampled), pool))
    return {
        "steps": records,
        "requests": [request_record(request) for request in made],
        "refused": refused,
        "totals": asdict(scheduler.stats),
    }


POLICIES = {what: next(iter(answers)) for what, answers in SCHEDULING.items()}


def _policy(settings: Mapping[str, Any]) -> tuple[type[Scheduler], SchedulerConfig]:
    """The scheduler class and its limits. Raises NotebookError for an unknown field."""
    limits = {**POLICIES, **settings}
    try:
        kind = scheduler_for(**{what: limits.pop(what) for what in POLICIES})
        return kind, SchedulerConfig(**limits)
    except TypeError as error:
        raise NotebookError(f"an unknown or missing field: {error}") from None


@dataclass(frozen=True)
class Workload:
    """A named set of requests with the limits under which it is interesting."""

    title: str
    arrivals: tuple[Arrival, ...]
    settings: dict
    num_blocks: int
    block_size: int = 4
    prefix_caching: bool = True

    def question(self) -> dict:
        """The arguments of schedule_trace, as JSON values: every setting is spelled out."""
        return {
            "arrivals": [asdict(arrival) for arrival in self.arrivals],
            "settings": {**POLICIES, **asdict(_policy(self.settings)[1]), **self.settings},
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "prefix_caching": self.prefix_caching,
        }


WORKLOADS = {
    name: Workload(**{**scene, "arrivals": tuple(Arrival(**each) for each in scene["arrivals"])})
    for name, scene in SCENES["workloads"].items()
}


def schedule_trace(
    arrivals: list[dict],
    settings: dict,
    num_blocks: int = 16,
    block_size: int = 4,
    prefix_caching: bool = True,
) -> dict:
    """`simulate` for the widget: JSON in, JSON out, with limits on the size of the question."""
    require(
        isinstance(arrivals, list | tuple) and 1 <= len(arrivals) <= MAX_REQUESTS,
        f"requests {arrivals!r:.80}; expected a list of 1 to {MAX_REQUESTS}",
    )
    for name, size in (("num_blocks", num_blocks), ("block_size", block_size)):
        _require_whole(name, size, 1)
    try:
        workload = [Arrival(**arrival) for arrival in arrivals]
    except TypeError as error:
        raise NotebookError(f"an unknown or missing field: {error}") from None
    for arrival in workload:
        require(isinstance(arrival.id, str), f"request {arrival.id!r}: expected text for a name")
        for name in ("step", "prompt", "outputs", "shared", "group"):
            _require_whole(f"request {arrival.id!r}: {name}", getattr(arrival, name), 0)
    return simulate(
        workload,
        settings,
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
    )


def _require_whole(name: str, value: object, least: int) -> None:
    require(
        type(value) is int and least <= value <= MAX_TOKENS,
        f"{name}={value!r}; expected a whole number from {least} to {MAX_TOKENS}",
    )
