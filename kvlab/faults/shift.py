"""The drift laboratory: decode positions moved by any offset, in all layers or in one.

    prompt        positions 0 .. p-1           as they should be
    decode step t position  p + t - 1 + offset

Both runs are fed the same text, so one causal forward over everything gives all steps of a
cached run at once: a cached key is the key that this forward computes. tests/test_drift.py
holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from kvlab.attention import UncachedAttention
from kvlab.faults.drift import Drift, checkpoint, compare, right_logits, text_ids
from kvlab.faults.seams import replaced
from kvlab.model import Decoder, DecoderLayer


@contextmanager
def rotated_elsewhere(model: Decoder, positions: torch.Tensor, layer: int) -> Iterator[None]:
    """Inside, one layer of the decoder turns q and k by `positions`, the others by their own."""
    cos, sin = model.rope.rows(positions)

    def forward(original, self, index, hidden, lead, own_cos, own_sin, attend):
        if index == layer:
            own_cos, own_sin = cos, sin
        return original(self, index, hidden, lead, own_cos, own_sin, attend)

    with replaced(DecoderLayer, "forward", forward):
        yield


@torch.inference_mode()
def shifted_logits(
    model: Decoder,
    token_ids: tuple[int, ...],
    prompt_len: int,
    offset: int,
    layer: int | None = None,
) -> torch.Tensor:
    """Logits [steps, vocab] of a run whose decode positions are moved by offset.

    layer  the only layer that is moved, or None for all of them
    """
    right = torch.arange(len(token_ids))[None]
    moved = torch.where(right < prompt_len, right, right + offset)
    tokens, rows = torch.tensor([list(token_ids)]), torch.arange(prompt_len - 1, len(token_ids))
    attend = UncachedAttention(model.spec)
    if layer is None:
        return model.forward(tokens, moved, attend, rows=rows)
    with rotated_elsewhere(model, moved, layer):
        return model.forward(tokens, right, attend, rows=rows)


def shifted_drift(
    offset: int, layer: int | None = None, prompt_len: int = 64, num_steps: int = 64
) -> Drift:
    """Drift of the checkpoint when decode positions are moved by offset. Step 0 is the prompt's."""
    total = prompt_len + num_steps
    ids = text_ids()[: total + 1]
    now = shifted_logits(checkpoint().model, ids[:total], prompt_len, offset, layer)
    return compare(_right(prompt_len, total), now, ids[prompt_len:])


@lru_cache(maxsize=2)
def _right(prompt_len: int, total: int) -> torch.Tensor:
    return right_logits(checkpoint().model, text_ids()[:total], prompt_len)
