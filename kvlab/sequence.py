"""One request: its tokens, how many of them have K and V in the cache, and where.

A Sequence is bookkeeping and nothing else. Three counters say everything:

    num_tokens            tokens known: the prompt, then every sampled token
    num_computed_tokens   tokens whose K and V are in the cache, for every layer
    len(block_table)      blocks held; block_table[i] holds positions [i * bs, (i + 1) * bs)

While a request decodes, num_computed_tokens is num_tokens - 1: the newest token was sampled
and not yet fed to the model, so it has no K and V.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from operator import index

from kvlab.blocks import is_whole
from kvlab.errors import KvlabError
from kvlab.prefix import PrefixKey


class SequenceError(KvlabError):
    """A sequence was asked for something that its counters forbid."""


def all_are(values: Iterable[object], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def is_image(value: object) -> bool:
    """(content id, first position, number of positions)?"""
    return (
        isinstance(value, tuple | list)
        and len(value) == 3
        and isinstance(value[0], str)
        and is_whole(value[1], 0)
        and is_whole(value[2], 1)
    )


@dataclass(eq=False)
class Sequence:
    """A request's tokens and counters.

    request_id           any name; it appears in error messages
    prompt_token_ids     the prompt, at least one token (copied)
    max_new_tokens       outputs after which the scheduler stops the request
    stop_token_ids       outputs that stop the request earlier
    priority, arrival    used by the scheduler's policy: smaller goes first

    What must be equal, besides the tokens, before two requests may share K and V:
    adapter              name of the fine-tuned weights in use, or None
    cache_salt           a secret that keeps tenants apart, or None
    multimodal           (content id, first position, number of positions) of each image or sound
    prompt_logprobs      True: every prompt position's logits are wanted, so cached blocks of the
                         prompt must not be read (a skipped position has no logits)

    Filled in by BlockManager (block_tables.py): block_table, num_computed_tokens, block_keys,
    num_published_blocks, num_cached_tokens, num_preemptions. By the scheduler: status,
    draft_token_ids, num_placeholders.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival: float = 0.0
    adapter: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[tuple[str, int, int], ...] = ()
    prompt_logprobs: bool = False

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    block_keys: list[PrefixKey] = field(init=False, default_factory=list)
    num_published_blocks: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    status: str = field(init=False, default="new")
    draft_token_ids: list[int] = field(init=False, default_factory=list)
    num_placeholders: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.prompt_token_ids = self._whole_prompt()
        if not self.prompt_token_ids:
            raise SequenceError(
                f"request {self.request_id!r} has an empty prompt; give it at least one token"
            )
        self._check_fields()
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    def _whole_prompt(self) -> list[int]:
        """The prompt in Python's own numbers: arrays and tensors bring theirs, which hash apart."""
        prompt = self.prompt_token_ids
        try:
            if isinstance(prompt, bytes | Set | Mapping):
                raise TypeError
            return [index(token) for token in prompt]
        except TypeError:
            raise SequenceError(
                f"request {self.request_id!r} has {prompt!r:.80} for a prompt; expected token ids, "
                "whole numbers in a row: encode text first"
            ) from None

    def _check_fields(self) -> None:
        """What would only fail when somebody looks the prefix up, or at the first output."""
        stops, images = self.stop_token_ids, self.multimodal
        for name, is_good in (
            ("adapter", self.adapter is None or isinstance(self.adapter, str)),
            ("cache_salt", self.cache_salt is None or isinstance(self.cache_salt, str)),
            ("stop_token_ids", isinstance(stops, Collection) and all_are(stops, int)),
            ("multimodal", isinstance(images, tuple | list) and all(map(is_image, images))),
        ):
            if not is_good:
                raise SequenceError(
                    f"request {self.request_id!r}: {name}={getattr(self, name)!r}; expected text "
                    f"or None for a name, ids for stops, (name, first, length) for each image"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and outputs."""
        return len(self.token_ids)

    @property
    def num_tokens_with_drafts(self) -> int:
        """Tokens known, plus drafts to verify, plus outputs reserved but not sampled yet."""
        return self.num_tokens + len(self.draft_token_ids) + self.num_placeholders

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still need a forward: 1 while decoding, the rest of the prompt before."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def last_token_id(self) -> int:
        return self.token_ids[-1]

    def append(self, token_id: int) -> None:
        """Add a sampled token. It has no K and V until the next forward."""
        try:
            self.token_ids.append(index(token_id))
        except TypeError:
            raise SequenceError(f"{token_id!r} appended to {self!r}; expected a token id") from None

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. BlockManager.truncate_to() calls it."""
        del self.token_ids[num_tokens:]
        self.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        self.draft_token_ids = []

    def copy(self, request_id: str) -> Sequence:
        """The same tokens and counters under another name, with no blocks."""
        child = replace(self, request_id=request_id)
        child.token_ids = list(self.token_ids)
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.num_published_blocks = self.num_published_blocks
        child.block_keys = list(self.block_keys)
        child.status = self.status
        return child

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.num_computed_tokens} of {self.num_tokens} "
            f"tokens computed, blocks {self.block_table})"
        )
