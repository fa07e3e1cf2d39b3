"""KV bytes: ranks, layouts, formats, capacity; the reported faults (COST-..); what is allocated."""

from dataclasses import replace
from fractions import Fraction

import pytest
import sympy
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import StaticCache

from kvlab import costs
from kvlab.cache import ContiguousKVCache
from kvlab.checkpoint import cache_argument, cache_of
from kvlab.configs import model_names, preset, read_config
from kvlab.costs import FORMATS, CostError
from kvlab.errors import KvlabError
from kvlab.paged import PagedKVCache
from kvlab.sheet import (
    SheetError,
    ask_capacity,
    capacity_report,
    kv_report,
    models_report,
    storage_format,
    units,
)
from kvlab.specs import LayerSpec, StateSpec

GIB = 2**30


# --- the reported faults ----------------------------------------------------------------------


def test_cost_01_kv_heads_not_query_heads():
    llama3, llama2 = kv_report(preset("llama-3-8b")), kv_report(preset("llama-2-7b"))
    assert llama3["kv_bytes_per_token_growing"] == 131_072
    assert llama3["kv_bytes_per_token_if_sized_from_query_heads"] == 524_288
    assert llama2["kv_bytes_per_token_growing"] == 524_288
    # every path to the number gives the same one
    spec = preset("llama-3-8b")
    assert costs.kv_bytes(spec, 1) == costs.kv_bytes_per_token(spec) == 131_072
    assert costs.sequence_bytes(spec, 7) == costs.paged_kv_bytes(spec, 7, 1) == 7 * 131_072


def test_cost_02_the_latent_row_is_stored_once():
    spec = preset("deepseek-v3")
    report = kv_report(spec)
    assert report["kv_bytes_per_token_growing"] == 61 * (512 + 64) * 2 == 70_272
    assert report["kv_bytes_per_token_growing"] not in (124_928, 62_464, 1_998_848, 1_748_992)
    written_out = kv_report(spec, layout="expanded")
    assert written_out["kv_bytes_per_token_growing"] == 4_997_120
    assert round(4_997_120 / 70_272, 1) == 71.1
    with pytest.raises(SheetError):
        kv_report(spec, layout="both")


def test_cost_04_bytes_are_a_function_of_tokens():
    assert kv_report(preset("gpt-oss-120b"), tokens=1)["kv_bytes"] == 73_728
    report = kv_report(preset("gpt-oss-20b"), tokens=8_192, batch=32)
    assert report["kv_bytes"] == 12 * 2048 * (8192 + 128) * 32
    assert round(report["kv_bytes"] / GIB, 2) == 6.09
    assert report["kv_bytes_if_padded_to_full"] == 12 * GIB
    gemma = kv_report(preset("gemma-3-27b"), tokens=131_072)["kv_bytes"]
    assert gemma == 10 * 8192 * 131_072 + 52 * 8192 * 1024
    assert round(gemma / GIB, 3) == 10.406
    assert kv_report(preset("mistral-7b-v0.1"), tokens=8_192)["kv_bytes"] == 536_870_912
    one = kv_report(preset("gpt-oss-20b"), tokens=8_192)
    assert one["kv_bytes"] == 204_472_320


def test_cost_06_fits_depends_on_the_factor_not_on_the_unit():
    spec, weights = preset("llama-3-8b"), 16_060_000_000
    driver = 81_559 * 2**20
    kv = 64 * costs.kv_bytes(spec, 8_192)
    assert kv == 64 * GIB
    assert kv + weights > 80 * 10**9 and kv + weights < driver
    assert units.both_bytes(kv + weights) == "78.96 GiB (84.78 GB)"
    pool = costs.pool_bytes(driver, "0.9", weights)
    assert round(pool / GIB, 1) == 56.7
    assert pool // costs.kv_bytes_per_token(spec) == 464_696
    report = capacity_report(spec, driver, weights, "0.9", tokens=8_192, sequences=64)
    assert not report["fits"] and report["fits_ignoring_utilisation"]


def test_cost_12_latent_ratio_and_llama2_at_32k():
    spec = preset("llama-2-7b")
    assert costs.kv_bytes_per_token(spec) == 512 * 1024
    assert costs.kv_bytes(spec, 32_768) == 16 * GIB
    whole, latent = LayerSpec("full", 1, 768, 768), LayerSpec("latent", 1, 192, 0)
    row = costs.layer_kv_bytes_per_token
    assert row(whole) == 8 * row(latent)


