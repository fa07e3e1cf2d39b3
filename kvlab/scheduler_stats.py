"""What a scheduler counts over its life, and where each count is taken."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.request import Request
from kvlab.schedule import ScheduledRequest


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
        if request.num_preemptions:
            request.num_resumed_tokens += num_tokens
            self.num_resumed_tokens += num_tokens
        else:
            request.num_hit_tokens += num_tokens
            self.num_cached_tokens += num_tokens

    def record_preemption(self, request: Request) -> None:
        """A request is about to lose its blocks."""
        request.num_dropped_tokens += request.num_computed_tokens
        self.num_dropped_tokens += request.num_computed_tokens
        self.num_preemptions += 1

    def record_share(self, entry: ScheduledRequest, num_outputs: int) -> None:
        """A share was computed and led to this many outputs, those past a stop token included."""
        request, num_drafts = entry.request, len(entry.draft_token_ids)
        num_accepted = min(max(num_outputs - 1, 0), num_drafts)
        self.num_scheduled_tokens += entry.num_tokens
        self.num_recomputed_tokens += entry.num_recomputed
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        request.num_recomputed_tokens += entry.num_recomputed
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
