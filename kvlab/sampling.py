"""From a row of logits to a token: greedy, or drawn with temperature, top-k and top-p.

Every request has its own seed and its own random numbers, one per output. So what a request
samples depends on nothing but itself: not on who shares its batch, not on preemptions, and not on
drafts (a draft that was wrong used up no random number).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlab.drafts import accept
from kvlab.errors import KvlabError


class SamplingError(KvlabError):
    """Sampling parameters that mean nothing."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. The default is greedy.

    temperature   0: greedy (the rest is ignored); else logits are divided by it
    top_k         keep the k likeliest tokens; 0 keeps all
    top_p         keep the likeliest tokens until they hold this much probability, the one that
                  crosses the line included; 1 keeps all
    seed          of this request's random numbers
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (
                "temperature",
                _is_number(self.temperature) and 0 <= self.temperature < math.inf,
                "a number, 0 or more",
            ),
            ("top_k", _is_whole(self.top_k) and self.top_k >= 0, "a whole number, 0 or more"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("seed", _is_whole(self.seed) and 0 <= self.seed < 2**63, "a whole number below 2**63"),
        )
        for name, good, expected in checks:
            if not good:
                raise SamplingError(f"{name}={getattr(self, name)!r}; expected {expected}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities that a token is drawn from: logits [vocab] -> [vocab], float64.

    Temperature first, then top-k, then top-p. Tokens that are cut have probability 0.
    """
    # The largest becomes 0 first, so that no temperature, however small, makes it infinite.
    scaled = (logits.double() - logits.max()) / params.temperature
    if 0 < params.top_k < scaled.numel():
        kth = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        # A token stays while the ones before it hold less than top_p: the first always stays.
        keep = ordered.cumsum(-1) - ordered < params.top_p
        probs = torch.zeros_like(probs).scatter(0, order[keep], ordered[keep])
        probs = probs / probs.sum()
    return probs


class Sampler:
    """Samples for many requests at once; keeps one random number generator per request."""

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def forget(self, request_id: str) -> None:
        """Drop a finished request's generator."""
        self._generators.pop(request_id, None)

    def sample(
        self,
        logits: torch.Tensor,
        wanted: Sequence[tuple[str, SamplingParams, Sequence[int]]],
    ) -> dict[str, list[int]]:
        """Outputs of one step: agreed drafts and then one token for each request.

        logits   [rows, vocab], request by request, 1 + number of drafts rows each
        wanted   (request_id, params, drafts), in the order of the rows
        """
        greedy = logits.argmax(-1).tolist()
        outputs, row = {}, 0
        for request_id, params, drafts in wanted:
            stop = row + 1 + len(drafts)
            if params.is_greedy:
                outputs[request_id] = accept(drafts, greedy[row:stop])
            else:
                outputs[request_id] = self._draw(request_id, params, logits[row:stop], drafts)
            row = stop
        return outputs

    def _draw(
        self, request_id: str, params: SamplingParams, rows: torch.Tensor, drafts: Sequence[int]
    ) -> list[int]:
        """Draw row after row while the drafts agree. Equal to drawing without drafts."""
        if request_id not in self._generators:
            self._generators[request_id] = torch.Generator().manual_seed(params.seed)
        generator, outputs = self._generators[request_id], []
        for row, draft in zip(rows, [*drafts, None], strict=True):
            cumulative = distribution(row, params).cumsum(-1).cpu()
            point = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
            token = int(torch.searchsorted(cumulative, point, right=True))
            outputs.append(min(token, cumulative.numel() - 1))
            if outputs[-1] != draft:
                break
        return outputs