def test_cost_14_tokens_are_no_capacity_on_hybrids():
    tokens = costs.pool_tokens(127_626, 16)
    assert tokens == 2_042_016
    assert round(costs.concurrency(tokens, 2_048), 3) == 997.078
    jamba, pool = preset("jamba-v0.1"), 20 * GIB
    short = costs.sequences_that_fit(jamba, pool, 1_024)
    long = costs.sequences_that_fit(jamba, pool, 2_048)
    assert short == pool // (16_056_320 + 16_384 * 1_024)
    assert long > short / 2  # the fixed part does not grow, so halving n does not double it
    uniform = preset("llama-3-8b")
    assert costs.sequences_that_fit(uniform, pool, 1_024) == 2 * costs.sequences_that_fit(
        uniform, pool, 2_048
    )
    report = ask_capacity("jamba-v0.1", memory_bytes=80 * 10**9, weight_bytes=10**10)
    assert report["pool_tokens"] is None  # there is no such number


# --- ranks, layouts, formats -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "tp", "each"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (8, 32, 1), (1, 8, 1)]
)
def test_kv_heads_are_split_and_then_copied(kv_heads, tp, each):
    layer = LayerSpec("full", kv_heads, 128, 128)
    spec = replace(preset("llama-3-8b"), layers=(layer,))
    assert costs.per_rank(spec, tp).layers[0].num_kv_heads == each


def test_tensor_parallel_ranks():
    spec = preset("llama-3-8b")
    assert kv_report(spec, tp=4)["kv_bytes_per_token_growing"] == 131_072 // 4
    assert kv_report(spec, tp=32)["kv_bytes_per_token_growing"] == 131_072 // 8
    naive = "kv_bytes_per_token_if_sized_from_query_heads"  # of one rank, like the rest
    assert kv_report(spec, tp=4)[naive] == 524_288 // 4
    latent = kv_report(preset("deepseek-v3"), tp=8)
    assert latent["kv_bytes_per_token_growing"] == 70_272  # every rank keeps the whole row
    written_out = kv_report(preset("deepseek-v3"), tp=8, layout="expanded")
    assert written_out["kv_bytes_per_token_growing"] == 4_997_120 // 8
    assert kv_report(preset("jamba-v0.1"), tp=2)["fixed_bytes_per_sequence"] == 16_056_320 // 2
    for tp in (0, 3, -1, True, 2.0, 64):
        with pytest.raises(KvlabError):
            kv_report(spec, tp=tp)
    odd = replace(spec, num_heads=24)
    with pytest.raises(CostError, match="3 ranks for 8 KV heads"):
        costs.per_rank(odd, 3)


@pytest.mark.parametrize(
    ("name", "share"),
    [("bf16", 2), ("fp8", 1), ("q8_0", Fraction(34, 32)), ("q4_0", Fraction(18, 32)),
     ("nvfp4", Fraction(9, 16)), ("mxfp4", Fraction(17, 32)), ("bfloat16", 2), ("torch.bfloat16", 2),
     ("f16", 2), ("F32", 4)],
)  # fmt: skip
def test_formats(name, share):
    assert storage_format(name).bytes_per_element == share


@pytest.mark.parametrize(
    ("name", "tp", "rate"),
    [("bf16", 1, 131_072), ("fp8", 1, 65_536), ("int8_per_token_head", 1, 67_584),
     ("int8_per_token_head", 4, 16_896), ("q8_0", 1, 69_632), ("q4_0", 1, 36_864)],
)  # fmt: skip
def test_bytes_per_token_of_llama_3_8b(name, tp, rate):
    """32 layers, 8 KV heads of 128. A scale of its own for every token and head is 4 bytes of it."""
    report = kv_report(preset("llama-3-8b"), tokens=16, kv_dtype=name, tp=tp)
    assert report["kv_bytes_per_token_growing"] == rate
    assert report["kv_bytes_in_pages"] == 16 * rate
    assert report["bytes_per_element"] * 131_072 == 2 * rate * tp
    assert report["kv_bytes_per_token_if_sized_from_query_heads"] == 4 * rate
    assert report["head_dim"] == 128


def test_a_scale_per_token_and_head_counts_by_head_and_not_by_element():
    """(d_h + 4) bytes: 260 for 256 values, 132 for 128; a latent row is one row with one scale."""
    storage = FORMATS["int8_per_token_head"]
    wide = LayerSpec("full", 1, 256, 128)
    spec = replace(preset("llama-3-8b"), layers=(wide,))
    assert costs.kv_bytes_per_token(costs.with_scales(spec, storage), 1) == 260 + 132
    report = kv_report(preset("deepseek-v3"), tokens=1, kv_dtype=storage.name)
    assert report["kv_bytes"] == 61 * (576 + 4)
    assert report["kv_bytes_per_token_if_expanded"] == 61 * 128 * (192 + 4 + 128 + 4)
    assert costs.with_scales(spec, FORMATS["fp8"]) is spec


