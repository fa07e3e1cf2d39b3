"""From logits to tokens: greedy or drawn, one row after another, and guesses that are verified.

Every request has its own seed and its own random numbers: output i uses number i. So what a
request samples depends on nothing but itself: not on who shares its batch, not on preemptions,
not on drafts (one that was wrong used up no number) and not on a step that failed half way.

Drafts: a decode step reads every weight to compute one row. Rows for three guesses ride along
almost for free, and each guess that the model would have sampled anyway is a step saved. The
guesses here come from the text itself (an n-gram that occurred before goes on as it did then).
Verification never changes the output, only the number of steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Real
from typing import NamedTuple, Protocol

import torch

from kvlab.errors import RequestError, whole


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. The default is greedy; what means nothing raises RequestError.

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
        for name, least, most, expected in (
            ("temperature", 0.0, sys.float_info.max, "a number, 0 or more"),
            ("top_p", math.ulp(0.0), 1.0, "a number in (0, 1]"),
            ("seed", 0, 2**63 - 1, "a whole number below 2**63"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:
                raise RequestError(f"{name}={value!r}; expected {expected}")
        object.__setattr__(self, "top_k", whole("top_k", self.top_k))
        object.__setattr__(self, "seed", whole("seed", self.seed))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities that a token is drawn from: logits [vocab] -> [vocab], float64.

    Temperature first, then top-k, then top-p. Tokens that are cut have probability 0.
    """
    if params.is_greedy:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).double()
    # The largest becomes 0 first, so that no temperature, however small, makes it infinite.
    scaled = (logits.double() - logits.max()) / float(params.temperature)
    if 0 < params.top_k < scaled.numel():
        kth = scaled.topk(params.top_k).values[-1]
        above, tied = scaled > kth, scaled == kth  # bf16 ties often
        keep = above | (tied & (tied.cumsum(-1) <= params.top_k - above.sum()))
        scaled = torch.where(keep, scaled, -math.inf)
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        # A token stays while the ones before it hold less than top_p: the first always stays.
        keep = ordered.cumsum(-1) - ordered < float(params.top_p)
        probs = torch.zeros_like(probs).scatter(0, order, ordered * keep)
        probs = probs / probs.sum()
    return probs


