"""What an engine refuses before a request ever stands in line, or before there is an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from kvlab.policy import SchedulerConfig, SchedulerConfigError
from kvlab.request import RequestError, TokenOutOfRange, check_tokens, token_list
from kvlab.sampling import SamplingParams
from kvlab.specs import ModelSpec

__all__ = [
    "TokenOutOfRange",
    "check_fields",
    "check_tokens",
    "one_for_each",
    "prompt_list",
    "stop_tokens",
    "token_list",
    "within_context",
]


def prompt_list(prompts: object) -> list:
    """Prompts as a list of their own. Raises RequestError for what is no row of prompts."""
    if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
        raise RequestError(f"the prompts are {prompts!r}; expected a list of lists of token ids")
    return list(prompts)


def stop_tokens(eos: int | Collection[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The ids that end every request: none, one or several (as some configs list them).

    Raises TokenOutOfRange for one that the model can never sample: nothing would ever stop.
    """
    if eos is None:
        return ()
    stops = tuple(eos) if isinstance(eos, Collection) else (eos,)
    check_tokens(stops, vocab_size, "eos_token_id:")
    return stops


def within_context(config: SchedulerConfig, spec: ModelSpec) -> SchedulerConfig:
    """The settings with the model's own context length where they give none.

    Raises SchedulerConfigError where requests could grow past the positions that a model has.
    """
    asked, limit = config.max_model_len, spec.max_position_embeddings
    if asked is None:
        return replace(config, max_model_len=limit)
    if limit is not None and asked > limit:
        raise SchedulerConfigError(
            f"max_model_len={asked}; expected at most {limit}, the context length of {spec.name}: "
            f"its positions end there. Leave max_model_len out, or make it smaller"
        )
    return config


def check_fields(
    request_id: object,
    sampling: object,
    stops: Sequence[int],
    adapter: object,
    salt: object,
    vocab_size: int,
) -> None:
    """Raise RequestError for a setting that would only fail in a later step, and for everybody."""
    named = {"request_id": request_id, "adapter": adapter, "cache_salt": salt}
    for name, value in named.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name}={value!r}; expected text, or None")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling={sampling!r}; expected SamplingParams(...), or None: greedy")
    if not isinstance(stops, Collection):
        raise RequestError(f"stop_token_ids={stops!r}; expected a list of token ids")
    check_tokens(stops, vocab_size, "stop_token_ids:")


def one_for_each(value: Any, count: int) -> list:
    """A setting for each of `count` prompts: the given ones, or one value for all."""
    if isinstance(value, Sequence):
        if len(value) != count:
            raise RequestError(f"{len(value)} settings for {count} prompts; give one, or one each")
        return list(value)
    return [value] * count