def test_q8_0_of_a_latent_cache_as_a_log_reports_it():
    """A llama.cpp log says 1166.62 MiB for DeepSeek's latent rows in q8_0 at 32,768 tokens."""
    report = kv_report(preset("deepseek-v3"), tokens=32_768, kv_dtype="q8_0")
    assert report["kv_bytes"] == 61 * 576 * 32_768 * 34 // 32
    assert round(report["kv_bytes"] / 2**20, 2) == 1166.62


def test_blocks_must_tile_a_row():
    odd = read_config({"num_hidden_layers": 1, "hidden_size": 40, "num_attention_heads": 1})
    with pytest.raises(SheetError, match="row of 40 elements"):
        kv_report(odd, kv_dtype="q8_0")
    for name in ("int3", "", None, 8):
        with pytest.raises(SheetError):
            storage_format(name)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_every_model_in_every_format_is_a_whole_number_or_a_named_error(kv_dtype):
    for stem in model_names():
        try:
            report = kv_report(preset(stem), tokens=1_000, kv_dtype=kv_dtype)
        except SheetError:
            continue
        assert isinstance(report["kv_bytes"], int)


def test_formulas_take_symbols():
    h_kv, d_h, b, n = sympy.symbols("h_kv d_h b n", positive=True)
    layer = LayerSpec("full", h_kv, d_h, d_h)
    assert costs.layer_kv_bytes_per_token(layer, b) == 2 * h_kv * d_h * b
    memory, share, weights, rate = sympy.symbols("M u W r", positive=True)
    pool = costs.pool_bytes(memory, share, weights)
    assert sympy.simplify(pool - (memory * share - weights)) == 0
    assert costs.concurrency(pool / rate, n) == pool / rate / n


def test_growing_and_capped_parts_add_up():
    for stem in model_names():
        spec = preset(stem)
        n = 10**7  # longer than any window
        grown = costs.growing_bytes_per_token(spec) * n + costs.window_cap_bytes(spec)
        assert costs.kv_bytes(spec, n) == grown


