"""From a row of logits to a token: greedy, or drawn with temperature, top-k and top-p.

Every request has its own seed and its own random numbers: output i uses number i. So what a
request samples depends on nothing but itself: not on who shares its batch, not on preemptions,
not on drafts (one that was wrong used up no number) and not on a step that failed half way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvlab.drafts import accept
from kvlab.errors import KvlabError


class SamplingError(KvlabError):
    """Sampling parameters that mean nothing, or logits that no token can be sampled from."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. The default is greedy.

    temperature   0: greedy (the rest is ignored); else logits are divided by it
    top_k         keep the k likeliest tokens, of equal ones the smaller ids; 0 keeps all
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
                _is_number(self.temperature) and 0 <= self.temperature <= sys.float_info.max,
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
    if params.is_greedy:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).double()
    # The largest becomes 0 first, so that no temperature, however small, makes it infinite.
    scaled = (logits.double() - logits.max()) / params.temperature
    if 0 < params.top_k < scaled.numel():
        kth = scaled.topk(params.top_k).values[-1]
        num_above, tied = int((scaled > kth).sum()), (scaled == kth).nonzero().flatten()
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
        scaled[tied[params.top_k - num_above :]] = -math.inf  # bf16 ties often
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        # A token stays while the ones before it hold less than top_p: the first always stays.
        keep = ordered.cumsum(-1) - ordered < params.top_p
        probs = torch.zeros_like(probs).scatter(0, order[keep], ordered[keep])
        probs = probs / probs.sum()
    return probs


class Wanted(NamedTuple):
    """One request's rows of a step, 1 + number of drafts, and what to sample there.

    num_outputs   outputs that the request has already: the number of the first random number
    """

    request_id: str
    params: SamplingParams
    draft_token_ids: Sequence[int] = ()
    num_outputs: int = 0


class Sampler:
    """Samples for many requests at once, and keeps nothing between two calls."""

    def sample(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        """Outputs of one step: agreed drafts and then one token for each request.

        logits   [rows, vocab], request by request in the order of wanted

        The same call gives the same outputs again, whatever came between. Raises SamplingError.
        """
        num_rows = sum(1 + len(each.draft_token_ids) for each in wanted)
        if len(logits) != num_rows:
            raise SamplingError(
                f"{len(logits)} rows of logits; expected {num_rows}: one for each request, and one "
                f"for each draft"
            )
        best, greedy = (column.tolist() for column in logits.max(-1))
        outputs, row = {}, 0
        for each in wanted:
            stop = row + 1 + len(each.draft_token_ids)
            if not all(map(math.isfinite, best[row:stop])):  # argmax would still name one
                raise SamplingError(
                    f"request {each.request_id!r}: its largest logit is {best[row:stop]}; expected "
                    f"finite numbers. Look for NaN in weights and cache; abort() lets others go on"
                )
            if each.params.is_greedy:
                outputs[each.request_id] = accept(each.draft_token_ids, greedy[row:stop])
            else:
                outputs[each.request_id] = self._draw(each, logits[row:stop])
            row = stop
        return outputs

    def _draw(self, wanted: Wanted, rows: torch.Tensor) -> list[int]:
        """Draw row after row while the drafts agree. Equal to drawing without drafts."""
        outputs: list[int] = []
        for row, draft in zip(rows, [*wanted.draft_token_ids, None], strict=True):
            cumulative = distribution(row, wanted.params).cumsum(-1).cpu()
            point = cumulative[-1:] * self._number(wanted.params, wanted.num_outputs + len(outputs))
            token = int(torch.searchsorted(cumulative, point, right=True))
            outputs.append(min(token, cumulative.numel() - 1))
            if outputs[-1] != draft:
                break
        return outputs

    @staticmethod
    def _number(params: SamplingParams, index: int) -> float:
        """A request's random number for its output `index`, from 0 to below 1.

        Drawn anew from the seed each time (microseconds), so that there is no state to lose.
        """
        generator = torch.Generator().manual_seed(params.seed)
        return float(torch.rand(index + 1, generator=generator, dtype=torch.float64)[index])
