"""The scheduler's choices: limits, and the policies that the chapter compares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvlab.blocks import is_whole
from kvlab.errors import KvlabError


class SchedulerConfigError(KvlabError):
    """Settings that no scheduler can work with."""


class Admission(StrEnum):
    """When may a waiting prompt start?

    FIRST_CHUNK   as soon as its first chunk has blocks; it may run out half way and be preempted
    FULL_LENGTH   once there are blocks for all its tokens, those promised to others not counted
    """

    FIRST_CHUNK = "first_chunk"
    FULL_LENGTH = "full_length"


class HeadOfLine(StrEnum):
    """What happens behind a waiting request that does not fit?

    STRICT   nobody passes
    SKIP     lighter ones pass, up to max_head_skips times
    """

    STRICT = "strict"
    SKIP = "skip"


class Order(StrEnum):
    """Who is served first and preempted last: first come, or smallest priority number."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies of one scheduler; bad ones raise SchedulerConfigError.

    max_num_batched_tokens        token budget of a step, over all requests
    max_num_seqs                  requests running at once
    long_prefill_token_threshold  most tokens of one prompt in one step; 0 is off
    enable_chunked_prefill        False: a prompt runs whole or not at all
    max_model_len                 positions the model has; None: no limit
    max_head_skips                under SKIP, how often one waiting request may be passed
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    max_model_len: int | None = None
    admission: Admission = Admission.FIRST_CHUNK
    head_of_line: HeadOfLine = HeadOfLine.STRICT
    order: Order = Order.FCFS
    max_head_skips: int = 64

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_head_skips"):
            self._require_whole(name, 1)
        self._require_whole("long_prefill_token_threshold", 0)
        if self.max_model_len is not None:
            self._require_whole("max_model_len", 1)
        if not isinstance(self.enable_chunked_prefill, bool):
            raise SchedulerConfigError(
                f"enable_chunked_prefill={self.enable_chunked_prefill!r}; expected True or False"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise SchedulerConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts "
                f"into chunks, but enable_chunked_prefill is False; set the threshold to 0 or "
                f"switch chunking on"
            )
        for name, kind in (
            ("admission", Admission),
            ("head_of_line", HeadOfLine),
            ("order", Order),
        ):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                raise SchedulerConfigError(
                    f"{name}={getattr(self, name)!r}; expected one of "
                    f"{[choice.value for choice in kind]}"
                ) from None

    def _require_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not is_whole(value, least):
            raise SchedulerConfigError(
                f"{name}={value!r}; expected a whole number, {least} or more"
            )
