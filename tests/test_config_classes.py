"""The config reader against transformers' own config classes, for every decoder type they know.

Those classes resolve patterns that stand in no key. Each type is tried with its defaults, with
every list of layers taken out (so that the pattern must be implied), with other layer counts, and
with its switches turned. Where the two part, the modelling code was read and the reason is here.
"""

import copy
import functools
import itertools
import json
import os

import pytest
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvlab.configs import ConfigError, read_config
from kvlab.configs.fields import model_types

REFUSED = model_types()["facts"]["refused"]
IMPLIED = model_types()["facts"]["pattern"]
LONG = bool(os.environ.get("KVLAB_LONG"))
KINDS = {
    "full_attention": "full",
    "indexed_attention": "full",
    "minimax_m3_sparse": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "dummy": "none",
    "hybrid": "full",
    "hybrid_sliding": "sliding",
}
#: The class says one thing, the layers that it builds another; the reader follows the layers.
DEPARTURES = {
    "falcon": "multi_query gives one KV head, whatever the class reports",
    "mimo_v2_flash": "its attention doubles the KV heads of sliding layers",
    "inkling_text": "its sliding layers read swa_num_key_value_heads",
    "inkling_mm_model": "its sliding layers read swa_num_key_value_heads",
    "gpt_neo": "its local layers attend to window_size tokens; transformers keeps all of them",
    "mllama": "its cross-attention layers keep K and V of the image only",
    "mllama_text_model": "its cross-attention layers keep K and V of the image only",
}
#: No answer from one side: the class cannot resolve itself, or the reader names why it does not.
NO_ANSWER = {
    "blt": "three decoders in one",
    "pi0": "an action expert beside the language model",
    "rwkv": "no attention at all; transformers has no cache class for it",
    "xlstm": "no attention at all; transformers has no cache class for it",
    "gemma4_unified_assistant": "all its layers read another model's cache",
    "deepseek_v4": "its compress_ratios are read; test_cfg_20 has the sizes",
    "glm4_moe": "the class's defaults floor 4096 / 96; published files give head_dim",
    "glm4v_moe": "as glm4_moe",
    "glm4v_moe_text": "as glm4_moe",
    "qwen3_omni_moe": "the class's defaults floor 2048 / 28; published files give head_dim",
    "qwen3_omni_moe_text": "as qwen3_omni_moe",
    "qwen3_omni_moe_thinker": "as qwen3_omni_moe",
    "unlimited_ocr": REFUSED["unlimited_ocr_text"],
    "inkling2_loop": REFUSED["inkling2_loop_text"],
}
TYPES = [t for t in model_types()["known"] if t not in NO_ANSWER and t not in REFUSED]
PATTERN_KEYS = (
    "layer_types layers_block_type per_layer_config mlp_layer_types no_rope_layers "
    "full_attn_idxs moe_layers layer_rope_theta num_attention_heads_per_layer "
    "activation_sparsity_pattern mtp_layer_types attention_layers indexer_types "
    "hybrid_layer_ids"
).split()
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@functools.cache
def declared(model_type: str) -> dict:
    """The type's default config as JSON would have it."""
    return json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))


def without_patterns(config: dict, num_layers: int | None) -> dict:
    """The same config with no list of layers in it, and another number of layers if wanted."""
    result = copy.deepcopy(config)
    places = [result] + [result[k] for k in ("text_config", "thinker_config") if result.get(k)]
    places += [p["text_config"] for p in places[1:] if p.get("text_config")]
    for place in places:
        for key in PATTERN_KEYS:
            place.pop(key, None)
        for key in LAYER_COUNTS:
            if num_layers and isinstance(place.get(key), int):
                place[key] = num_layers
        if isinstance(place.get("intermediate_size"), list):
            place["intermediate_size"] = place["intermediate_size"][0]
    return result


def text_config(model_type: str, config: dict):
    """transformers' own reading of the dictionary, or None where it refuses it."""
    config = copy.deepcopy(config)
    for place in (config, config.get("text_config") or {}, config.get("llm_config") or {}):
        place.pop("time_step_limit", None)  # JSON has no tuples, and the class wants one
    try:
        config = CONFIG_MAPPING[model_type](**config).get_text_config(decoder=True)
        get_layer_types_and_kwargs(config)
        return config
    except Exception:  # the class's own validation: nothing to compare with
        return None


