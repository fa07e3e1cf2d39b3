"""Left-padded batches: each row as if alone, also where it reaches the context length."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_spec

from kvlab.attention import UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.errors import RequestError
from kvlab.faults.detectors import watch_positions
from kvlab.generate import PaddedAttention, cached_generate, left_pad, padded_generate
from kvlab.model import Decoder
from kvlab.rope import next_positions, padded_positions

MODEL = Decoder.random(tiny_spec(max_position_embeddings=10), seed=4, dtype=torch.float64)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 10, [7]]


@pytest.mark.parametrize("outputs", [1, 2, 5, 6, 7, 8, 30])
def test_att_07_every_row_stops_at_the_context_length_as_it_would_alone(outputs):
    alone = [cached_generate(MODEL, prompt, outputs) for prompt in PROMPTS]
    with watch_positions():
        assert padded_generate(MODEL, PROMPTS, outputs) == alone
    assert [len(row) for row in alone] == [min(outputs, most) for most in (8, 6, 1, 10)]


def test_nothing_asked_for_gives_nothing():
    assert padded_generate(MODEL, PROMPTS, 0) == [[], [], [], []]


@pytest.mark.parametrize("prompts", [[], [[1], []], [[1], [2] * 11]])
def test_prompts_that_make_no_batch_are_named(prompts):
    with pytest.raises(RequestError, match="expected"):
        padded_generate(MODEL, prompts, 3)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4])
def test_pos_21_a_window_counts_positions_and_not_columns(window):
    """Right padding, so that padded columns lie between a row's own tokens."""
    spec = tiny_spec(window=window)
    model = Decoder.random(spec, seed=4, dtype=torch.float64)
    prompts, mask = [[1, 2, 3], [4, 5, 6, 7, 8]], torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    cache = ContiguousKVCache(spec, 2, 6, torch.float64)
    attend = PaddedAttention(spec, cache, mask)
    ids = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])
    model.forward(ids, padded_positions(mask), attend)
    cache.advance(5)
    attend.mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
    logits = model.forward(torch.tensor([[9], [9]]), next_positions(mask), attend, rows="last")
    for row, prompt in zip(logits.view(2, -1), prompts, strict=True):
        tokens = torch.tensor([[*prompt, 9]])
        positions = torch.arange(tokens.shape[1])[None]
        alone = model.forward(tokens, positions, UncachedAttention(spec), rows="last")
        torch.testing.assert_close(row, alone.flatten(), atol=1e-10, rtol=0)


def test_left_pad_wants_a_prompt():
    assert left_pad([[1], [2, 3]])[1].tolist() == [[0, 1], [1, 1]]
    with pytest.raises(RequestError, match="expected at least one"):
        left_pad([])
