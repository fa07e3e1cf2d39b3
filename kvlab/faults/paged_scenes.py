"""Small scenes over a paged cache: the shortest life of requests in which a fault shows.

Each takes a model and returns logits [rows, vocab] of the tokens that would suffer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from kvlab.errors import OutOfBlocks
from kvlab.faults.drift import checkpoint, compare, text_ids
from kvlab.faults.seams import suspended
from kvlab.generate import PagedDecoder
from kvlab.model import Decoder

#: A scene: (model, token ids to take prompts from) -> logits [rows, vocab]
Scene = Callable[..., torch.Tensor]


def _ids(model: Decoder, start: int, stop: int) -> list[int]:
    """Real text for the checkpoint, some numbers for a tiny model."""
    if model.spec.vocab_size > 1000:
        return list(text_ids()[start:stop])
    return [(7 * i + i // 5) % min(50, model.spec.vocab_size) for i in range(start, stop)]


def sharer_outlives_owner(model: Decoder) -> torch.Tensor:
    """B shares A's blocks; A ends; C arrives and must wait for room; B goes on."""
    decoder = PagedDecoder(model, 8, 4)
    first, second = decoder.sequence(_ids(model, 0, 13)), decoder.sequence(_ids(model, 0, 14))
    decoder.prefill(first)
    decoder.prefill(second)
    decoder.manager.release(first)
    with suppress(OutOfBlocks):  # 3 blocks are free, C needs 6
        decoder.prefill(decoder.sequence(_ids(model, 40, 64)))
    rows = []
    for token in _ids(model, 14, 16):
        second.append(token)
        rows.append(decoder.forward([(second, 1)])[-1])
    return torch.stack(rows)


def twins(model: Decoder) -> torch.Tensor:
    """Two equal prompts in one step: the last row of each."""
    decoder = PagedDecoder(model, 24, 4)
    pair = [decoder.sequence(_ids(model, 0, 14)) for _ in range(2)]
    work = []
    for seq in pair:  # as a scheduler does: look up and make room for all, then run
        num_new = seq.num_tokens - decoder.manager.match_prefix(seq).num_tokens
        decoder.cache.copy_blocks(decoder.manager.start(seq, num_new))
        work.append((seq, num_new))
    return decoder.forward(list(reversed(work)))  # the reader's row comes before the writer's


def reused_block(model: Decoder) -> torch.Tensor:
    """X, then Y in the same four blocks, then X again."""
    decoder = PagedDecoder(model, 5, 4)
    decoder.generate(_ids(model, 0, 13), 1)
    decoder.generate(_ids(model, 40, 56), 1)
    return decoder.prefill(decoder.sequence(_ids(model, 0, 13)))[None]


def forks(model: Decoder) -> torch.Tensor:
    """Two copies of one sequence go on with different tokens."""
    decoder = PagedDecoder(model, 16, 4)
    parent = decoder.sequence(_ids(model, 0, 7))
    decoder.prefill(parent)
    child = decoder.manager.fork(parent, "fork")
    rows = []
    for ours, theirs in zip(_ids(model, 7, 10), _ids(model, 30, 33), strict=True):
        for seq, token in ((parent, ours), (child, theirs)):
            seq.append(token)
            rows.append(decoder.forward([(seq, 1)])[-1])
    return torch.stack(rows)


def small_blocks(model: Decoder) -> torch.Tensor:
    """A prompt and three decode steps over blocks of 8."""
    decoder = PagedDecoder(model, 40, 8)
    seq = decoder.sequence(_ids(model, 0, 20))
    rows = [decoder.prefill(seq)]
    for token in _ids(model, 20, 23):
        seq.append(token)
        rows.append(decoder.forward([(seq, 1)])[-1])
    return torch.stack(rows)


def kl_of(scene: Scene) -> Callable[[], float]:
    """measure(): KL of the scene on the checkpoint, as it is now against as it should be."""

    def measure() -> float:
        model = checkpoint().model
        with suspended():
            right = scene(model)
        now = scene(model)
        return compare(right, now, right.argmax(-1).tolist()).mean_kl

    return measure