def test_an_unknown_state_is_not_zero():
    spec = preset("llama-3-8b")
    layers = (LayerSpec("recurrent", state=(StateSpec("recurrent state", None),)), *spec.layers)
    spec = read_config({"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1})
    spec = type(spec)(**{**spec.__dict__, "layers": layers})
    assert costs.fixed_bytes_per_sequence(spec) is None
    with pytest.raises(CostError, match="no known size"):
        capacity_report(spec, GIB, 0)


# --- capacity ----------------------------------------------------------------------------------


def test_longest_context_is_the_longest():
    for stem in ("llama-3-8b", "gpt-oss-20b", "jamba-v0.1", "gemma-3-27b"):
        spec, pool, sequences = preset(stem), 10 * GIB, 8
        longest = costs.longest_context(spec, pool, sequences)
        assert sequences * costs.sequence_bytes(spec, longest) <= pool
        assert sequences * costs.sequence_bytes(spec, longest + 1) > pool
    assert costs.longest_context(preset("mistral-7b-v0.1"), 10 * GIB, 2) is None
    assert costs.longest_context(preset("mistral-7b-v0.1"), GIB, 4) == 2_048
    assert costs.longest_context(preset("jamba-v0.1"), 1_000, 4) == 0


def test_capacity_advice_is_true():
    """Whatever the planner advises makes it fit."""
    settings = {"memory_bytes": 80 * 10**9, "weight_bytes": 16 * 10**9, "tokens": 8_192}
    spec = preset("llama-3-8b")
    tight = capacity_report(spec, sequences=64, **settings)
    assert not tight["fits"]
    assert capacity_report(spec, sequences=tight["sequences_that_fit"], **settings)["fits"]
    shorter = {**settings, "tokens": tight["longest_context"]}
    assert capacity_report(spec, sequences=64, **shorter)["fits"]
    assert capacity_report(spec, sequences=64, tp=2, **settings)["fits"]
    assert "store K and V in fp8" in tight["advice"]
    assert capacity_report(spec, sequences=64, kv_dtype="fp8", **settings)["fits"]
    assert "split the model over 2 cards" in tight["advice"]
    hopeless = capacity_report(spec, 10**9, 16 * 10**9, sequences=10**6)
    assert hopeless["advice"] == []
    nothing = capacity_report(spec, 10 * 10**9, 16 * 10**9)
    assert not nothing["weights_fit"] and nothing["sequences_that_fit"] == 0


@pytest.mark.parametrize(
    "wrong",
    [{"utilisation": 0}, {"utilisation": "x"}, {"utilisation": 1.5}, {"utilisation": float("nan")},
     {"tokens": 0}, {"sequences": 1.5}, {"memory_bytes": -1}, {"kv_dtype": "x"}, {"tp": 3}],
)  # fmt: skip
def test_capacity_refuses_what_it_cannot_answer(wrong):
    settings = {"memory_bytes": 10**11, "weight_bytes": 10**9, **wrong}
    with pytest.raises(KvlabError):
        capacity_report(preset("llama-3-8b"), **settings)


@pytest.mark.parametrize("wrong", [{}, {"memory_bytes": None}, {"card": 3}, {"card": "no-card"}])
def test_capacity_names_the_memory_it_needs(wrong):
    with pytest.raises(KvlabError, match="a100-80gb"):
        ask_capacity("llama-3-8b", **wrong)


def test_models_table():
    rows = {row["preset"]: row for row in models_report()}
    assert len(rows) == len(model_names()) >= 43
    row = rows["gpt-oss-20b"]
    assert row["bytes_at_8192"] == 204_472_320
    assert row["hf_id"] == "openai/gpt-oss-20b"
    assert rows["jamba-v0.1"]["bytes_at_32768"] == 16_056_320 + 16_384 * 32_768


# --- what is really allocated ------------------------------------------------------------------

TOY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("pattern", [None, ["sliding_attention", "full_attention"] * 2])
@pytest.mark.parametrize("v_head_dim", [16, 8])
def test_kvlab_allocates_what_the_formula_says(pattern, v_head_dim):
    config = {**TOY, "model_type": "toy", "layer_types": pattern, "v_head_dim": v_head_dim}
    config |= {"sliding_window": 8 if pattern else None}
    spec = read_config(config)
    held = costs.padded_to_full(spec)  # both caches hold the whole context on every layer
    contiguous = ContiguousKVCache(spec, batch_size=3, max_len=40, dtype=torch.bfloat16)
    assert contiguous.nbytes == 3 * costs.kv_bytes(held, 40)
    if v_head_dim == 16:
        paged = PagedKVCache(spec, num_blocks=5, block_size=8, dtype=torch.float32)
        assert paged.nbytes == costs.paged_kv_bytes(held, 5 * 8, 8, 4)


def run(config: dict, num_tokens: int, cache=None):
    """A toy transformers model over num_tokens tokens: (our spec, its cache object)."""
    torch.manual_seed(0)
    model_type = config["model_type"]
    loaded = AutoConfig.for_model(**{**config, "model_type": model_type})
    model = AutoModelForCausalLM.from_config(loaded, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.arange(num_tokens)[None] % 60 + 2
        given = cache_argument(model, cache) if cache else {}
        output = model(ids, use_cache=True, **given)
    return read_config(loaded.to_dict()), cache_of(output)


def held_bytes(cache) -> int:
    """K and V that a transformers cache object holds."""
    total = 0
    for layer in cache.layers:
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            total += 0 if tensor is None else tensor.numel() * tensor.element_size()
    return total


MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 4,
}


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "cohere2"]
)
def test_transformers_holds_what_the_formula_says(model_type):
    window = None if model_type == "mistral" else 24
    config = {**TOY, "model_type": model_type, "sliding_window": window}
    spec, cache = run(config, 20)  # no window is full yet
    assert held_bytes(cache) == costs.kv_bytes(spec, 20, 4)


def test_transformers_windows_keep_one_row_less():
    """A window of W serves W keys: W - 1 kept from before and the one being computed."""
    spec, cache = run({**TOY, "model_type": "gemma2", "sliding_window": 8}, 20)
    shorter = spec.layers[0].window - 1
    rows = 2 * (20 + shorter)  # two full and two sliding layers
    assert held_bytes(cache) == rows * costs.layer_kv_bytes_per_token(spec.layers[0], 4)


def test_transformers_keeps_the_latent_row():
    config = {**TOY, **MLA, "model_type": "deepseek_v3", "num_key_value_heads": 4}
    config.pop("head_dim")
    spec, cache = run(config, 20)
    assert held_bytes(cache) == costs.kv_bytes(spec, 20, 4) == 4 * (16 + 8) * 20 * 4
    written_out = costs.expanded(spec)
    assert costs.kv_bytes(written_out, 20, 4) == 4 * 4 * (8 + 8 + 12) * 20 * 4