def layers_of_class(config) -> list[tuple]:
    """(kind, KV heads, K width, V width, window) of each layer, from the class's own fields."""
    kinds, settings = get_layer_types_and_kwargs(config)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    layers = []
    for kind, mode, setting, own in zip(
        kinds, modes, settings, config.per_layer_config, strict=True
    ):
        kind = KINDS[kind]
        if mode == "reuse" or kind in ("recurrent", "none"):
            layers.append(("shared",) if mode == "reuse" else (kind,))
            continue
        field = own.to_dict().get
        window = setting.get("sliding_window")
        if kind in ("sliding", "chunked") and window is None:
            kind = "full"  # the class names it sliding and gives it no window
        if kind == "sliding" and window >= (getattr(config, "max_position_embeddings", None) or window + 1):
            kind, window = "full", None  # CFG-18: it never cuts anything off
        rope_width = getattr(own, "qk_rope_head_dim", None)
        if getattr(own, "kv_lora_rank", None) and rope_width is not None:
            layers.append(("latent", 1, own.kv_lora_rank + rope_width, 0, window))
            continue
        heads = own.num_attention_heads
        kv_heads = getattr(own, "num_key_value_heads", None) or heads
        width = getattr(own, "head_dim", None) or config.hidden_size // heads
        layers.append((kind, kv_heads, width, field("v_head_dim") or width, window))
    return layers


def layers_of_reader(config: dict) -> list[tuple]:
    return [
        (layer.kind,)
        if layer.kind in ("shared", "recurrent", "none")
        else (layer.kind, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window)
        for layer in read_config(config).layers
    ]


def runs(layers: list[tuple]) -> list[tuple]:
    """The list with repeats counted: what a failing test shows."""
    return [(len(list(group)), layer) for layer, group in itertools.groupby(layers)]


def variants(model_type: str):
    base = declared(model_type)
    yield "defaults", base
    if "nemotron" in model_type or model_type == "nemo_speechlm":
        return  # these imply no pattern: test_a_hybrid_without_its_pattern_is_an_error
    if LONG:
        counts = (None, 7, 13, 30)
    else:  # without a list of layers only these types have anything to work out
        counts = (13,) if read_config(base).model_type in IMPLIED else ()
    for num_layers in counts:
        yield f"no pattern, {num_layers or 'same'} layers", without_patterns(base, num_layers)


@pytest.mark.parametrize("model_type", [t for t in TYPES if t not in DEPARTURES])
def test_layers_are_those_of_the_config_class(model_type):
    compared = 0
    for label, config in variants(model_type):
        truth = text_config(model_type, config)
        if truth is None or truth.num_hidden_layers <= (
            getattr(truth, "num_kv_shared_layers", 0) or 0
        ):
            continue
        assert runs(layers_of_reader(config)) == runs(layers_of_class(truth)), label
        compared += 1
    assert compared


