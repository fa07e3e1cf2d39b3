"""What an engine refuses before a request ever stands in line."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvlab.request import RequestError
from kvlab.sampling import SamplingParams


class TokenOutOfRange(RequestError):
    """A prompt token that the model's vocabulary does not have."""


def check_tokens(prompt: Sequence[int], vocab_size: int) -> None:
    """Raise TokenOutOfRange unless every token is a whole number from 0 to vocab_size - 1."""
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise TokenOutOfRange(
                f"prompt token {index} is {token!r}; expected a whole number from 0 to "
                f"{vocab_size - 1}: was it made with this model's tokenizer?"
            )


def check_fields(
    request_id: object, sampling: object, stops: Sequence[int], adapter: object, salt: object
) -> None:
    """Raise RequestError for a setting that would only fail in a later step, and for everybody."""
    named = {"request_id": request_id, "adapter": adapter, "cache_salt": salt}
    for name, value in named.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name}={value!r}; expected text, or None")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling={sampling!r}; expected SamplingParams(...), or None: greedy")
    if not isinstance(stops, Collection) or not all(isinstance(stop, int) for stop in stops):
        raise RequestError(f"stop_token_ids={stops!r}; expected a list of token ids")


def one_for_each(value: Any, count: int) -> list:
    """A setting for each of `count` prompts: the given ones, or one value for all."""
    if isinstance(value, Sequence):
        if len(value) != count:
            raise RequestError(f"{len(value)} settings for {count} prompts; give one, or one each")
        return list(value)
    return [value] * count
