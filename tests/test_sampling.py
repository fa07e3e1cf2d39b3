"""Sampling: distributions by hand, verification of drafts, and named errors."""

from __future__ import annotations

import math

import pytest
import torch

from kvlab.errors import RequestError
from kvlab.sampling import Sampler, SamplingParams, Wanted, distribution

LOGITS = torch.tensor([0.0, math.log(2), math.log(4), math.log(1)])  # 1 : 2 : 4 : 1


def test_temperature_top_k_and_top_p_by_hand():
    assert distribution(LOGITS, SamplingParams(1.0)).tolist() == pytest.approx(
        [1 / 8, 2 / 8, 4 / 8, 1 / 8]
    )
    cool = distribution(LOGITS, SamplingParams(0.5))  # squares: 1 : 4 : 16 : 1
    assert cool.tolist() == pytest.approx([1 / 22, 4 / 22, 16 / 22, 1 / 22])
    two = distribution(LOGITS, SamplingParams(1.0, top_k=2))
    assert two.tolist() == pytest.approx([0, 2 / 6, 4 / 6, 0])
    assert distribution(LOGITS, SamplingParams(1.0, top_k=99)).sum() == pytest.approx(1)
    assert distribution(LOGITS, SamplingParams()).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (4, [0, 1, 3, 4])]
)
def test_top_k_keeps_k_tokens_of_equal_ones_the_smaller_ids(top_k, kept):
    logits = torch.tensor([1, 3, 0, 3, 3, 1], dtype=torch.bfloat16)
    probs = distribution(logits, SamplingParams(1.0, top_k))
    assert probs.nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.5, 1), (0.51, 2), (0.8, 3), (1.0, 4)])
def test_top_p_keeps_the_token_that_crosses_the_line(top_p, kept):
    probs = distribution(LOGITS, SamplingParams(1.0, top_p=top_p))
    assert int((probs > 0).sum()) == kept and float(probs.sum()) == pytest.approx(1)


def test_draws_follow_the_distribution():
    params, sampler, counts = SamplingParams(1.0, seed=5), Sampler(), torch.zeros(4)
    for i in range(4000):
        [token] = sampler.sample(LOGITS[None], [Wanted("a", params, (), i)])["a"]
        counts[token] += 1
    expected = 4000 * distribution(LOGITS, params).float()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, 0.1 %


def test_the_same_seed_draws_the_same_and_rows_do_not_mix():
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    one, two = SamplingParams(1.0, seed=1), SamplingParams(1.0, seed=2)
    wanted = [Wanted("a", one), Wanted("b", two), Wanted("c", SamplingParams())]
    together = Sampler().sample(rows, wanted)
    assert together["a"] == Sampler().sample(rows[:1], [Wanted("x", one)])["x"]
    assert together["b"] == Sampler().sample(rows[1:2], [Wanted("y", two)])["y"]
    sampler = Sampler()  # a name says nothing, and nothing is kept of an earlier request
    again = [sampler.sample(rows[:1], [Wanted("a", p)])["a"] for p in (two, one)]
    assert again[1] == together["a"]
    assert together["c"] == [int(rows[2].argmax())]


def test_drafts_are_verified_row_by_row_and_use_no_number_when_wrong():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(1.5, seed=9)
    plain, tokens = Sampler(), []
    for i, row in enumerate(rows):
        tokens += plain.sample(row[None], [Wanted("a", params, (), i)])["a"]
    right = Sampler().sample(rows, [Wanted("a", params, tokens[:3])])["a"]
    assert right == tokens
    wrong = [tokens[0], (tokens[1] + 1) % 50, tokens[2]]
    sampler = Sampler()
    for _ in range(2):  # a step that is done again draws the same
        assert sampler.sample(rows, [Wanted("a", params, wrong)])["a"] == tokens[:2]
    assert sampler.sample(rows[2:3], [Wanted("a", params, (), 2)])["a"] == tokens[2:3]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": True},
        {"seed": -1},
        {"seed": 1.5},
    ],
)
def test_parameters_that_mean_nothing_are_named(settings):
    with pytest.raises(RequestError, match=next(iter(settings))):
        SamplingParams(**settings)


@pytest.mark.parametrize("temperature", [1e-3, 1e-200, 1e-310, 5e-324])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature):
    probs = distribution(LOGITS * 1e4, SamplingParams(temperature))
    assert probs.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_that_do_not_fit_the_requests_are_named(num_rows):
    for params in (SamplingParams(), SamplingParams(1.0)):
        with pytest.raises(AssertionError, match=f"{num_rows} rows of logits for 2 wanted"):
            Sampler().sample(torch.zeros(num_rows, 4), [Wanted("a", params, (1,))])
