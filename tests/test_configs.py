"""The config reader: the published models, the reported faults (CFG-..), and anything else."""

import json
from pathlib import Path

import pytest

from kvlab import costs
from kvlab.configs import ConfigError, find_model, model_names, preset, read_config
from kvlab.rope import rope_inv_freq
from kvlab.sheet import kv_report

VALUES = json.loads((Path(__file__).parent / "model_values.json").read_text())

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}


def growing(config) -> int:
    return costs.growing_bytes_per_token(read_config(config))


def filling(config) -> int:
    return costs.kv_bytes_per_token(read_config(config))


def kinds(config) -> list[str]:
    return [layer.kind for layer in read_config(config).layers]


def refused(config) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    assert str(caught.value).startswith(caught.value.field)
    return caught.value


@pytest.mark.parametrize("stem", sorted(VALUES))
def test_published_models(stem):
    """Every value of the table of 43 published models."""
    facts, spec = VALUES[stem], preset(stem)
    found = [layer.kind for layer in spec.layers]
    assert (spec.num_layers, spec.hidden_size, spec.num_heads) == (
        facts["num_hidden_layers"],
        facts["hidden_size"],
        facts["num_attention_heads"],
    )
    assert (spec.num_kv_heads, spec.head_dim) == (facts["num_key_value_heads"], facts["head_dim"])
    assert spec.intermediate_size == facts["intermediate_size"]
    assert spec.vocab_size == facts["vocab_size"]
    assert spec.tie_word_embeddings == facts["tie_word_embeddings"]
    assert found.count("full") + found.count("latent") == facts["layers_full"]
    assert found.count("sliding") == facts["layers_sliding"]
    assert found.count("none") + found.count("recurrent") == facts["layers_no_kv"]
    assert found.count("shared") == facts["layers_kv_shared"]
    report = kv_report(spec)
    assert report["kv_bytes_per_token_growing"] == facts["kv_bytes_per_token_bf16_growing"]
    assert report["kv_bytes_per_token_filling"] == facts["kv_bytes_per_token_bf16_first_tokens"]
    assert report["kv_bytes_per_token_if_sized_from_query_heads"] == facts["naive_query_heads"]
    cap = facts.get("kv_bytes_sliding_cap_per_sequence", 0)
    assert report["window_cap_bytes_per_sequence"] == cap
    if "fixed_state_bytes_per_sequence" in facts:
        assert report["fixed_bytes_per_sequence"] == facts["fixed_state_bytes_per_sequence"]
    if "kv_bytes_per_token_bf16_if_materialised" in facts:
        expanded = facts["kv_bytes_per_token_bf16_if_materialised"]
        assert report["kv_bytes_per_token_if_expanded"] == expanded


@pytest.mark.parametrize("stem", model_names())
def test_a_preset_is_found_by_every_name(stem):
    facts = json.loads((Path("data/models") / f"{stem}.json").read_text())
    assert facts["_source"]
    assert find_model(stem) == find_model(facts["_name"]) == preset(stem.upper())
    assert find_model(facts["_hf_id"]).num_layers == preset(stem).num_layers


