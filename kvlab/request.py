"""A request as the scheduler sees it: a Sequence, its place in line, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from kvlab.blocks import is_whole
from kvlab.errors import KvlabError
from kvlab.sequence import Sequence


class RequestError(KvlabError):
    """A request that is refused; no other request notices."""


class UnknownRequest(RequestError):
    """No request of that name is in the scheduler."""


class DuplicateRequest(RequestError):
    """A request of that name is in the scheduler already."""


class NeverFits(RequestError):
    """A request that could not run to its end even with the whole pool for itself."""


class TokenOutOfRange(RequestError):
    """A token that the model's vocabulary does not have."""


class Status(StrEnum):
    """Where a request stands. Preempted ones wait like others, with their outputs kept."""

    NEW = "new"  # not added yet
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False)
class Request(Sequence):
    """A Sequence with its place in line and its counters.

    order             the how-many-th request this was; kept over preemption, breaks ties
    num_hit_tokens         tokens of the prompt that another request had computed
    num_dropped_tokens     tokens computed and then lost to preemptions
    num_recomputed_tokens  tokens computed a second time (or a third)
    num_resumed_tokens     tokens that a preempted request found again in the prefix cache
    num_draft_tokens, num_accepted_tokens   guesses verified, guesses that were right
    num_skips         requests that were admitted past this one while it was first in line
    head_delay        steps that this request spent first in the waiting line
    first_step, finish_step   steps of the first output and of the last
    """

    order: int = field(init=False, default=0)
    high_water: int = field(init=False, default=0)  # most tokens ever computed
    num_hit_tokens: int = field(init=False, default=0)
    num_dropped_tokens: int = field(init=False, default=0)
    num_recomputed_tokens: int = field(init=False, default=0)
    num_resumed_tokens: int = field(init=False, default=0)
    num_draft_tokens: int = field(init=False, default=0)
    num_accepted_tokens: int = field(init=False, default=0)
    num_skips: int = field(init=False, default=0)
    head_delay: int = field(init=False, default=0)
    added_step: int = field(init=False, default=0)
    first_step: int | None = field(init=False, default=None)
    finish_step: int | None = field(init=False, default=None)
    finish_reason: str | None = field(init=False, default=None)

    @property
    def max_computed_tokens(self) -> int:
        """Positions that a full run writes: prompt + outputs - 1.

        The last sampled token is never fed back, so it needs no K and V.
        """
        return self.num_prompt_tokens + self.max_new_tokens - 1

    @property
    def num_outputs_left(self) -> int:
        return self.max_new_tokens - self.num_output_tokens

    def accept_outputs(self, token_ids: list[int], step: int) -> list[int]:
        """Append sampled tokens up to a stop token or the limit; returns those that were kept."""
        kept = []
        for token_id in token_ids:
            self.append(token_id)
            kept.append(token_id)
            self.first_step = step if self.first_step is None else self.first_step
            if token_id in self.stop_token_ids:
                self.finish_reason = "stop"
            elif self.num_output_tokens >= self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return kept


def check_tokens(token_ids: Iterable[int], vocab_size: int, what: str = "prompt") -> None:
    """Raise TokenOutOfRange unless every token is a whole number from 0 to vocab_size - 1."""
    for index, token in enumerate(token_ids):
        if not (is_whole(token, 0) and token < vocab_size):
            raise TokenOutOfRange(
                f"{what} token {index} is {token!r}; expected a whole number from 0 to "
                f"{vocab_size - 1}: was it made with this model's tokenizer?"
            )


def token_list(prompt: object) -> list[int]:
    """A prompt as a list of its own. Raises RequestError for what is no row of tokens."""
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor, an array
    if isinstance(tokens, str | bytes | Mapping | Set) or not isinstance(tokens, Iterable):
        raise RequestError(
            f"the prompt is {prompt!r:.80}; expected a list of token ids: encode text first, and "
            f"give generate() a list of prompts, even for one"
        )
    return list(tokens)
