"""Helpers of the scheduler's tests: a small scheduler, and a run with made-up outputs."""

from __future__ import annotations

from kvlab.batch import build_batch
from kvlab.blocks import BlockPool
from kvlab.integrity import check_schedule, check_scheduler
from kvlab.notebook.policies import FULL_HIT, scheduler_for
from kvlab.request import Request
from kvlab.sampling import accept
from kvlab.scheduler import Schedule, Scheduler, SchedulerConfig


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    prefix_caching: bool = True,
    full_hit: str = "block",
    admission: str = "first_chunk",
    head_of_line: str = "strict",
    prompts: str = "mixed",
    max_head_skips: int = 64,
    **config,
) -> Scheduler:
    """num_blocks are usable ones: the null block is added."""
    manager = FULL_HIT[full_hit](BlockPool(num_blocks + 1, block_size), prefix_caching=prefix_caching)
    kind = scheduler_for(admission=admission, head_of_line=head_of_line, prompts=prompts)
    made = kind(manager, SchedulerConfig(**config))
    made.max_head_skips = max_head_skips
    return made


def request(name: str, prompt: int | list[int], outputs: int = 4, **fields) -> Request:
    """A request with its own tokens (or the given ones)."""
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(map(ord, name)))
        prompt = [base + i for i in range(prompt)]
    return Request(name, prompt, max_new_tokens=outputs, **fields)


def next_token(token_ids: list[int]) -> int:
    """A made-up model: the next token depends on everything before it, and often repeats."""
    return (sum(token_ids[-3:]) * 7 + len(token_ids)) % 5


def rows_of(entry) -> list[int]:
    """What the made-up model samples in each wanted row of a share."""
    tokens = [*entry.request.token_ids, *entry.draft_token_ids]
    known = entry.request.num_tokens
    return [next_token(tokens[: known + i]) for i in range(entry.num_logits_rows)]


def step(scheduler: Scheduler) -> Schedule:
    """One checked step with the made-up model."""
    schedule = scheduler.schedule()
    check_schedule(scheduler, schedule)
    build_batch(schedule).check()
    sampled = {
        e.request_id: accept(e.draft_token_ids, rows_of(e)) for e in schedule.scheduled if e.samples
    }
    scheduler.update(schedule, sampled)
    check_scheduler(scheduler)
    return schedule


def drain(scheduler: Scheduler, limit: int = 5000) -> list[Schedule]:
    """Run until nobody is left."""
    steps = []
    while scheduler.has_requests:
        steps.append(step(scheduler))
        assert len(steps) < limit, "the scheduler does not come to an end"
    return steps


def shares(schedule: Schedule) -> dict[str, int]:
    return {entry.request_id: entry.num_tokens for entry in schedule.scheduled}


def alone(prompt: list[int], outputs: int) -> list[int]:
    """What the made-up model says to one request with nobody else there."""
    tokens = list(prompt)
    for _ in range(outputs):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def assert_empty(scheduler: Scheduler) -> None:
    """Nothing leaked: no request, no held block, every block free."""
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    assert not scheduler.manager.requests
    pool = scheduler.manager.pool
    assert pool.num_free_blocks == pool.num_usable_blocks
