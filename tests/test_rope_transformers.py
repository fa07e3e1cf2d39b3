"""kvlab's frequencies against transformers' own, for every rule and every config in data/models."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvlab.configs import DATA_DIR, model_names, preset, read_config
from kvlab.configs.fields import language_model
from kvlab.rope import apply_rope, rope_inv_freq, rope_tables

LONG = {
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [2.0 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
RULES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
     "truncate": False, "beta_fast": 20, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
     "mscale": 0.707, "mscale_all_dim": 0.5},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", "factor": 4.0, **LONG},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
]  # fmt: skip


def theirs(config, seq_len=None, layer_type=None):
    """transformers' inv_freq and factor. It has no function for "default": linear with factor 1."""
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    rule = parameters["rope_type"]
    if rule == "default":
        config = copy.deepcopy(config)
        inner = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        inner.update(rope_type="linear", factor=1.0)
        rule = "linear"
    # "proportional" pads the head it is given; the others cut it by partial_rotary_factor.
    return ROPE_INIT_FUNCTIONS[rule](config, torch.device("cpu"), seq_len, layer_type=layer_type)


def assert_same(rope, config, layer_type=None):
    for seq_len in (None, 100, 5000, 20_000):
        inv_freq, factor = theirs(config, seq_len, layer_type)
        ours, our_factor = rope_inv_freq(rope, seq_len)
        torch.testing.assert_close(ours, inv_freq, rtol=2e-6, atol=0)
        assert our_factor == pytest.approx(factor, abs=1e-12)
        if rope.rope_type in ("default", "linear", "llama3"):
            assert torch.equal(ours, inv_freq)  # bit for bit: the same float32 operations


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_every_rule_equals_transformers(rule):
    share = rule.get("partial_rotary_factor", 1.0)
    head_dim = 64 if rule["rope_type"] == "proportional" or share == 1.0 else 128
    shape = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "num_key_value_heads": 2}
    data = {
        "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100, "head_dim": head_dim,
        "intermediate_size": 64, "max_position_embeddings": 16_384, **shape,
        "rope_parameters": {"rope_theta": 500_000.0, **rule},
    }  # fmt: skip
    spec = read_config(data)
    assert spec.rope.rope_type == rule["rope_type"]
    assert_same(spec.rope, LlamaConfig(**copy.deepcopy(data)))


def test_rotation_equals_transformers_bit_for_bit():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=4096
    )
    q, k = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 40, 64)
    positions = torch.arange(900, 940)[None]
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    right = apply_rotary_pos_emb(q, k, cos, sin)
    rope = read_config({**config.to_dict(), "model_type": "llama"}).rope
    tables = rope_tables(rope, positions)
    for x, expected in zip((q, k), right, strict=True):
        ours = apply_rope(x.transpose(1, 2), *tables).transpose(1, 2)
        assert torch.equal(ours, expected)


def _config_of(name):
    data = json.loads((DATA_DIR / "models" / f"{name}.json").read_text("utf-8"))
    data = {key: value for key, value in data.items() if not key.startswith("_")}
    inner, _ = language_model(data)
    return {key: value for key, value in inner.items() if not key.startswith("_")}


def _rotating():
    """(name, model_type) of the configs that rotate and that transformers knows."""
    for name in model_names():
        model_type = str(_config_of(name).get("model_type"))
        if preset(name).rope.rope_type != "none" and model_type in CONFIG_MAPPING:
            yield name, model_type


@pytest.mark.parametrize(("name", "model_type"), list(_rotating()))
def test_every_config_in_data_equals_transformers(name, model_type):
    spec, config = preset(name), CONFIG_MAPPING[model_type](**_config_of(name))
    if config.get_text_config() is not config:  # a wrapper around the language model
        config = type(config.get_text_config())(**_config_of(name))
    parameters = config.rope_parameters
    if "rope_type" in parameters:
        assert_same(spec.rope, config)
        return
    assert_same(spec.rope, config, "full_attention")
    if "sliding_attention" in parameters:
        assert_same(spec.rope_local or spec.rope, config, "sliding_attention")
