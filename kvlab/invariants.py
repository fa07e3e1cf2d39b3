"""What must hold around every step, checked from outside: tests, faults and the chapter use it.

schedule = scheduler.schedule();  check_schedule(scheduler, schedule)
...
scheduler.update(schedule, out);  check_state(scheduler)
"""

from __future__ import annotations

from kvlab.blocks import blocks_for
from kvlab.errors import KvlabError
from kvlab.request import Status
from kvlab.schedule import Reason, Schedule
from kvlab.scheduler import Scheduler


class StepCorrupt(KvlabError, AssertionError):
    """An invariant of the step is broken; the message lists every finding."""

    def __init__(self, findings: list[str]) -> None:
        self.findings = findings
        super().__init__("the step is corrupt: " + "; ".join(findings))


def check_schedule(scheduler: Scheduler, schedule: Schedule) -> None:
    """Between schedule() and the forward. Raises StepCorrupt."""
    _raise(schedule_findings(scheduler, schedule))


def check_state(scheduler: Scheduler) -> None:
    """After update(). Raises StepCorrupt, or PoolCorrupt for the pool's own invariants."""
    _raise(state_findings(scheduler))
    scheduler.manager.check_integrity()


def schedule_findings(scheduler: Scheduler, schedule: Schedule) -> list[str]:
    """Every broken invariant of one step's decisions, in words."""
    found = []
    used, budget = schedule.num_scheduled_tokens, schedule.budget
    if used > budget:
        found.append(f"{used} tokens scheduled, the budget is {budget}")
    if len(scheduler.running) > scheduler.config.max_num_seqs:
        found.append(
            f"{len(scheduler.running)} run, max_num_seqs is {scheduler.config.max_num_seqs}"
        )
    served = [entry.request_id for entry in schedule.scheduled]
    if len(set(served)) != len(served):
        found.append(f"somebody is served twice: {served}")
    for request_id in scheduler.requests:
        if (request_id in served) == (request_id in schedule.reasons):
            found.append(f"{request_id} needs tokens or a reason, exactly one of them")
    for entry in schedule.scheduled:
        name, num_drafts = entry.request_id, len(entry.draft_token_ids)
        if entry.num_tokens < 1:
            found.append(f"{name} is scheduled with {entry.num_tokens} tokens")
        if len(entry.token_ids) != entry.num_tokens:
            found.append(f"{name}: {len(entry.token_ids)} ids for {entry.num_tokens} tokens")
        if entry.seq_len - num_drafts > entry.request.num_tokens:
            found.append(f"{name}: context {entry.seq_len}, only {entry.request.num_tokens} known")
        if entry.samples != (entry.seq_len - num_drafts == entry.request.num_tokens):
            found.append(f"{name}: samples={entry.samples} before its last token is reached")
        if blocks_for(entry.seq_len, schedule.block_size) > len(entry.block_ids):
            found.append(f"{name}: no block for position {entry.seq_len - 1}")
    if not schedule.scheduled and scheduler.running:
        found.append(f"{len(scheduler.running)} requests run and nobody is served")
    return found + _waiting_findings(scheduler)


def state_findings(scheduler: Scheduler) -> list[str]:
    """Every broken invariant of the queues, in words."""
    found = []
    for request in scheduler.running:
        if request.status != Status.RUNNING:
            found.append(f"{request.request_id} is {request.status} in the running queue")
        if request.num_computed_tokens > request.num_tokens - 1:
            found.append(
                f"{request.request_id}: {request.num_computed_tokens} computed of "
                f"{request.num_tokens} known; an unfinished request has at least one to go"
            )
        if request.num_output_tokens >= request.max_new_tokens:
            found.append(f"{request.request_id} has all its outputs and still runs")
    queued = {r.request_id for r in scheduler.running + scheduler.waiting}
    if queued != set(scheduler.requests):
        found.append(f"queues and request list differ: {queued ^ set(scheduler.requests)}")
    holders = set(scheduler.manager.sequences) - {r.request_id for r in scheduler.running}
    if holders:
        found.append(f"blocks are held by requests that do not run: {sorted(holders)}")
    return found + _waiting_findings(scheduler)


def _waiting_findings(scheduler: Scheduler) -> list[str]:
    found = []
    for request in scheduler.waiting:
        if request.block_table or request.num_computed_tokens:
            found.append(f"{request.request_id} waits and holds {len(request.block_table)} blocks")
    for name, queue in (("running", scheduler.running), ("waiting", scheduler.waiting)):
        keys = [scheduler.place_in_line(request) for request in queue]
        if keys != sorted(keys):
            found.append(f"the {name} queue is out of order: {keys}")
    return found


def stalled(schedule: Schedule, scheduler: Scheduler) -> dict[str, Reason]:
    """Running requests that got nothing in this step, and why."""
    running = {request.request_id for request in scheduler.running}
    return {name: why for name, why in schedule.reasons.items() if name in running}


def _raise(findings: list[str]) -> None:
    if findings:
        raise StepCorrupt(findings)