# --- the reported faults ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "right", "naive"),
    [
        (28, 1024, 16, 8, 128, 114_688, 57_344),
        (36, 2560, 32, 8, 128, 147_456, 92_160),
        (24, 2880, 64, 8, 64, 49_152, 34_560),
        (1, 5120, 32, 8, 128, 4_096, 5_120),
        (1, 3584, 16, 8, 256, 8_192, 7_168),
        (32, 4096, 32, 8, 128, 131_072, 131_072),  # a control: both rules agree
    ],
)
def test_cfg_01_declared_head_dim(num_layers, hidden, heads, kv_heads, head_dim, right, naive):
    config = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    assert growing({**config, "head_dim": head_dim}) == right
    assert num_layers * kv_heads * 2 * (hidden // heads) * 2 == naive


def test_cfg_02_null_is_absent():
    config = {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "head_dim": None,
    }
    assert read_config(config).head_dim == 128
    assert growing(config) == filling(config) == 131_072
    for key in ("intermediate_size", "sliding_window", "rope_scaling"):
        assert growing({**config, key: None}) == 131_072
    everyone = read_config({**LLAMA, "num_key_value_heads": None})
    assert everyone.num_kv_heads == 32
    assert any("no num_key_value_heads" in note for note in everyone.notes)


def test_cfg_03_clashing_fields_are_named():
    config = {"num_hidden_layers": 2, "hidden_size": 5120, "num_attention_heads": 24}
    error = refused({**config, "num_key_value_heads": 4})
    assert error.field == "head_dim"
    assert "5120" in str(error) and "24" in str(error)
    assert growing({**config, "num_key_value_heads": 4, "head_dim": 256}) == 2 * 4 * 512 * 2
    assert refused({**config, "num_attention_heads": 0}).field == "num_attention_heads"
    assert refused({**LLAMA, "num_key_value_heads": 7}).field == "num_key_value_heads"


def test_cfg_04_multi_query():
    falcon = {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
    }
    assert growing(falcon) == growing({**falcon, "num_kv_heads": 71}) == 8_192
    assert growing({**falcon, "multi_query": False}) == 581_632
    assert read_config(falcon).head_dim == 64
    new = {
        **falcon,
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }
    assert growing(new) == 122_880
    coder = {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144}
    assert read_config({**coder, "multi_query": True}).num_kv_heads == 1
    assert read_config({**coder, "multi_query": False}).num_kv_heads == 48


QWEN35 = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
}


@pytest.mark.parametrize("inner", [QWEN35, {k: v for k, v in QWEN35.items() if k != "hidden_size"}])
def test_cfg_06_nested_text_config(inner):
    vision = {"num_hidden_layers": 33, "hidden_size": 1152, "num_attention_heads": 16}
    assert growing({"model_type": "qwen3_5", "text_config": inner}) == 65_536
    assert growing({"thinker_config": {"text_config": inner}}) == 65_536
    assert growing({**vision, "text_config": inner}) == 65_536
    assert growing({"llm_config": inner}) == growing({"language_config": inner}) == 65_536
    assert growing({"vlm_config": {**vision, "text_config": inner}}) == 65_536
    assert refused({"model_type": "qwen3_5", "vision_config": vision}).field == "num_hidden_layers"
    empty = refused({**vision, "text_config": {"model_type": "llama"}})
    assert empty.field == "text_config.num_hidden_layers"


def test_cfg_06_a_text_config_without_a_type_has_the_outer_one():
    inner = {**LLAMA, "num_hidden_layers": 6, "head_dim": 128, "sliding_window": 512}
    del inner["model_type"]
    spec = read_config({"model_type": "gemma3", "text_config": inner})
    assert [layer.kind for layer in spec.layers] == ["sliding"] * 5 + ["full"]
    assert any("gemma3_text" in note for note in spec.notes)


def test_cfg_07_window_switched_off():
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 131_072,
        "use_sliding_window": False,
        "max_window_layers": 28,
    }
    spec = read_config(config)
    assert costs.kv_bytes(spec, 200_000) == 11_468_800_000
    assert kinds(config) == kinds({**config, "use_sliding_window": True}) == ["full"] * 28
    other = {**config, "model_type": "mimo"}
    assert kinds(other) == ["full"] * 28
    slid = {**config, "use_sliding_window": True, "max_window_layers": 20}
    assert kinds(slid) == ["full"] * 20 + ["sliding"] * 8


def test_cfg_08_two_gates_cancel_the_window():
    config = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 6, "sliding_window": 2048}
    assert kinds(config) == ["full"] * 6
    assert kinds({**config, "use_sliding_window": True}) == ["full"] * 6
    both = {**config, "use_sliding_window": True, "max_window_layers": 2}
    assert kinds(both) == ["full"] * 2 + ["sliding"] * 4


