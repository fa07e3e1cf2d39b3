"""The detectors of the scheduler's faults, around every engine step.

    after schedule()   budget, shares, reasons, order: kvlab.invariants; nobody is passed for ever
    before the forward each request's last position is its context minus one
    after update()     queues and pool; outputs only grow; kept drafts are what was sampled;
                       prefix hits are only counted for what others had computed

watch_steps() puts all of them in place. A step that breaks one raises FaultDetected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvlab.engine import ModelRunner
from kvlab.errors import IntegrityError, KvlabError
from kvlab.faults.registry import FaultDetected
from kvlab.faults.seams import watched
from kvlab.integrity import check_schedule, check_scheduler
from kvlab.request import Request
from kvlab.scheduler import Scheduler


class Ledger:
    """What was seen of each request, to hold the next step against."""

    def __init__(self) -> None:
        self.orders: dict[Request, int] = {}
        self.outputs: dict[Request, list[int]] = {}

    def compare(self, scheduler: Scheduler) -> list[str]:
        """Orders never change; outputs only grow at their end."""
        found = []
        for request in scheduler.requests.values():
            order = self.orders.setdefault(request, request.order)
            if request.order != order:
                found.append(
                    f"{request.request_id} was number {order} in line and is now "
                    f"{request.order}; a preempted request keeps its place"
                )
            before, now = self.outputs.get(request, []), request.output_token_ids
            if now[: len(before)] != before:
                found.append(
                    f"{request.request_id} had {len(before)} outputs and has {len(now)}: those "
                    f"that were sampled must stay"
                )
            self.outputs[request] = now
            limit = scheduler.config.max_head_skips
            if request.num_skips > limit + scheduler.config.max_num_seqs:
                found.append(
                    f"{request.request_id} was passed {request.num_skips} times; the bound is "
                    f"{limit} (and what one step admits)"
                )
        return found


def draft_findings(schedule, kept: dict[str, list[int]]) -> list[str]:
    """All outputs of a step but the last must be drafts that the model agreed with."""
    found = []
    for entry in schedule.scheduled:
        accepted = kept.get(entry.request_id, [])[:-1]
        if accepted != list(entry.draft_token_ids[: len(accepted)]):
            found.append(
                f"{entry.request_id} kept {accepted} of the drafts {list(entry.draft_token_ids)}: "
                f"whatever follows a wrong draft was computed from it"
            )
    return found


def hit_findings(scheduler: Scheduler) -> list[str]:
    """The scheduler's hits against the block manager's own count of cross-request hits."""
    counted, seen = scheduler.stats.num_cached_tokens, scheduler.manager.stats.hit_tokens
    if counted > seen:
        return [
            f"{counted} tokens counted as prefix hits, {seen} came from other requests; re-reading "
            f"one's own blocks after a preemption is no hit"
        ]
    return []


@contextmanager
def watch_steps() -> Iterator[None]:
    """Every check around every step of whatever runs inside."""
    ledgers: dict[Scheduler, Ledger] = {}

    def fail(findings: list[str]) -> None:
        if findings:
            raise FaultDetected("; ".join(findings))

    def schedule(original, scheduler):
        made = original(scheduler)
        try:
            check_schedule(scheduler, made)
        except IntegrityError as error:
            raise FaultDetected(str(error)) from error
        fail(ledgers.setdefault(scheduler, Ledger()).compare(scheduler))
        return made

    def update(original, scheduler, made, sampled):
        kept = original(scheduler, made, sampled)
        fail(draft_findings(made, kept) + hit_findings(scheduler))
        try:
            check_scheduler(scheduler)
        except (IntegrityError, IntegrityError) as error:
            raise FaultDetected(str(error)) from error
        fail(ledgers.setdefault(scheduler, Ledger()).compare(scheduler))
        return kept

    def run(original, runner, batch, *arguments):
        try:
            batch.check()
        except KvlabError as error:
            raise FaultDetected(
                f"{error}. Position and seq_len are made from the tokens computed before the step"
            ) from error
        return original(runner, batch, *arguments)

    with ExitStack() as stack:
        stack.enter_context(watched(Scheduler, "schedule", schedule))
        stack.enter_context(watched(Scheduler, "update", update))
        stack.enter_context(watched(ModelRunner, "run", run))
        yield
