"""What a request gets back: its tokens, its times and its counters; and what a step did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvlab.errors import KvlabError
from kvlab.request import Request
from kvlab.schedule import Schedule


class EngineStuck(KvlabError):
    """Requests are there and none of them can move, now or in any later step."""


@dataclass
class RequestOutput:
    """A request's result, filled in while it runs.

    token_ids       outputs so far, without the prompt
    finish_reason   None while it runs; "stop", "length" or "abort"
    arrival, first_token, last_token   clock readings in seconds
    num_cached_tokens ... num_accepted_tokens   see kvlab.request.Request
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    arrival: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def follow(self, request: Request) -> None:
        """Take over the request's counters, and why it ended if it has."""
        self.finish_reason = request.finish_reason
        self.num_cached_tokens = request.num_hit_tokens
        self.num_preemptions = request.num_preemptions
        self.num_recomputed_tokens = request.num_recomputed_tokens
        self.num_draft_tokens = request.num_draft_tokens
        self.num_accepted_tokens = request.num_accepted_tokens

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token: from arrival, so waiting counts. None before there is one."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_per_output_token_seconds(self) -> float | None:
        """Mean time between outputs after the first; None with fewer than two."""
        if self.first_token is None or self.last_token is None or len(self.token_ids) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self.token_ids) - 1)


@dataclass(frozen=True)
class StepResult:
    """What one step did: its schedule, the new tokens of each request, and who is done."""

    schedule: Schedule
    new_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: list[RequestOutput] = field(default_factory=list)


def raise_if_stuck(schedule: Schedule) -> None:
    """A step may run nothing where nobody is there. Raises EngineStuck where somebody is.

    A caller that steps until the engine is empty would never come to an end.
    """
    if schedule.is_idle and schedule.reasons:
        reasons = ", ".join(f"{name}: {why}" for name, why in list(schedule.reasons.items())[:8])
        raise EngineStuck(
            f"no request can move ({reasons}), and nothing will change that: expected at least one "
            f"to run. Its counters were changed from outside; abort() it"
        )


def new_tokens(
    outputs: Sequence[RequestOutput], step: Callable[[], object]
) -> Iterator[list[tuple[str, int]]]:
    """Step until these are done; their new (request_id, token_id), whoever made the steps."""
    told = [0] * len(outputs)
    while True:
        fresh = [
            (output.request_id, token)
            for output, seen in zip(outputs, told, strict=True)
            for token in output.token_ids[seen:]
        ]
        told = [len(output.token_ids) for output in outputs]
        if fresh:
            yield fresh
        elif all(output.finished for output in outputs):
            return
        else:
            step()