def test_cfg_09_pattern_without_a_key():
    gemma2 = {**LLAMA, "model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096}
    assert kinds(gemma2) == ["sliding", "full"] * 13
    gemma3 = {**gemma2, "model_type": "gemma3_text", "sliding_window_pattern": 6}
    assert [i for i, kind in enumerate(kinds(gemma3)) if kind == "full"] == [5, 11, 17, 23]
    large = kinds({**gemma3, "num_hidden_layers": 62})
    assert (large.count("full"), large.count("sliding")) == (10, 52)
    listed = ["full_attention"] * 13 + ["sliding_attention"] * 13
    assert kinds({**gemma3, "layer_types": listed}) == ["full"] * 13 + ["sliding"] * 13


def test_cfg_11_recurrent_layers_are_not_attention():
    assert growing(QWEN35) == 65_536
    jamba = kv_report(preset("jamba-v0.1"))
    assert jamba["kv_bytes_per_token_growing"] == 16_384
    assert jamba["fixed_bytes_per_sequence"] == 28 * (3 * 8192 * 2 + 8192 * 16 * 4) == 16_056_320
    assert (
        growing(json.loads(Path("data/models/nemotron-3-nano-30b-a3b.json").read_text())) == 6_144
    )
    following = {**LLAMA, "model_type": "qwen3_next", "num_hidden_layers": 48, "head_dim": 256}
    assert growing({**following, "num_attention_heads": 16, "num_key_value_heads": 2}) == 24_576
    unknown = {**LLAMA, "model_type": "new", "layer_types": ["mamba", "attention"] * 16}
    report = kv_report(read_config(unknown))
    assert report["fixed_bytes_per_sequence"] is None  # not known is not zero
    assert any("fixed state is not counted" in note for note in report["notes"])


def test_cfg_12_layers_that_reuse_kv():
    spec = preset("gemma-3n-e4b")
    assert costs.growing_bytes_per_token(spec) == 8_192
    assert costs.window_cap_bytes(spec) == 16_777_216
    assert costs.kv_bytes_per_token(spec) == 40_960
    assert {layer.shares_layer for layer in spec.layers if layer.kind == "shared"} == {18, 19}
    config = {**LLAMA, "num_kv_shared_layers": 32}
    assert refused(config).field == "num_kv_shared_layers"
    assert refused({**config, "num_kv_shared_layers": 40}).field == "num_kv_shared_layers"


def test_cfg_15_rope_settings_moved():
    inner = {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "rope_type": "default"}
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"head_dim": 256}
    rope = read_config({**config, "rope_parameters": inner}).rope
    assert (rope.theta, rope.rotary_dim, rope.rope_type) == (1e7, 64, "default")
    top = read_config({**config, "rope_theta": 500_000}).rope
    assert (top.theta, top.rotary_dim) == (5e5, 256)
    both = {**config, "rope_theta": 500_000, "rope_parameters": inner}
    assert refused(both).field == "rope_theta"
    nested = {
        "full_attention": {"rope_theta": 1_000_000, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10_000, "rope_type": "default"},
    }
    layers = {"sliding_window": 512, "model_type": "gemma3_text", "rope_parameters": nested}
    spec = read_config({**config, **layers})
    assert (spec.rope.theta, spec.rope_local.theta) == (1e6, 1e4)
    absent = read_config(config)
    assert absent.rope.theta == 10_000
    assert any("rope_theta" in note for note in absent.notes)
    old = read_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert (old.rope_type, dict(old.params)) == ("linear", {"factor": 2.0})
    scaling = {"type": "yarn", "rope_type": "llama3"}
    assert refused({**LLAMA, "rope_scaling": scaling}).field == "rope_type"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_theta"),
        ({"rope_local_base_freq": 2e4, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
         "rope_local_base_freq"),
        ({"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "factor"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
         "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_cfg_15_two_places_must_agree(changes, field):
    assert refused({**LLAMA, **changes}).field == field


@pytest.mark.parametrize("placed", ["nope", "alibi"])
def test_positions_that_rotate_nothing(placed):
    """Granite 4 hybrids ("nope") and Jais ("alibi")."""
    assert read_config({**LLAMA, "position_embedding_type": placed}).rope.rope_type == "none"


def test_cfg_15_chatglm_states_a_multiple():
    config = {"model_type": "chatglm", "num_layers": 2, "hidden_size": 512,
              "num_attention_heads": 4, "rope_ratio": 500}  # fmt: skip
    rope = read_config(config).rope
    assert (rope.theta, rope.rotary_dim) == (5e6, 64)


def test_cfg_17_chunked_layers():
    spec = preset("llama-4-scout")
    found = [layer.kind for layer in spec.layers]
    assert (found.count("chunked"), found.count("full")) == (36, 12)
    assert costs.kv_bytes(spec, 10_000) == 1_699_479_552
    assert costs.kv_bytes(costs.padded_to_full(spec), 10_000) == 1_966_080_000
    assert any("upper bound" in note for note in spec.notes)


# --- more of the same kinds --------------------------------------------------------------------


def test_widths_that_differ():
    mimo = {
        **LLAMA,
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "sliding_window": 128,
    }
    full, sliding = read_config(mimo).layers[:2]
    assert (full.num_kv_heads, full.key_dim, full.value_dim) == (4, 192, 128)
    assert (sliding.num_kv_heads, sliding.window) == (8, 128)
    assert growing(mimo) == 2 * 4 * (192 + 128) * 2


def test_per_layer_blocks():
    blocks = [
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 4}},
    ]
    config = {
        **LLAMA,
        "model_type": "nemotron-nas",
        "num_hidden_layers": 4,
        "num_key_value_heads": None,
        "block_configs": blocks,
    }
    spec = read_config(config)
    assert [layer.num_kv_heads for layer in spec.layers] == [4, 0, 0, 8]
    assert spec.num_kv_heads == 8  # no layer has the 32 that null would mean
    windowed = {"attention": {"n_heads_in_group": 4, "window_length": 1024}}
    error = refused({**config, "block_configs": [*blocks[:3], windowed]})
    assert error.field == "block_configs.3.attention.window_length"
    lists = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": None}
    lists["num_kv_heads"] = [1, 2, 4, 8]
    assert [layer.num_kv_heads for layer in read_config(lists).layers] == [1, 2, 4, 8]
    lists["num_kv_heads"] = [1, 2, 4]
    assert refused(lists).field == "num_key_value_heads"


def test_old_names():
    gpt2 = read_config({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768})
    assert (gpt2.num_layers, gpt2.num_kv_heads, gpt2.head_dim) == (12, 12, 64)
    assert gpt2.rope.rope_type == "none"
    mpt = {"model_type": "mpt", "n_layers": 8, "n_heads": 16, "d_model": 2048}
    assert growing(mpt) == 8 * 2 * 2048 * 2
    assert growing({**mpt, "attn_config": {"attn_type": "multiquery_attention"}}) == 8 * 2 * 128 * 2
    dbrx = {"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144}
    assert growing({**dbrx, "attn_config": {"kv_n_heads": 8}}) == 40 * 8 * 2 * 128 * 2
    chatglm = {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128}
    chatglm |= {"multi_query_attention": True, "multi_query_group_num": 2}
    assert growing(chatglm) == 28_672
    olmo = {"n_layers": 2, "d_model": 512, "n_heads": 4, "n_kv_heads": None}
    assert growing({**olmo, "multi_query_attention": True}) == 2 * 2 * 128 * 2
    assert growing({**olmo, "multi_query_attention": False}) == 2 * 4 * 2 * 128 * 2
    grok2 = {**LLAMA, "model_type": "git", "sliding_window_size": -1}
    assert growing(grok2) == growing(LLAMA)
    cogvlm = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 4}
    for name in ("num_multi_query_heads", "num_query_groups", "n_kv_head"):
        assert growing({**cogvlm, name: 2}) == 2 * 2 * 2 * 128 * 2
    assert refused({**LLAMA, "n_embd": 2048}).field == "hidden_size"


@pytest.mark.parametrize("absent", [{"use_mla": False}, {"kv_lora_rank": None}])
def test_a_latent_type_without_a_latent(absent):
    """DeepSeek-VL2's small models: plain heads, whose V is not as wide as the type's latent V."""
    config = {"model_type": "deepseek_v2", "num_hidden_layers": 12, "hidden_size": 1024,
              "num_attention_heads": 16, "num_key_value_heads": 16}  # fmt: skip
    for value in ({}, {"v_head_dim": 0}):
        assert growing({**config, **absent, **value}) == 12 * 16 * 2 * 64 * 2


def test_heads_that_differ_from_layer_to_layer():
    elm = {"model_type": "openelm", "num_transformer_layers": 3, "model_dim": 1280, "head_dim": 64}
    spec = read_config({**elm, "num_query_heads": [12, 12, 16], "num_kv_heads": [3, 3, 4]})
    assert [layer.num_kv_heads for layer in spec.layers] == [3, 3, 4]
    assert costs.growing_bytes_per_token(spec) == 10 * 2 * 64 * 2
    assert any("differ from layer to layer" in note for note in spec.notes)


def test_mtp_layers_are_an_extra():
    spec = preset("deepseek-v3")
    assert len(spec.mtp_layers) == 1
    assert kv_report(spec)["mtp_kv_bytes_per_token"] == 1_152
    assert kv_report(spec, mtp=True)["kv_bytes_per_token_growing"] == 70_272 + 1_152


def test_an_unknown_type_is_read_with_a_note():
    spec = read_config({**LLAMA, "model_type": "brand_new"})
    assert costs.growing_bytes_per_token(spec) == 131_072
    assert any("brand_new" in note for note in spec.notes)
    assert not spec.is_dense_llama
    windowed = read_config({**LLAMA, "model_type": "brand_new", "sliding_window": 1024})
    assert {layer.kind for layer in windowed.layers} == {"sliding"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 32.0}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"head_dim": -128}, "head_dim"),
        ({"head_dim": [128]}, "head_dim"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"num_kv_heads": 4}, "num_key_value_heads"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"sliding_window": False}, "sliding_window"),
        ({"sliding_window": ""}, "sliding_window"),
        ({"attention_chunk_size": False}, "attention_chunk_size"),
        ({"dim": 4096, "hidden_size": None, "hidden_dim": 14336}, "dim"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types"),
        ({"layer_types": ["full_attention"] * 31 + ["quantum"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": 4,
          "use_sliding_window": False}, "use_sliding_window"),
        ({"use_sliding_window": "no"}, "use_sliding_window"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "?" * 32}, "hybrid_override_pattern"),
        ({"hybrid_layer_pattern": [1.0] * 32}, "hybrid_layer_pattern"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"model_type": 3}, "model_type"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"is_encoder_decoder": "true"}, "is_encoder_decoder"),
        ({"use_cla": True}, "cla_share_factor"),
        ({"num_attention_heads": [32] * 31, "head_dim": 128}, "num_attention_heads"),
        ({"num_key_value_heads": [8] * 31 + [5]}, "num_key_value_heads"),
        ({"text_config": {"a": 1}}, "text_config.num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"attn_layer_period": 4, "attn_layer_offset": 4}, "attn_layer_offset"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(changes, field):
    error = refused({**LLAMA, **changes})
    assert error.field == field
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '"x"', "{} {}", "[" * 100_000, '{"a":' * 50_000, "9" * 10_000,
     '{"hidden_size": 1, "hidden_size": 2}', "\ufeff{}", "{" + "x" * 2**20],
)  # fmt: skip
def test_text_that_is_no_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    for source in (path, tmp_path):
        with pytest.raises(ConfigError):
            read_config(source)