def draw(logits: torch.Tensor, params: SamplingParams, number: float) -> torch.Tensor:
    """The token that a random number from [0, 1) falls on: logits [vocab] -> [], on its device."""
    cumulative = distribution(logits, params).cumsum(-1)
    place = torch.searchsorted(cumulative, cumulative[-1:] * number, right=True)
    return place[0].clamp(max=logits.numel() - 1)


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

        The same call gives the same outputs again, whatever came between. Raises RequestError
        for logits that no token can be sampled from.
        """
        num_rows = sum(1 + len(each.draft_token_ids) for each in wanted)
        assert len(logits) == num_rows, f"{len(logits)} rows of logits for {num_rows} wanted"
        best, tokens = logits.max(-1)
        starts = list(accumulate((1 + len(each.draft_token_ids) for each in wanted), initial=0))
        for each, (start, stop) in zip(wanted, pairwise(starts), strict=True):
            if not each.params.is_greedy:
                for i, row in enumerate(range(start, stop)):
                    number = self._number(each.params, each.num_outputs + i)
                    tokens[row] = draw(logits[row], each.params, number)
        # What a GPU has computed is waited for here, once a step.
        best, tokens = torch.stack((best.double(), tokens.double())).tolist()
        outputs = {}
        for each, (start, stop) in zip(wanted, pairwise(starts), strict=True):
            if not all(map(math.isfinite, best[start:stop])):  # argmax would still name one
                raise RequestError(
                    f"request {each.request_id!r}: its largest logit is {best[start:stop]}; "
                    f"expected finite numbers. Look for NaN in weights and cache; abort() lets "
                    f"others go on"
                )
            outputs[each.request_id] = accept(each.draft_token_ids, [*map(int, tokens[start:stop])])
        return outputs

    @staticmethod
    def _number(params: SamplingParams, index: int) -> float:
        """A request's random number for its output `index`, from 0 to below 1.

        Drawn anew from the seed each time (microseconds), so that there is no state to lose.
        """
        generator = torch.Generator().manual_seed(params.seed)
        return float(torch.rand(index + 1, generator=generator, dtype=torch.float64)[index])


# --- drafts -----------------------------------------------------------------------------------


class Proposer(Protocol):
    """Whatever guesses the next tokens of a text; the engine takes any object with this method."""

    def propose(self, token_ids: Sequence[int], limit: int | None = None) -> list[int]:
        """At most `limit` guesses for what follows token_ids; none is an answer too."""
        ...


@dataclass(frozen=True)
class NgramProposer:
    """Find the last few tokens earlier in the text and propose what followed there.

    num_drafts             guesses per step, at most
    max_ngram, min_ngram   the longest match is tried first
    """

    num_drafts: int = 3
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        whole("num_drafts", self.num_drafts, 1)
        least = whole("min_ngram", self.min_ngram, 1)
        whole("max_ngram (min_ngram at least)", self.max_ngram, least)

    def propose(self, token_ids: Sequence[int], limit: int | None = None) -> list[int]:
        """Up to num_drafts (and `limit`) guesses for what follows token_ids; often none.

        >>> NgramProposer(num_drafts=2).propose([7, 8, 9, 5, 7, 8])
        [9, 5]
        """
        num_drafts = self.num_drafts if limit is None else min(limit, self.num_drafts)
        if num_drafts < 1:
            return []
        tokens = list(token_ids)
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            tail = tokens[-size:]
            for begin in range(len(tokens) - size - 1, -1, -1):
                if tokens[begin : begin + size] == tail:
                    return tokens[begin + size : begin + size + num_drafts]
        return []


def accept(draft_token_ids: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that a verified step yields: agreed drafts, then one of the model's own.

    sampled[i] is what the model samples after the last known token and the first i drafts, so
    there is one more of them than of drafts. The first one that differs from its draft is the
    correction, and everything behind it was computed from a wrong token.

    >>> accept([4, 5, 6], [4, 5, 9, 1]), accept([4, 5], [4, 5, 8]), accept([4], [7, 8])
    ([4, 5, 9], [4, 5, 8], [7])
    """
    assert len(sampled) == len(draft_token_ids) + 1, "the last known token has a row too"
    num_accepted = 0
    for guess, token in zip(draft_token_ids, sampled, strict=False):
        if guess != token:
            break
        num_accepted += 1
    return list(sampled[: num_accepted + 1])


@dataclass(frozen=True)
class Rollback:
    """How far each cache goes back after a verified step. Per request: rows never share one."""

    target_trim: int
    draft_trim: int
    draft_extra_forwards: int


def rollback(num_drafts: int, num_accepted: int) -> Rollback:
    """Tokens to drop from the target's and from a draft model's cache.

    The target was fed the last known token and all k drafts: k + 1 rows, of which 1 + a stay, so
    it drops k - a. A draft model was fed one token fewer, because it never reads its own last
    guess: k rows, 1 + a stay, so it drops (k - 1) - a. Where all k were right it has nothing to
    drop and still has to read that last guess: one extra forward.

    >>> rollback(4, 2), rollback(4, 4)
    (Rollback(target_trim=2, draft_trim=1, draft_extra_forwards=0), \
Rollback(target_trim=0, draft_trim=0, draft_extra_forwards=1))
    """
    assert 0 <= num_accepted <= num_drafts, f"{num_accepted} accepted of {num_drafts} drafts"
    return Rollback(
        target_trim=num_drafts - num_accepted,
        draft_trim=max(num_drafts - 1 - num_accepted, 0),
        draft_extra_forwards=int(0 < num_drafts == num_accepted),
    )
