"""Left-padded batches: each row as if alone, also where it reaches the context length."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_spec

from kvlab.faults.checks import watch_positions
from kvlab.generate import PromptTooLong, cached_generate
from kvlab.model import Decoder
from kvlab.padding import left_pad, padded_generate

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
    with pytest.raises(PromptTooLong, match="expected"):
        padded_generate(MODEL, prompts, 3)


def test_left_pad_wants_a_prompt():
    assert left_pad([[1], [2, 3]])[1].tolist() == [[0, 1], [1, 1]]
    with pytest.raises(PromptTooLong, match="expected at least one"):
        left_pad([])