def test_files_that_are_no_config(tmp_path):
    for source in (tmp_path, tmp_path / "none.json", "no/such", "a\0b/c.json", "x" * 5000 + "/y"):
        with pytest.raises(ConfigError):
            find_model(source)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError):
        find_model(tmp_path)
    with pytest.raises(ConfigError):
        find_model("no-such-model")


def test_heads_of_each_layer_under_another_name():
    """DeciLM's list of KV heads, one entry a layer."""
    config = {**LLAMA, "model_type": "deci", "num_hidden_layers": 4,
              "num_key_value_heads_per_layer": [4, 4, 2, 1]}  # fmt: skip
    del config["num_key_value_heads"]
    assert [layer.num_kv_heads for layer in read_config(config).layers] == [4, 4, 2, 1]
    config["num_key_value_heads_per_layer"] = [4, 4]
    assert refused(config).field == "num_key_value_heads"


def test_gpt_neo_alternates():
    """EleutherAI/gpt-neo-1.3B: every second layer looks 256 tokens back."""
    config = {"model_type": "gpt_neo", "num_layers": 4, "hidden_size": 2048, "num_heads": 16,
              "window_size": 256, "attention_types": [[["global", "local"], 2]]}  # fmt: skip
    for more in ({}, {"attention_layers": ["global", "local"] * 2}):
        layers = read_config({**config, **more}).layers
        assert [layer.kind for layer in layers] == ["full", "sliding"] * 2
        assert [layer.window for layer in layers] == [None, 256] * 2