@pytest.mark.parametrize("model_type", sorted(DEPARTURES))
def test_departures_from_the_config_class_are_still_departures(model_type):
    config = declared(model_type)
    assert layers_of_reader(config) != layers_of_class(text_config(model_type, config))


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_types_that_are_not_modelled_say_so(model_type):
    with pytest.raises(ConfigError) as caught:
        read_config({"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 64})
    assert caught.value.field == "model_type"


def test_a_hybrid_without_its_pattern_is_an_error():
    with pytest.raises(ConfigError) as caught:
        read_config({**declared("nemotron_h"), "layers_block_type": None, "num_hidden_layers": 13})
    assert caught.value.field == "layer_types"


QWENS = (
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen2_vl_text",
    "qwen2_5_omni_text",
    "smollm3",
)


@pytest.mark.parametrize("model_type", QWENS)
@pytest.mark.parametrize("switch", [True, False, None])
@pytest.mark.parametrize("first", [None, 2])
@pytest.mark.parametrize("window", [None, 512])
def test_qwen_gates(model_type, switch, first, window):
    config = without_patterns(declared(model_type), 6)
    given = {"use_sliding_window": switch, "max_window_layers": first, "sliding_window": window}
    for key, value in given.items():
        config.pop(key, None)
        if value is not None or key == "sliding_window":
            config[key] = value
    truth = text_config(model_type, config)
    assert runs(layers_of_reader(config)) == runs(layers_of_class(truth))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("cohere2", {"sliding_window_pattern": 3}),
        ("exaone4", {"sliding_window_pattern": 3}),
        ("afmoe", {"global_attn_every_n_layers": 3}),
        ("qwen3_next", {"full_attention_interval": 3}),
        ("qwen3_5_text", {"full_attention_interval": 5}),
        ("bailing_hybrid", {"layer_group_size": 3}),
        ("llama4_text", {"no_rope_layer_interval": 3}),
        ("llama4_text", {"attention_chunk_size": None}),
        ("llama4_text", {"no_rope_layers": [1, 1, 0, 1, 0, 1, 1, 0]}),
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 1}),
        ("bamba", {"attn_layer_indices": [1, 5]}),
        ("lfm2", {"full_attn_idxs": [0, 3]}),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}),
        ("kimi_linear", {"linear_attn_config": {
            "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 32,
            "head_dim": 128, "short_conv_kernel_size": 4}}),
        ("mimo_v2_flash", {"sliding_window_size": 64, "swa_num_key_value_heads": 4}),
        ("ministral", {"sliding_window": None}),
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": 256}),
        ("gemma4_text", {"global_head_dim": 64, "num_global_key_value_heads": 2,
                         "attention_k_eq_v": True}),
        ("gemma3n_text", {"num_kv_shared_layers": 3}),
        ("gemma4_text", {"num_kv_shared_layers": 2}),
        ("llama", {"num_key_value_heads": None, "head_dim": None}),
        ("zamba2", {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"] * 2}),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 4}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*E-M*"}),
        ("modernbert-decoder", {"local_attention": 64}),
    ],
)  # fmt: skip
def test_pattern_keys(model_type, changes):
    config = {**without_patterns(declared(model_type), 8), **changes}
    truth = text_config(model_type, config)
    assert runs(layers_of_reader(config)) == runs(layers_of_class(truth))


def test_defaults_are_those_of_the_config_classes():
    """Every number of data/model_types.json is the class's own."""
    aliases = {
        "sliding_window": ("sliding_window_size", "attention_window_size"),
        "head_dim": ("attention_head_dim", "kv_channels"),
        "linear_conv_kernel_dim": ("short_conv_kernel_size",),
        "mamba_head_dim": ("head_dim",),
    }
    wrong = []
    for model_type, defaults in model_types()["defaults"].items():
        kind = CONFIG_MAPPING[model_type]
        theta = getattr(kind, "default_theta", None)
        for key, value in defaults.items():
            if key.startswith("swa_") and model_type == "dots3_note_text":
                continue  # popped from keyword arguments in its __post_init__
            own = [getattr(kind, name, None) for name in (key, *aliases.get(key, ()))]
            own += [theta.get("global"), theta.get("local")] if isinstance(theta, dict) else [theta]
            if value not in own:
                wrong.append((model_type, key, value, own))
    assert not wrong


def test_rotary_settings_are_those_of_the_config_class():
    wrong = []
    for model_type in TYPES:
        config = declared(model_type)
        truth = text_config(model_type, config)
        settings = getattr(truth, "rope_parameters", None) if truth is not None else None
        if not settings:
            continue
        spec = read_config(config)
        main = settings.get("full_attention") or settings.get("hybrid") or settings
        local = settings.get("sliding_attention") or settings.get("hybrid_sliding")
        if "rope_theta" in main and float(main["rope_theta"]) != spec.rope.theta:
            wrong.append((model_type, main["rope_theta"], spec.rope.theta))
        if main.get("rope_type", "default") != spec.rope.rope_type:
            wrong.append((model_type, main.get("rope_type"), spec.rope.rope_type))
        if local and spec.rope_local and local["rope_theta"] != spec.rope_local.theta:
            wrong.append((model_type, local["rope_theta"], spec.rope_local.theta))
    assert not wrong