STATES = {
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
              "mamba_d_state": 4, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8,
                         "mamba_d_state": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_next": {"linear_num_value_heads": 4, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
                   "num_experts_per_tok": 1, "moe_intermediate_size": 32,
                   "shared_expert_intermediate_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2},
    "mamba": {"state_size": 8, "expand": 2},
    "nemotron_h": {"hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 8,
                   "ssm_state_size": 8, "n_groups": 2},
    "lfm2": {"full_attn_idxs": [1], "conv_L_cache": 3},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 8},
}  # fmt: skip


@pytest.mark.parametrize("model_type", STATES)
def test_recurrent_state_has_the_size_that_transformers_allocates(model_type):
    """Element for element, but that transformers keeps K convolution inputs and we count K - 1."""
    spec, cache = run({**TOY, "model_type": model_type, **STATES[model_type]}, 20)
    for ours, theirs in zip(spec.layers, cache.layers, strict=True):
        summary = sum(s.num_elements for s in ours.state if s.name == "recurrent state")
        window = sum(s.num_elements for s in ours.state if s.name == "convolution window")
        recurrent = tensors(theirs, "recurrent_states")
        assert sum(t.numel() for t in recurrent) == summary
        conv = tensors(theirs, "conv_states")
        assert sum(t.numel() // t.shape[-1] * (t.shape[-1] - 1) for t in conv) == window
        if ours.num_kv_heads:
            assert theirs.keys.shape == (1, ours.num_kv_heads, 20, ours.key_dim)


def tensors(layer, name: str) -> list:
    value = getattr(layer, name, None)
    if value is None:
        return []
    values = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, dict):
        values = list(value.values())
    return [v for v in values if v is not None]


def test_a_static_cache_is_paid_in_advance():
    config = AutoConfig.for_model(**{**TOY, "model_type": "llama"})
    spec = read_config(config.to_dict())
    cache = StaticCache(config=config, max_cache_len=64)
    _, cache = run({**TOY, "model_type": "llama"}, 5, cache)
    assert held_bytes(cache) == costs.kv_bytes(spec, 64, 4)


# --- the second batch of reported faults -------------------------------------------------------


def test_cost_16_the_null_block_and_whole_pages():
    spec = preset("llama-3-8b")
    block = 8192 * costs.kv_bytes_per_token(spec)
    report = capacity_report(spec, 13 * block, 0, "1", tokens=98_304, block_size=8192)
    assert report["fits"] and report["longest_context"] == 98_304
    assert not capacity_report(spec, 13 * block, 0, "1", tokens=98_305, block_size=8192)["fits"]
    small = 16 * costs.kv_bytes_per_token(spec)
    settings = {"utilisation": "1", "tokens": 17, "block_size": 16}
    pool = 11 * small  # ten blocks, and the null block
    ten = capacity_report(spec, pool, 0, sequences=10, **settings)
    assert not ten["fits"] and ten["sequences_that_fit"] == 5
    assert capacity_report(spec, pool, 0, sequences=5, **settings)["fits"]


def test_cost_17_what_is_said_of_draft_layers_follows_the_option():
    spec = preset("deepseek-v3")
    without, counted = kv_report(spec), kv_report(spec, mtp=True)
    assert any("MTP" in note and note.endswith("not counted") for note in without["notes"])
    assert any("MTP" in note for note in counted["notes"])
    assert not any("not counted" in note for note in counted["notes"])
    assert (without["num_layers"], counted["num_layers"]) == (61, 62)
    assert counted["layer_runs"] == ["62 latent"] and len(counted["layers"]) == 62


def test_aud_02_the_indexer_is_a_line_of_its_own():
    spec = preset("deepseek-v3.2")
    report = kv_report(spec, kv_dtype="fp8_ds_mla")
    assert report["kv_bytes_per_token_growing"] == 61 * 656 == 40_016
    assert report["indexer_bytes_per_token"] == 61 * 132
    assert kv_report(spec)["indexer_bytes_per_token"] == 61 * 256
    assert kv_report(preset("deepseek-v3"))["indexer_bytes_per_token"] == 0


def test_a_latent_row_s_format_is_refused_where_no_latent_is_stored():
    for name, layout in (("llama-3-8b", "latent"), ("deepseek-v3", "expanded")):
        with pytest.raises(SheetError, match="fp8_ds_mla: the format of a latent row"):
            kv_report(preset(name), kv_dtype="fp8_ds_mla", layout=layout)