def test_santacoder_has_one_kv_head():
    config = {"model_type": "gpt2", "n_layer": 24, "n_embd": 2048, "n_head": 16,
              "attention_head_type": "multiquery"}  # fmt: skip
    assert costs.kv_bytes_per_token(read_config(config)) == 24 * 128 * 4


@pytest.mark.parametrize(
    "model_type",
    (
        "dinov2 wav2vec2 hubert esm longformer eurobert siglip2_vision_model clip_text_model "
        "tinybert whisper_encoder my_vision"
    ).split(),
)
def test_what_only_sees_or_hears_keeps_no_cache(model_type):
    assert refused({**LLAMA, "model_type": model_type}).field == "model_type"
    assert refused({"model_type": "clip", "text_config": LLAMA}).field == "model_type"


@pytest.mark.parametrize("key", ["mamba_d_state", "mb_per_layer", "ssm_cfg"])
def test_an_unknown_hybrid_is_not_priced_as_attention(key):
    """Phi-4-mini-flash, Hymba and PLaMo 2 place their Mamba layers by rules of their own."""
    hybrid = {**LLAMA, "model_type": "phi4flash", key: 16}
    assert refused(hybrid).field == "layer_types"
    listed = {**hybrid, "layer_types": ["mamba", "full_attention"] * 16, "mamba_d_conv": 4,
              "mamba_d_state": 16}  # fmt: skip
    assert read_config(listed).layers[1].kind == "full"


