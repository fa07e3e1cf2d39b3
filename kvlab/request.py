"""One request: its tokens, how many of them have K and V in the cache, and where.

Three counters say everything:

    num_tokens            tokens known: the prompt, then every sampled token
    num_computed_tokens   tokens whose K and V are in the cache, for every layer
    len(block_table)      blocks held; block_table[i] holds positions [i * bs, (i + 1) * bs)

While a request decodes, num_computed_tokens is num_tokens - 1: the newest token was sampled and
not yet fed to the model, so it has no K and V. The token list is the only record of what a
request has been given; nothing beside it has to be kept in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kvlab.blocks import PrefixKey
from kvlab.errors import RequestError, whole


def token_row(tokens: object, what: str = "prompt") -> list[int]:
    """tokens as a list of Python's own whole numbers: those of arrays and tensors hash apart.

    Raises RequestError for what is no row of token ids.
    """
    row = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(row, str | bytes | Mapping | Set) or not isinstance(row, Iterable):
        raise RequestError(
            f"{what}: {tokens!r:.80} given; expected a list of token ids: encode text first, and "
            f"give generate() a list of prompts, even for one"
        )
    return [whole(f"{what} token {place}", token) for place, token in enumerate(row)]


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, what: str = "prompt") -> None:
    """Raise RequestError unless every token is one of the model's, 0 to vocab_size - 1."""
    for place, token in enumerate(token_ids):
        if token >= vocab_size:
            raise RequestError(
                f"{what} token {place} is {token!r}; expected a whole number from 0 to "
                f"{vocab_size - 1}: was it made with this model's tokenizer?"
            )


def _is_tag(tag: object) -> bool:
    """(kind, name), or (kind, name, first position, length)?"""
    if not isinstance(tag, tuple | list) or len(tag) not in (2, 4):
        return False
    kinds = (str, str, int, int)
    return all(map(isinstance, tag, kinds)) and min(tag[2:], default=0) >= 0


class Status(StrEnum):
    """Where a request stands. Preempted ones wait like others, with their outputs kept."""

    NEW = "new"  # not added yet
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False)
class Request:
    """A request's tokens, its place in line, and what happened to it.

    Given, and checked here (RequestError):
    request_id           any name; it appears in error messages
    prompt_token_ids     the prompt, at least one token (copied)
    max_new_tokens       outputs after which it ends
    stop_token_ids       outputs that end it earlier
    priority, arrival    place in line: the smaller, the sooner; of equals the one added first
    sampling             how its tokens are chosen, see kvlab.sampling
    tags                 what K and V depend on besides tokens, see kvlab.tables.tags_between
    prompt_logprobs      True: logits of every prompt position are wanted, so cached blocks of the
                         prompt must not be read (a skipped position has no logits)

    Filled in by BlockManager (kvlab.tables): block_table, num_computed_tokens, block_keys,
    num_published_blocks, num_found_tokens (in the cache when it started), num_preemptions.

    Filled in by the scheduler: status, order (the how-many-th request this was),
    draft_token_ids, num_placeholders, finish_reason ("stop", "length", "abort"), and
    first_token, last_token   clock readings in seconds
    high_water                most tokens ever computed
    num_cached_tokens         tokens of the prompt that another request had computed
    num_resumed_tokens        tokens that it found of its own when it came back
    num_dropped_tokens        tokens computed and then lost to preemptions
    num_recomputed_tokens     tokens computed a second time (or a third)
    num_draft_tokens, num_accepted_tokens   guesses verified, guesses that were right
    num_skips                 requests admitted past this one while it was first in line
    head_delay                steps that it spent first in the waiting line
    added_step, first_step, finish_step   steps of the arrival, the first output and the last
    """

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    priority: float = 0
    arrival: float = 0.0
    sampling: Any = None
    tags: tuple[tuple, ...] = ()
    prompt_logprobs: bool = False

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    block_keys: list[PrefixKey] = field(init=False, default_factory=list)
    num_published_blocks: int = field(init=False, default=0)
    num_found_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)

    status: Status = field(init=False, default=Status.NEW)
    order: int = field(init=False, default=0)
    draft_token_ids: list[int] = field(init=False, default_factory=list)
    num_placeholders: int = field(init=False, default=0)
    finish_reason: str | None = field(init=False, default=None)
    first_token: float | None = field(init=False, default=None)
    last_token: float | None = field(init=False, default=None)
    high_water: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_resumed_tokens: int = field(init=False, default=0)
    num_dropped_tokens: int = field(init=False, default=0)
    num_recomputed_tokens: int = field(init=False, default=0)
    num_draft_tokens: int = field(init=False, default=0)
    num_accepted_tokens: int = field(init=False, default=0)
    num_skips: int = field(init=False, default=0)
    head_delay: int = field(init=False, default=0)
    added_step: int = field(init=False, default=0)
    first_step: int | None = field(init=False, default=None)
    finish_step: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        name = f"request {self.request_id!r}"
        self.prompt_token_ids = token_row(self.prompt_token_ids, f"{name}: prompt_token_ids")
        if not self.prompt_token_ids:
            raise RequestError(f"{name} has an empty prompt; give it at least one token")
        stops = token_row(self.stop_token_ids, f"{name}: stop_token_ids={self.stop_token_ids!r}")
        self.stop_token_ids = tuple(stops)
        self.max_new_tokens = whole(f"{name}: max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.tags, tuple | list) or not all(map(_is_tag, self.tags)):
            raise RequestError(
                f"{name}: tags={self.tags!r}; expected (kind, name) pairs of text, or (kind, name, "
                f"first position, length) for what lies at some positions only"
            )
        for place in ("priority", "arrival"):
            value = getattr(self, place)
            if not isinstance(value, int | float) or value != value:  # NaN is not itself
                raise RequestError(
                    f"{name}: {place}={value!r}, expected a number (the smaller, the sooner)"
                )
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    # -- counts -------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and outputs."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_outputs_left(self) -> int:
        return self.max_new_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still need a forward: 1 while decoding, the rest of the prompt before."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def max_computed_tokens(self) -> int:
        """Positions that a full run writes: prompt + outputs - 1.

        The last sampled token is never fed back, so it needs no K and V.
        """
        return self.num_prompt_tokens + self.max_new_tokens - 1

    # -- tokens -------------------------------------------------------------------------

    def append(self, token_id: int) -> None:
        """Add a sampled token. It has no K and V until the next forward."""
        self.token_ids.append(whole(f"token appended to {self!r}", token_id))

    def outputs_to_keep(self, token_ids: list[int]) -> tuple[list[int], str | None]:
        """(what is kept of newly sampled tokens, why the request ends there or None)."""
        kept = token_ids[: self.num_outputs_left]
        for place, token_id in enumerate(kept):
            if token_id in self.stop_token_ids:
                return kept[: place + 1], "stop"
        return kept, "length" if len(kept) == self.num_outputs_left else None

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. BlockManager.truncate_to() calls it."""
        del self.token_ids[num_tokens:]
        self.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        self.draft_token_ids = []

    def copy(self, request_id: str) -> Request:
        """The same tokens and counters under another name, with no blocks."""
        child = replace(self, request_id=request_id)
        child.token_ids = list(self.token_ids)
        child.block_keys = list(self.block_keys)
        for name in ("num_prompt_tokens", "num_computed_tokens", "num_found_tokens",
                     "num_published_blocks", "status"):  # fmt: skip
            setattr(child, name, getattr(self, name))
        return child

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.num_computed_tokens} of {self.num_tokens} "
            f"tokens computed, blocks {self.block_table})"
        )
