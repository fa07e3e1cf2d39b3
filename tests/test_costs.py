"""Every number of the running example comes out of costs, and closed forms equal brute force.

Expected values: published text on the Llama-3-8B example, recomputed; see book/references.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import costs
from kvlab.configs import preset
from kvlab.sheet import SheetError, accounting_parameters, cost_report

LLAMA = preset("llama-3-8b")
P = 8_030_000_000
PROMPT, DECODE = 2048, 512
GIB, MIB, KIB = 2**30, 2**20, 2**10


@pytest.fixture(scope="module")
def report():
    return cost_report(LLAMA, PROMPT, DECODE, params="8.03e9")


def test_parameters_of_the_running_example():
    attention = costs.qkv_params_per_layer(LLAMA) + costs.output_params_per_layer(LLAMA)
    assert attention == 41_943_040
    assert costs.mlp_params_per_layer(LLAMA) == 176_160_768
    assert attention + costs.mlp_params_per_layer(LLAMA) == 218_103_808
    assert costs.norm_params(LLAMA) == 266_240


def test_cost_10_embedding_is_gathered_and_a_tied_head_is_streamed_once():
    assert costs.streamed_params(LLAMA) == 7_504_658_432
    assert costs.resident_params(LLAMA) == 8_030_261_248
    assert costs.embedding_params(LLAMA) == 525_336_576
    tied = replace(
        LLAMA,
        num_layers=16,
        hidden_size=2048,
        head_dim=64,
        intermediate_size=8192,
        layers=LLAMA.layers[:16],
        tie_word_embeddings=True,
    )  # the shape of Llama-3.2-1B
    assert costs.embedding_params(tied) == 262_668_288
    assert costs.resident_params(tied) == 1_235_814_400
    assert costs.resident_params(tied) - costs.streamed_params(tied) == costs.norm_params(tied)


@pytest.mark.parametrize(
    ("params", "expected_mflop"),
    [
        (costs.qkv_params_per_layer(LLAMA), 50.3),
        (costs.output_params_per_layer(LLAMA), 33.6),
        (costs.mlp_params_per_layer(LLAMA), 352.3),
        (218_103_808, 436.2),
    ],
)
def test_projections_of_one_token_and_layer(params, expected_mflop):
    assert round(costs.projection_flops(params, 1) / 1e6, 1) == expected_mflop


def test_cost_of_the_run(report):
    assert report["uncached"]["projection_flops"] == pytest.approx(1.8949e16, rel=5e-5)
    assert report["cached"]["projection_flops"] == pytest.approx(8.2227e12, rel=5e-5)
    assert report["uncached"]["attention_flops"] == pytest.approx(7.1572e14, rel=5e-5)
    assert report["cached"]["attention_flops"] == pytest.approx(6.1861e11, rel=5e-5)
    assert report["uncached"]["total_flops"] == pytest.approx(1.96650e16, rel=5e-6)
    assert report["cached"]["total_flops"] == pytest.approx(8.84133e12, rel=5e-6)
    ratio = {k: report["uncached"][k] / report["cached"][k] for k in report["cached"]}
    assert round(ratio["projection_flops"], 1) == 2304.5
    assert round(ratio["attention_flops"], 1) == 1157.0
    assert round(report["ratio"], 1) == 2224.2
    assert round(100 * report["attention_share"], 2) == 7.00
    assert report["rows_discarded_last_step"] == 2559


def test_bytes_of_the_run(report):
    assert report["kv_bytes_per_token"] == 131_072 == 128 * KIB
    assert costs.layer_kv_bytes_per_token(LLAMA.layers[0]) == 4 * KIB
    assert report["kv_bytes_final"] == 320 * MIB == 335_544_320
    assert 32 * costs.kv_bytes(LLAMA, 2560) == 10 * GIB
    assert 64 * costs.kv_bytes(LLAMA, 8192) == 64 * GIB
    assert report["weight_bytes_per_step"] == 16.06e9
    assert round(report["weight_bytes_read"] / GIB, 1) == 7658.0
    assert round(report["kv_bytes_read"] / GIB, 2) == 144.03
    total = report["weight_bytes_read"] + report["kv_bytes_read"]
    assert round(100 * report["weight_bytes_read"] / total, 2) == 98.15
    assert round(report["floor_seconds"], 3) == 2.501
    assert round(1e3 * report["floor_seconds_per_step"], 3) == 4.884
    assert round(report["intensity_mid"], 3) == 1.055 and report["context_mid"] == 2304


def test_cost_01_cache_is_sized_from_kv_heads():
    """Llama-3-8B keeps 128 KiB a token, not the 512 KiB of its query heads; MQA would keep 16."""
    assert costs.kv_bytes_per_token(LLAMA) == 131_072
    by_query_heads = tuple(replace(layer, num_kv_heads=32) for layer in LLAMA.layers)
    assert costs.kv_bytes_per_token(replace(LLAMA, layers=by_query_heads)) == 524_288
    one_head = tuple(replace(layer, num_kv_heads=1) for layer in LLAMA.layers)
    assert costs.kv_bytes_per_token(replace(LLAMA, layers=one_head)) == 16 * KIB


def test_cost_06_fit_flips_with_the_unit_and_the_utilisation_decides():
    need = 64 * costs.kv_bytes(LLAMA, 8192) + costs.weight_bytes(P)
    driver = 81_559 * MIB  # what the driver reports for an 80 GB H100
    assert round(need / 1e9, 2) == 84.78 and round(need / GIB, 2) == 78.96
    assert need > 80e9
    assert need < driver
    left = 0.9 * driver - costs.weight_bytes(P)
    assert round(left / GIB, 1) == 56.7 and left < 64 * GIB
    assert int(left // costs.kv_bytes_per_token(LLAMA)) == 464_696


def test_cost_07_times_are_in_seconds():
    compute = costs.compute_seconds(65_536, 838e12)
    memory = costs.memory_seconds(2048 * 8 * 128 * 2, 1.8e12)
    assert compute * 1e6 == pytest.approx(7.82e-5, rel=1e-3)
    assert memory * 1e6 == pytest.approx(2.33, rel=1e-3)
    assert memory / compute == pytest.approx(2.98e4, rel=1e-3)


def test_cost_09_prefill_is_halved_decode_is_not():
    assert costs.causal_pairs(4, 4) == 10
    assert costs.causal_pairs(1, 4) == 4
    assert costs.attention_flops_per_pair(8, 8) == 4 * 8
    assert costs.attention_flops_per_pair(192, 128) == 640  # MLA: two widths, not 4 x 192


@given(st.integers(1, 40), st.integers(0, 40))
def test_cost_09_pairs_equal_a_counted_mask(num_queries, cached):
    keys = cached + num_queries
    counted = sum(1 for q in range(num_queries) for k in range(keys) if k <= cached + q)
    assert costs.causal_pairs(num_queries, keys) == counted


def test_cost_12_sizes_of_teaching_material():
    llama_2 = replace(LLAMA, layers=tuple(replace(x, num_kv_heads=32) for x in LLAMA.layers))
    assert costs.kv_bytes_per_token(llama_2) == 512 * KIB
    assert costs.kv_bytes(llama_2, 32_768) == 16 * GIB
    latent = replace(LLAMA.layers[0], kind="latent", num_kv_heads=1, key_dim=192, value_dim=0)
    pair = replace(LLAMA.layers[0], num_kv_heads=1, key_dim=768, value_dim=768)
    assert costs.layer_kv_bytes_per_token(pair) == 8 * costs.layer_kv_bytes_per_token(latent)


@pytest.mark.parametrize(
    ("context", "ratio", "weights_only", "with_kv"),
    [(2304, 2223, 2391, 2347), (2560, 2461, 2667, 2612)],
)
def test_cost_13_each_figure_says_its_context(context, ratio, weights_only, with_kv):
    uncached = costs.uncached_step_flops(LLAMA, P, context)
    cached = costs.cached_step_flops(LLAMA, P, context)
    assert round(uncached / cached) == ratio
    assert round(costs.intensity(uncached, costs.weight_bytes(P))) == weights_only
    moved = costs.cached_step_bytes(LLAMA, P, context)
    assert round(costs.intensity(uncached, moved)) == with_kv


@given(st.integers(0, 300), st.integers(1, 200), st.sampled_from([1, 2, 4]))
def test_closed_forms_equal_the_sum_over_steps(prompt, decode, width):
    contexts = [prompt + t for t in range(1, decode + 1)]
    assert costs.sum_of_contexts(prompt, decode) == sum(contexts)
    assert costs.sum_of_squared_contexts(prompt, decode) == sum(s * s for s in contexts)
    steps = [costs.uncached_step_flops(LLAMA, P, s) for s in contexts]
    assert sum(steps) == costs.uncached_run_projection_flops(
        P, prompt, decode
    ) + costs.uncached_run_attention_flops(LLAMA, prompt, decode)
    steps = [costs.cached_step_flops(LLAMA, P, s) for s in contexts]
    assert sum(steps) == costs.cached_run_projection_flops(
        P, decode
    ) + costs.cached_run_attention_flops(LLAMA, prompt, decode)
    steps = [costs.cached_step_bytes(LLAMA, P, s, width) for s in contexts]
    assert sum(steps) == costs.run_bytes(LLAMA, P, prompt, decode, width)
    kept = [costs.kv_bytes(LLAMA, s, width) for s in contexts]
    assert sum(kept) == costs.kv_bytes_read_run(LLAMA, prompt, decode, width)
    copied = [costs.kv_bytes(LLAMA, s - 1, width) for s in contexts]
    assert sum(copied) == costs.kv_bytes_copied_by_concatenation(LLAMA, prompt, decode, width)
    repeated = sum(LLAMA.num_layers * costs.logit_rows_discarded(s) for s in contexts)
    assert repeated == costs.kv_rows_recomputed(LLAMA, prompt, decode)


def test_growth_of_a_run_from_an_empty_prompt():
    """Doubling n: attention 8x and projections 4x uncached, 4x and 2x cached."""

    def grows(cost):
        return math.log2(cost(2**17) / cost(2**16))

    assert grows(lambda n: costs.uncached_run_attention_flops(LLAMA, 0, n)) == pytest.approx(
        3, abs=1e-3
    )
    assert grows(lambda n: costs.uncached_run_projection_flops(P, 0, n)) == pytest.approx(
        2, abs=1e-3
    )
    assert grows(lambda n: costs.cached_run_attention_flops(LLAMA, 0, n)) == pytest.approx(
        2, abs=1e-3
    )
    assert grows(lambda n: costs.cached_run_projection_flops(P, n)) == 1


def test_coarse_and_exact_accounting_are_named():
    assert accounting_parameters(LLAMA, "coarse") == (
        8_030_000_000,
        "coarse: resident parameters, three digits",
    )
    number, name = accounting_parameters(LLAMA, "exact")
    assert number == 7_504_658_432 and name.startswith("exact")


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": -1},
        {"prompt": 2.5},
        {"decode": 0},
        {"decode": True},
        {"params": "many"},
        {"params": "nan"},
        {"params": "-3"},
        {"bandwidth": 0},
        {"bandwidth": float("inf")},
    ],
)
def test_bad_input_is_a_named_error(bad):
    with pytest.raises(SheetError, match=r"given|expected"):
        cost_report(LLAMA, **bad)


def test_exact_count_refuses_what_it_does_not_count():
    with pytest.raises(costs.CostError, match="--params"):
        cost_report(replace(LLAMA, is_dense_llama=False), params="exact")


@pytest.mark.parametrize(("prompt", "decode"), [(0, 1), (0, 90), (40, 50), (63, 2), (64, 1), (99, 7)])
def test_a_windowed_run_is_charged_for_the_keys_that_its_windows_leave(prompt, decode):
    """Layer by layer and step by step: min(s, w) keys of a window, s of a full layer."""
    windows = (None, 64, 64, 7)
    layers = tuple(
        replace(LLAMA.layers[0], kind="sliding" if window else "full", window=window)
        for window in windows
    )
    spec = replace(LLAMA, num_layers=4, layers=layers)
    contexts = range(prompt + 1, prompt + decode + 1)
    a_pair = 32 * costs.attention_flops_per_pair(128, 128)
    left = sum(min(s, w or s) for s in contexts for w in windows)
    assert costs.cached_run_attention_flops(spec, prompt, decode) == a_pair * left
    assert costs.kv_bytes_read_run(spec, prompt, decode) == left * 8 * 256 * 2
    squares = sum(s * s - max(0, s - (w or s)) ** 2 for s in contexts for w in windows)
    assert costs.uncached_run_attention_flops(spec, prompt, decode) == a_pair * squares // 2
    report = cost_report(spec, prompt, decode, params=1e9)
    assert report["kv_bytes_read"] == left * 8 * 256 * 2
    assert report["kv_bytes_final"] == costs.kv_bytes(spec, prompt + decode)
    last = prompt + decode
    assert costs.attention_flops_cached_step(spec, last) == a_pair * sum(
        min(last, w or last) for w in windows
    )


def test_a_layer_that_does_not_attend_to_tokens_is_refused():
    other = replace(LLAMA.layers[0], kind="linear")
    with pytest.raises(SheetError, match="linear"):
        cost_report(replace(LLAMA, layers=(other,) * 32))
