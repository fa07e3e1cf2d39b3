"""Exact accounting against torch's counter and against what is allocated; roofs and their units."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import tiny_spec

from bench import record
from bench.cases import count_operators
from kvlab import checkpoint, costs
from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.configs import hardware, preset
from kvlab.model import Decoder
from kvlab.notebook.cost_mistakes import CONTEXT, MISTAKES, right_answers
from kvlab.notebook.measure import count_flops, in_turns

GRIDS = {"tiny": lambda: Decoder.random(tiny_spec()), "checkpoint": lambda: checkpoint.load().model}


@pytest.fixture(scope="module", params=GRIDS)
def model(request):
    return GRIDS[request.param]()


def forward(model, num_new, cached, rows):
    """One forward of num_new tokens on a cache that holds `cached` (None: no cache)."""
    start = cached or 0
    ids = torch.arange(1, num_new + 1).view(1, -1)
    positions = torch.arange(start, start + num_new).view(1, -1)
    if cached is None:
        return lambda: model.forward(ids, positions, UncachedAttention(model.spec), rows)
    cache = ContiguousKVCache(model.spec, 1, cached + num_new, model.dtype)
    cache.length = cached  # as if so many had been written
    return lambda: model.forward(ids, positions, CachedAttention(model.spec, cache), rows)


@pytest.mark.parametrize(
    ("num_new", "cached", "rows"),
    [(24, 0, "last"), (5, 19, "last"), (1, 23, "last"), (24, None, None), (1, 0, "last")],
    ids=["prefill", "chunk", "cached step", "uncached step", "first token"],
)
def test_counted_flops_equal_exact_accounting_to_the_unit(model, num_new, cached, rows):
    counted = count_flops(forward(model, num_new, cached, rows))
    num_rows = num_new if rows is None else 1
    keys = num_new + (cached or 0)
    assert counted == costs.masked_forward_flops(model.spec, num_new, keys, num_rows)
    masked = num_new * keys - costs.causal_pairs(num_new, keys)
    wasted = costs.attention_flops(model.spec, masked)
    assert counted - wasted == costs.forward_flops(model.spec, num_new, keys, num_rows)


def test_a_cached_step_masks_nothing_and_costs_what_the_book_says():
    spec = preset("smollm2-135m")
    exact = costs.streamed_params(spec)
    for context in (1, 23, 2304):
        step = costs.forward_flops(spec, 1, context, 1)
        assert step == costs.cached_step_flops(spec, exact, context)
        assert step == costs.masked_forward_flops(spec, 1, context, 1)
        assert step == costs.batch_step_flops(spec, exact, 1, context)
    # the uncached step's closed form rounds the triangle s (s + 1) / 2 to s^2 / 2
    diagonal = costs.attention_flops(spec, 2304) // 2
    assert costs.forward_flops(spec, 2304, 2304, 2304) - diagonal == costs.uncached_step_flops(
        spec, exact, 2304
    )


def test_streamed_bytes_are_the_bytes_of_the_matrices_held(model):
    matrices = [model.lm_head]
    for layer in model.layers:
        matrices += [layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj]
    held = sum(matrix.nbytes for matrix in matrices)
    streamed = costs.streamed_params(model.spec)
    assert held == costs.weight_bytes(streamed, model.dtype.itemsize)
    cache = ContiguousKVCache(model.spec, 1, 24, model.dtype)
    cache.length = 24  # as if so many had been written
    read = sum(t.numel() * t.element_size() for i in range(len(cache.keys)) for t in cache.read(i))
    total = costs.cached_step_bytes(model.spec, streamed, 24, model.dtype.itemsize)
    assert held + read == total
    assert costs.batch_step_bytes(model.spec, streamed, 1, 24, model.dtype.itemsize) == total


def test_running_example_intensity_and_floor():
    spec, card = preset("llama-3-8b"), hardware("h100-sxm")
    flops = costs.batch_step_flops(spec, 8_030_000_000, 1, 2304)
    moved = costs.batch_step_bytes(spec, 8_030_000_000, 1, 2304)
    assert costs.intensity(flops, moved) == pytest.approx(1.055, abs=5e-4)
    bandwidth, peak = card.bandwidth_bytes_per_second, card.peak_flops_per_second["bf16"]
    seconds = costs.roofline_seconds(flops, moved, peak, bandwidth)
    assert seconds == moved / bandwidth == pytest.approx(4.884e-3, rel=1e-3)
    assert costs.ridge_intensity(peak, bandwidth) == pytest.approx(295.3, abs=0.1)


def test_roofline_is_the_lower_of_two_roofs_and_meets_at_the_ridge():
    peak, bandwidth = 1e12, 1e10
    ridge = costs.ridge_intensity(peak, bandwidth)
    for intensity, rate in ((ridge / 4, peak / 4), (ridge, peak), (4 * ridge, peak)):
        seconds = costs.roofline_seconds(1e12, 1e12 / intensity, peak, bandwidth)
        assert 1e12 / seconds == pytest.approx(rate)


def test_cost_07_times_are_seconds_and_a_roofline_is_not_off_by_a_thousand():
    arithmetic = costs.compute_seconds(65_536, 838e12)
    bytes_ = costs.memory_seconds(2048 * 8 * 128 * 2, 1.8e12)
    assert arithmetic * 1e6 == pytest.approx(7.82e-5, rel=1e-3)
    assert bytes_ * 1e6 == pytest.approx(2.33, rel=1e-3)
    assert bytes_ / arithmetic == pytest.approx(2.98e4, rel=1e-2)


def test_kv_overtakes_weights_where_the_bytes_are_equal():
    spec = preset("llama-3-8b")
    tokens = costs.kv_weight_crossover_tokens(spec, 8_030_000_000)
    batch, context = 32, tokens / 32
    weights = costs.weight_bytes(8_030_000_000)
    total = costs.batch_step_bytes(spec, 8_030_000_000, batch, context)
    assert total == pytest.approx(2 * weights)
    assert costs.intensity_limit(spec, 8_030_000_000, 2304) == pytest.approx(
        costs.intensity(
            costs.batch_step_flops(spec, 8_030_000_000, 10**9, 2304),
            costs.batch_step_bytes(spec, 8_030_000_000, 10**9, 2304),
        ),
        rel=1e-6,
    )


def test_tokens_per_verified_step_is_the_sum_of_its_series():
    for acceptance in (0.3, 0.8):
        for drafts in (1, 4):
            series = sum(acceptance**i for i in range(drafts + 1))
            value = costs.tokens_per_verified_step(acceptance, drafts)
            assert math.isclose(value, series)


def test_operators_of_a_step_do_not_grow_with_the_context():
    model = Decoder.random(tiny_spec())
    assert count_operators(forward(model, 1, 8, "last")) == count_operators(
        forward(model, 1, 90, "last")
    )


def test_in_turns_alternates_and_drops_the_warm_up():
    order = []
    samples = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, 1)
    assert order == ["a", "b"] * 4
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert record.ratios({"x": [2.0, 9.0, 4.0], "y": [1.0, 1.0, 2.0]}, "y")["x"] == 2.0


@pytest.mark.parametrize(
    "name",
    ["h100-sxm", "h100-pcie", "h200-sxm", "a100-40gb", "a100-80gb", "l4", "t4", "rtx-4090"],
)
def test_hardware_facts_are_in_base_units_and_name_their_source(name):
    card = hardware(name)
    assert 1e11 < card.bandwidth_bytes_per_second < 1e13
    assert 1.6e10 <= card.memory_bytes < 2e11
    # a driver keeps some of a "GB" card for itself, or a GB is a GiB there: within 10 %
    assert card.driver_memory_bytes == pytest.approx(card.memory_bytes, rel=0.1)
    for dtype, peak in card.peak_flops_per_second.items():
        assert dtype in ("fp32", "fp16", "bf16", "fp8") and 1e12 < peak < 1e16
    assert len(card.source) > 20
    assert ("bf16" in card.peak_flops_per_second) == (float(card.compute_capability) >= 8)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_cost_09_and_10_accounting_mistakes_differ_from_what_is_counted_and_held(mistake):
    """Each wrong formula parts from the right one, and the right one is what torch does."""
    spec = tiny_spec()
    right = right_answers(spec)[mistake.quantity]
    assert mistake.compute(spec) != right
    model = Decoder.random(spec)
    cache = ContiguousKVCache(spec, 1, CONTEXT, torch.bfloat16)
    masked = costs.attention_flops(spec, CONTEXT**2 - costs.causal_pairs(CONTEXT, CONTEXT))
    seen = {
        "FLOPs of a cached step": count_flops(forward(model, 1, CONTEXT - 1, "last")),
        "FLOPs of a prefill": count_flops(forward(model, CONTEXT, 0, "last")) - masked,
        "weights streamed": model.lm_head.numel()
        + sum(
            w.numel()
            for layer in model.layers
            for w in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        ),
        "KV bytes per token": cache.nbytes // CONTEXT,
    }
    assert seen[mistake.quantity] == right
