"""How far a fault carries the real checkpoint away: KL, perplexity, first differing token.

Two runs are fed the same tokens, so that step t compares two next-token distributions after
the same text:

    right   one uncached forward over everything, with every fault suspended
    now     the cached loop as it is, with whatever faults are on

    KL(right || now) = sum over the vocabulary of p (ln p - ln q), in nats; 0 when they agree

The second half moves decode positions by any offset, in all layers or in one:

    prompt        positions 0 .. p-1           as they should be
    decode step t position  p + t - 1 + offset
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch

from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.checkpoint import Checkpoint, load
from kvlab.faults.registry import FaultError, replaced_places, suspended
from kvlab.model import Decoder
from kvlab.rope import RopeTable, apply_rope
from kvlab.specs import DATA_DIR, RopeSpec

#: What the drift laboratory reads. About 500 tokens.
TEXT = (DATA_DIR / "drift_text.md").read_text("utf-8").rstrip("\n")


@cache
def checkpoint() -> Checkpoint:
    """The checkpoint in float32, loaded once for all measurements."""
    return load(device="cpu", dtype=torch.float32)


@cache
def text_ids() -> tuple[int, ...]:
    """Token ids of TEXT."""
    return tuple(checkpoint().encode(TEXT))


@cache
def redeclared(
    model: Decoder, *, rope: RopeSpec | None = None, window: int | None = None
) -> Decoder:
    """The same weights as if the config declared other rotary settings, or a sliding window."""
    other = copy.copy(model)
    if rope is not None:
        other.spec = replace(model.spec, rope=rope)
        other.rope = RopeTable(rope, model.spec.max_position_embeddings, model.device)
    if window is not None:
        layers = (replace(each, kind="sliding", window=window) for each in model.spec.layers)
        other.spec = replace(other.spec, layers=tuple(layers))
    return other


class ChangedAttend:
    """An `attend` that changes what it is given and hands it on; it has the cache of the other.

    change(layer, query, key, value) -> (query, key, value)
    """

    def __init__(self, attend: Any, change: Callable) -> None:
        self.attend, self.change = attend, change
        self.cache = getattr(attend, "cache", None)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return self.attend(layer, *self.change(layer, query, key, value))


@torch.inference_mode()
def cached_logits(
    model: Decoder,
    token_ids: Sequence[int],
    prompt_len: int,
    *,
    chunk_size: int | None = None,
    kv_cache: ContiguousKVCache | None = None,
    slack: int = 0,
) -> torch.Tensor:
    """The cached loop fed token_ids: logits [steps, vocab] after the prompt and each later token.

    chunk_size  prompt tokens per forward; all at once by default
    kv_cache    one to go on with; a fresh one by default
    slack       rows allocated beyond what is needed
    """
    total = len(token_ids)
    if kv_cache is None:
        kv_cache = ContiguousKVCache(model.spec, 1, total + slack, model.dtype)
    attend = CachedAttention(model.spec, kv_cache)
    tokens, rows, start = torch.tensor([list(token_ids)]), [], 0
    while start < total:
        size = min(chunk_size or prompt_len, prompt_len - start) if start < prompt_len else 1
        stop = start + size
        logits = model.forward(
            tokens[:, start:stop], torch.arange(start, stop)[None], attend, rows="last"
        )
        kv_cache.advance(size)
        start = stop
        if stop >= prompt_len:
            rows.append(logits.reshape(-1))
    return torch.stack(rows)


@torch.inference_mode()
def uncached_logits(
    model: Decoder,
    token_ids: Sequence[int],
    prompt_len: int,
    *,
    positions: torch.Tensor | None = None,
    attend: Callable | None = None,
) -> torch.Tensor:
    """The same rows from one causal forward over everything, under whatever faults are on."""
    if positions is None:
        positions = torch.arange(len(token_ids))[None]
    return model.forward(
        torch.tensor([list(token_ids)]),
        positions,
        attend or UncachedAttention(model.spec),
        rows=torch.arange(prompt_len - 1, len(token_ids)),
    )


@lru_cache(maxsize=8)
def right_logits(model: Decoder, token_ids: tuple[int, ...], prompt_len: int) -> torch.Tensor:
    """uncached_logits, whatever faults are on outside."""
    with suspended():
        return uncached_logits(model, token_ids, prompt_len)


@dataclass(frozen=True)
class Drift:
    """One run set beside the right one, step by step. Step 0 is the end of the prompt.

    kl               KL(right || now) per step, nats
    perplexity       of the text that follows, as this run sees it
    right_perplexity the same for the right run
    first_differing  the first step whose most likely token differs, or None
    """

    kl: tuple[float, ...]
    perplexity: float
    right_perplexity: float
    first_differing: int | None

    @property
    def mean_kl(self) -> float:
        """Average over the steps, nats per token."""
        return sum(self.kl) / len(self.kl)


def compare(right: torch.Tensor, now: torch.Tensor, following: Sequence[int]) -> Drift:
    """Drift between two [steps, vocab] logits.

    following  the token that really comes after each step, [steps] or one fewer
    """
    log_p, log_q = right.double().log_softmax(-1), now.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    targets = torch.tensor(list(following))[:, None]
    rows = slice(0, len(targets))
    differing = (right.argmax(-1) != now.argmax(-1)).nonzero()
    return Drift(
        kl=tuple(kl.tolist()),
        perplexity=math.exp(-log_q[rows].gather(1, targets).mean()),
        right_perplexity=math.exp(-log_p[rows].gather(1, targets).mean()),
        first_differing=int(differing[0]) if len(differing) else None,
    )


_quiet: dict[tuple, Drift] = {}  # runs with nothing switched on: they always come out the same


def drift(
    model: Decoder | None = None, prompt_len: int = 48, num_steps: int = 16, **options: Any
) -> Drift:
    """The cached loop over the laboratory's text, under whatever faults are on right now.

    model    the checkpoint by default, or what redeclared() makes of it
    options  chunk_size, slack: see cached_logits
    """
    model = model or checkpoint().model
    total = prompt_len + num_steps
    ids = text_ids()[: total + 1]
    if len(ids) < total + 1:
        raise FaultError(
            f"the text has {len(text_ids())} tokens, {total + 1} were asked for: take a shorter "
            "prompt or fewer steps"
        )
    key = (model.spec, prompt_len, total, *sorted(options.items()))
    if not replaced_places() and key in _quiet:
        return _quiet[key]
    now = cached_logits(model, ids[:total], prompt_len, **options)
    result = compare(right_logits(model, ids[:total], prompt_len), now, ids[prompt_len:])
    if not replaced_places():
        _quiet[key] = result
    return result


def mean_kl(
    rope: RopeSpec | None = None, window: int | None = None, **options: Any
) -> Callable[[], float]:
    """measure(): mean KL of drift(**options), as if the checkpoint declared this rope or window."""

    def measure() -> float:
        model = redeclared(checkpoint().model, rope=rope, window=window)
        return drift(model, **options).mean_kl

    return measure


# --- decode positions moved by an offset ------------------------------------------------------


def shifted_logits(
    model: Decoder,
    token_ids: tuple[int, ...],
    prompt_len: int,
    offset: int,
    layer: int | None = None,
) -> torch.Tensor:
    """Logits [steps, vocab] of a run whose decode positions are moved by offset.

    layer  the only layer that is moved, or None for all of them

    One causal forward gives all steps of a cached run at once: a cached key is the key that this
    forward computes. tests/test_drift.py holds the two against each other.
    """
    right = torch.arange(len(token_ids))[None]
    moved = torch.where(right < prompt_len, right, right + offset)
    if layer is None:
        return uncached_logits(model, token_ids, prompt_len, positions=moved)
    cos, sin = model.rope.rows(moved - right)  # rotations add up

    def turned_on(index, query, key, value):
        if index == layer:
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        return query, key, value

    attend = ChangedAttend(UncachedAttention(model.spec), turned_on)
    return uncached_logits(model, token_ids, prompt_len, attend=attend)


def shifted_drift(
    offset: int, layer: int | None = None, prompt_len: int = 64, num_steps: int = 64
) -> Drift:
    """Drift of the checkpoint when decode positions are moved by offset. Step 0 is the prompt's."""
    total, model = prompt_len + num_steps, checkpoint().model
    ids = text_ids()[: total + 1]
    now = shifted_logits(model, ids[:total], prompt_len, offset, layer)
    return compare(right_logits(model, ids[:total], prompt_len), now, ids[prompt_len:])
