"""Drafts: guess the next tokens cheaply, check all guesses in one forward, undo the wrong ones.

A decode step reads every weight to compute one row. Rows for three guesses ride along almost for
free, and each guess that the model would have sampled anyway is a step saved. The guesses here
come from the text itself (an n-gram that occurred before goes on as it did then), so there is no
second model. Verification never changes the output, only the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index

from kvlab.blocks import is_whole
from kvlab.errors import KvlabError
from kvlab.request import RequestError


class DraftError(KvlabError):
    """Drafts or verdicts that do not fit together."""


@dataclass(frozen=True)
class NgramProposer:
    """Find the last few tokens earlier in the text and propose what followed there.

    num_drafts          guesses per step, at most
    max_ngram, min_ngram   the longest match is tried first
    """

    num_drafts: int = 3
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        settings = (self.num_drafts, self.min_ngram, self.max_ngram)
        if not all(is_whole(value, 1) for value in settings) or self.min_ngram > self.max_ngram:
            raise DraftError(
                f"num_drafts={self.num_drafts!r}, min_ngram={self.min_ngram!r}, "
                f"max_ngram={self.max_ngram!r}; expected whole numbers, num_drafts >= 1 and "
                f"1 <= min <= max"
            )

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
    if len(sampled) != len(draft_token_ids) + 1:
        raise DraftError(
            f"{len(draft_token_ids)} drafts and {len(sampled)} sampled rows; expected one row more "
            f"than drafts: the last known token has a row too"
        )
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
    if not 0 <= num_accepted <= num_drafts:
        raise DraftError(f"{num_accepted} accepted of {num_drafts} drafts: expected 0 to all")
    all_accepted = num_accepted == num_drafts and num_drafts > 0
    return Rollback(
        target_trim=num_drafts - num_accepted,
        draft_trim=max(num_drafts - 1 - num_accepted, 0),
        draft_extra_forwards=int(all_accepted),
    )


def computed_after(num_computed: int, num_drafts: int, num_outputs: int) -> int:
    """num_computed_tokens after a step that ran one known token and its drafts (SCH-11).

    The step counts all 1 + num_drafts rows as computed, then takes back those that led to no
    output. An empty output takes all of them back.

    >>> [computed_after(10, 3, n) for n in (2, 1, 0)]
    [12, 11, 10]
    """
    scheduled = 1 + num_drafts
    if not 0 <= num_outputs <= scheduled:
        raise DraftError(
            f"{num_outputs} outputs from {scheduled} rows; expected at most one output a row"
        )
    return num_computed + scheduled - (scheduled - num_outputs)


def draft_list(request_id: str, token_ids: Sequence[int]) -> list[int]:
    """Drafts as a list of their own. Raises DraftError for what is no row of token ids."""
    try:
        return [index(token) for token in token_ids]
    except TypeError:
        raise DraftError(
            f"{request_id!r} was given the drafts {token_ids!r:.80}; expected a list of token ids"
        ) from None


def check_outputs(request_id: str, sampled: Mapping[str, Sequence[int]], num_drafts: int) -> None:
    """A step's outputs hold a list of token ids for this request, and not too many.

    Raises RequestError, or DraftError for more outputs than rows.
    """
    if not isinstance(sampled, Mapping) or request_id not in sampled:
        raise RequestError(f"{request_id!r} reached its last token: sample it")
    outputs = sampled[request_id]
    if not isinstance(outputs, list | tuple) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in outputs
    ):
        raise RequestError(f"{request_id!r} was given {outputs!r}; expected a list of token ids")
    computed_after(0, num_drafts, len(outputs))