def test_an_unknown_type_says_where_its_window_holds():
    """SmallThinker's list of 0 and 1 is read; a list under a name not known here is not ignored."""
    config = {**LLAMA, "model_type": "brand_new", "num_hidden_layers": 4, "sliding_window": 64}
    assert kinds({**config, "sliding_window_layout": [0, 1, 1, 0]}) == [
        "full", "sliding", "sliding", "full"
    ]  # fmt: skip
    error = refused({**config, "interleaved_sliding_window": [64, None, 64, None]})
    assert error.field == "layer_types" and "interleaved_sliding_window" in str(error)


def test_an_unknown_type_that_names_its_layers_under_another_key():
    """Apriel-H's hybrid_block_layout and MiniCPM-SALA's mixer_types; a list of MLPs is none."""
    config = {**LLAMA, "model_type": "brand_new", "num_hidden_layers": 4}
    error = refused({**config, "mixer_types": ["attn", "lightning"] * 2})
    assert error.field == "layer_types" and "mixer_types" in str(error)
    assert kinds({**config, "mlp_layer_types": ["dense", *["sparse"] * 3]}) == ["full"] * 4


@pytest.mark.parametrize("model_type", ["rwkv6", "rwkv7", "retnet", "gla"])
def test_newer_recurrent_models_keep_no_rows(model_type):
    spec = read_config({**LLAMA, "model_type": model_type})
    assert costs.kv_bytes_per_token(spec) == 0
    assert any("not counted" in note for note in spec.notes)


# --- the second batch of reported faults -------------------------------------------------------


def test_cfg_18_a_window_no_smaller_than_the_context_is_none():
    """Phi-4-mini's published shape; Phi-3-mini-128k and Ministral-8B are of the kind."""
    phi = {**LLAMA, "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24,
           "sliding_window": 262_144, "max_position_embeddings": 131_072}  # fmt: skip
    spec = read_config(phi)
    assert costs.growing_bytes_per_token(spec) == 131_072 and costs.window_cap_bytes(spec) == 0
    assert any("no smaller than the context" in note for note in spec.notes)
    equal = {**phi, "sliding_window": 131_072}
    assert costs.growing_bytes_per_token(read_config(equal)) == 131_072
    smaller = read_config({**phi, "sliding_window": 131_071})
    assert costs.growing_bytes_per_token(smaller) == 0
    stretched = {**equal, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert costs.growing_bytes_per_token(read_config(stretched)) == 0, "the context is longer"


UNREAD = {
    "compress_ratios": [0, 0, 4, 128],
    "mean_recurrence": 32,
    "total_ut_steps": 4,
    "loop_num": 2,
    "swa_layers": [0, 2],
    "dsa_layers": [1, 3],
    "attn_layer_idxs": [3, 7],
    "num_swa_key_value_heads": 2,
    "kv_reuse_group": 2,
    "cross_layer_kv_sharing": True,
    "num_passes": 2,
    "yoco": True,
    "mixer_types": ["attention", "mamba"],
    "value_dim": 96,
    "num_global_kv_heads": 1,
}


@pytest.mark.parametrize("key", UNREAD)
def test_cfg_21_an_unknown_type_with_a_key_that_nobody_reads(key):
    config = {**LLAMA, "model_type": "brand_new", "num_hidden_layers": 4}
    assert refused({**config, key: UNREAD[key]}).field == key
    for silent in (None, False, [], 0):
        assert kinds({**config, key: silent}) == ["full"] * 4


def test_cfg_21_what_says_nothing_of_the_cache_is_no_reason_to_refuse():
    config = {**LLAMA, "model_type": "brand_new", "num_hidden_layers": 4, "max_window_layers": 28}
    harmless = {"attention_dropout": 0.1, "attention_bias": True, "layer_norm_eps": 1e-5,
                "use_cache": True, "q_lora_rank": 1536, "moe_layer_freq": 2, "num_experts": 64,
                "first_k_dense_replace": 3, "decoder_sparse_step": 2}  # fmt: skip
    assert kinds({**config, **harmless}) == ["full"] * 4


def test_cfg_21_the_architecture_names_the_family():
    for name in ("DoryForCausalLM", "HrmTextForCausalLM"):
        config = {**LLAMA, "model_type": "renamed", "architectures": [name]}
        assert refused(config).field == "architectures"
    assert kinds({**LLAMA, "model_type": "renamed", "architectures": ["LlamaForCausalLM"]})


def test_cfg_21_openpangu_spells_the_latent_in_its_own_way():
    config = {"model_type": "pangu_ultra_moe", "num_hidden_layers": 61, "hidden_size": 7680,
              "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 153600,
              "attention_q_lora_dim": 1536, "attention_kv_lora_dim": 512, "attention_qk_dim": 128,
              "attention_qk_rope_dim": 64, "attention_v_dim": 128}  # fmt: skip
    assert growing(config) == 70_272


def test_cfg_21_longcat_has_two_attentions_a_block():
    config = {"model_type": "longcat_flash_ngram", "num_layers": 14, "hidden_size": 3072,
              "num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
              "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip
    assert growing(config) == 32_256


def test_cfg_22_what_the_file_says_of_the_cache_itself():
    def notes(**changes):
        return " ".join(read_config({**LLAMA, "torch_dtype": "bfloat16", **changes}).notes)

    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert "cache in fp8" in notes(quantization_config=scheme)
    assert "dtype" not in notes()
    assert "auto; bf16 is assumed" in notes(torch_dtype="auto")
    assert "not in the file; bf16" in notes(torch_dtype=None)
    assert "float32" in notes(torch_dtype="float32")


def test_cfg_24_the_state_has_a_dtype_of_its_own():
    config = {**QWEN35, "mamba_ssm_dtype": "bfloat16"}
    full, half = (read_config(c) for c in (QWEN35, config))

    def summary(spec):
        return [s.bytes_per_element for x in spec.layers for s in x.state if "recurrent" in s.name]

    assert set(summary(full)) == {4} and set(summary(half)) == {2}
    assert any("bfloat16" in note for note in half.notes)
    assert refused({**QWEN35, "mamba_ssm_dtype": "int3"}).field == "mamba_ssm_dtype"


def test_cfg_20_compressed_rows_on_top_of_a_window():
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "hidden_size": 4096,
              "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
              "sliding_window": 128, "index_head_dim": 128, "index_topk": 512,
              "vocab_size": 129_280, "num_nextn_predict_layers": 1,
              "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0]}  # fmt: skip
    report = kv_report(read_config(config), tokens=128_000)
    assert report["kv_bytes_per_token_growing"] == 5_536
    assert report["indexer_bytes_per_token"] == 6_880 - 5_536
    assert report["window_cap_bytes_per_sequence"] == 5_636_096
    assert report["kv_bytes"] == 5_536 * 128_000 + 5_636_096
    assert refused({**config, "compress_ratios": None}).field == "compress_ratios"
    assert refused({**config, "model_type": "renamed"}).field == "compress_ratios"


def test_cfg_23_two_head_sizes_two_rotations():
    config = {"model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size": 5376,
              "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
              "global_head_dim": 512, "sliding_window": 1024, "vocab_size": 262_144,
              "rope_parameters": {
                  "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                     "partial_rotary_factor": 0.25},
                  "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
    spec = read_config(config)
    assert (spec.rope.rotary_dim, spec.rope_local.rotary_dim) == (512, 256)

    speeds, _ = rope_inv_freq(spec.rope)
    turning = [float(speed) for speed in speeds if speed]
    assert len(speeds) == 256 and len(turning) == 64
    assert turning[1] == pytest.approx(1e6 ** (-2 / 512))


# Published shapes that the reader had not seen, with bytes per token (2 bytes a value) and the cap
# of the windows worked out by hand first. From public tests that carry the files: Ling-lite-1.5,
# Trinity-Nano, Nemotron 3.5 Lightning, Ling 3 tiny, Gemma 4 E2B, GLM-5.3-Flash, Agnes 3.0 Flash.
_SLIDING = ["sliding_attention"]
UNSEEN = {
    "bailing_moe": ({"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4,
                     "first_k_dense_replace": 0, "hidden_size": 2048}, 57_344, 0),
    "afmoe": ({"num_hidden_layers": 56, "num_attention_heads": 8, "num_key_value_heads": 2,
               "head_dim": 128, "hidden_size": 1024, "global_attn_every_n_layers": 4,
               "sliding_window": 2048, "layer_types": (_SLIDING * 3 + ["full_attention"]) * 14},
              14 * 1024, 42 * 1024 * 2048),
    "nemotron_h": ({"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
                    "hidden_size": 2688, "mamba_num_heads": 64, "mamba_head_dim": 64,
                    "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 8,
                    "layers_block_type": ["mamba", "moe"] * 23 + ["attention"] * 6}, 6_144, 0),
    "bailing_hybrid": ({"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1536,
                        "layer_group_size": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                        "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128,
                        "short_conv_kernel_size": 4}, 6 * 576 * 2, 0),
    "gemma4_text": ({"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
                     "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 20,
                     "sliding_window": 512, "hidden_size": 1536,
                     "layer_types": (_SLIDING * 4 + ["full_attention"]) * 7},
                    3 * 2_048, 12 * 1_024 * 512),
    "glm5_next_text": ({"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 512,
                        "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0,
                        "v_head_dim": 256, "index_head_dim": 128, "index_topk": 16,
                        "index_kpool": 4, "layer_types": ["linear_attention"] * 3
                        + ["deepseek_sparse_attention"],
                        "linear_attn_config": {"num_heads": 4, "head_dim": 128,
                                               "short_conv_kernel_size": 4}}, 1_024, 0),
}  # fmt: skip


@pytest.mark.parametrize("model_type", UNSEEN)
def test_published_shapes_that_were_not_seen_before(model_type):
    config, growing, cap = UNSEEN[model_type]
    spec = read_config({"model_type": model_type, "vocab_size": 1_000, "dtype": "bfloat16",
                        "intermediate_size": 512, **config})  # fmt: skip
    assert (costs.growing_bytes_per_token(spec), costs.window_cap_bytes(spec)) == (growing, cap)
    assert costs.index_bytes_per_token(spec) == 0, "a pooled indexer is not counted, and it is said"


def test_a_kind_of_layer_under_a_new_name_is_refused():
    kinds = ["agnes_delta_attention"] * 3 + ["agnes_global_attention"]
    config = {**LLAMA, "model_type": "agnes_text", "num_hidden_layers": 4, "layer_types": kinds}
    assert refused(config).field == "layer_types"
