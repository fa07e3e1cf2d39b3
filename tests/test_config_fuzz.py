"""Anything at all into the reader: a named error or a right answer, never another exception.

Right is checked by asking again: the layers of what was read must follow from the fields that the
config declares. KVLAB_LONG=1 runs many more examples.
"""

import contextlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab import costs
from kvlab.configs import DATA_DIR, model_names, read_config
from kvlab.configs.fields import parse_config
from kvlab.errors import KvlabError
from kvlab.sheet import ask_kv, kv_report

LONG = bool(os.environ.get("KVLAB_LONG"))
EXAMPLES = 3_000 if LONG else 150
quiet = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
PRESETS = {
    stem: json.loads((DATA_DIR / "models" / f"{stem}.json").read_text()) for stem in model_names()
}
KEYS = sorted({key for config in PRESETS.values() for key in config if key[:1] != "_"})
MORE_KEYS = [
    "num_kv_heads", "n_head", "n_layer", "n_embd", "multi_query", "attn_config", "block_configs",
    "per_layer_config", "layers_block_type", "attn_type_list", "hybrid_layer_pattern", "use_cla",
    "block_types", "full_attn_idxs", "attn_layer_indices", "linear_attn_config", "kv_lora_rank",
    "rope_parameters", "no_rope_layers", "num_kv_shared_layers", "cross_attention_layers", "llm",
    "thinker_config", "llm_config", "decoder", "use_mla", "alibi", "rotary_dim", "rotary_pct",
    "cla_share_factor", "num_mtp_layers", "sliding_window_size", "local_attention", "lru_width",
]  # fmt: skip
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["full_attention", "sliding_attention", "mamba", "M*", "yarn", "llama"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(KEYS + MORE_KEYS) | st.text(max_size=5), inner, max_size=5
        )
    ),
    max_leaves=12,
)


def outcome(source):
    """The spec, or None where a named error came instead; any other exception fails the test."""
    try:
        spec = read_config(source)
    except KvlabError as error:
        assert str(error) and "\n" not in str(error)
        return None
    check(spec)
    return spec


def check(spec) -> None:
    """What was read holds together, and no number of it is silent nonsense."""
    assert len(spec.layers) == spec.num_layers >= 1
    for layer in spec.layers:
        assert layer.kind in ("full", "sliding", "chunked", "latent", "recurrent", "shared", "none")
        if layer.kind in ("full", "sliding", "chunked", "latent"):
            assert layer.num_kv_heads >= 1 and layer.key_dim >= 1
            assert (layer.window is None) == (layer.kind in ("full", "latent")) or layer.window >= 1
        if layer.kind in ("full", "sliding", "chunked") and spec.num_heads and spec.num_kv_heads:
            assert spec.num_heads >= 1
    for value in (spec.num_kv_heads, spec.head_dim, spec.num_layers):
        assert type(value) is int and 0 <= value <= 10**9
    n = 1_000
    assert costs.kv_bytes(spec, n) <= n * costs.kv_bytes_per_token(spec)
    assert costs.kv_bytes(spec, n) >= n * costs.growing_bytes_per_token(spec)
    json.dumps(kv_report(spec, tokens=n), allow_nan=False)


@quiet
@given(st.sampled_from(sorted(PRESETS)), st.dictionaries(st.sampled_from(KEYS + MORE_KEYS), junk))
def test_presets_with_fields_replaced(stem, changes):
    config = dict(PRESETS[stem])
    if isinstance(config.get("text_config"), dict):
        outcome({**config, "text_config": {**config["text_config"], **changes}})
    outcome({**config, **changes})


@quiet
@given(st.sampled_from(sorted(PRESETS)), st.sets(st.sampled_from(KEYS), max_size=4))
def test_presets_with_fields_removed(stem, removed):
    """Without a field: an error, a note that says what took its place, or the same answer."""
    whole = PRESETS[stem]
    inner = "text_config" if "text_config" in whole else None
    config = {k: v for k, v in whole.items() if k not in removed}
    if inner in config:
        config[inner] = {k: v for k, v in config[inner].items() if k not in removed}
    spec = outcome(config)
    if spec is not None and inner not in removed:
        before = read_config(whole)
        # a file that never names a window means none, where its type has no window of its own
        windowless = "sliding_window" in removed and "phi3" in spec.model_type
        if before.layers != spec.layers and not windowless:
            assert set(spec.notes) - set(before.notes), removed


@quiet
@given(junk)
def test_any_json_value(value):
    if isinstance(value, dict):
        outcome(value)
    try:
        text = json.dumps(value)
    except ValueError:
        return
    with contextlib.suppress(KvlabError):
        parse_config(text)


@quiet
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_text(text):
    with pytest.raises(KvlabError):
        ask_kv(config=text)


@quiet
@given(
    st.integers(1, 8), st.integers(1, 16), st.integers(1, 6), st.integers(1, 5),
    st.integers(1, 200), st.lists(st.sampled_from(["full_attention", "sliding_attention"])),
)  # fmt: skip
def test_generated_configs_give_the_closed_form(kv_heads, head_dim, group, layers, tokens, kinds):
    kinds = (kinds * 5 + ["full_attention"] * 5)[:layers]
    config = {
        "num_hidden_layers": layers,
        "hidden_size": kv_heads * group * head_dim,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "layer_types": kinds,
        "sliding_window": 16,
    }
    held = sum(tokens if kind == "full_attention" else min(tokens, 16) for kind in kinds)
    spec = outcome(config)
    assert costs.kv_bytes(spec, tokens) == held * 2 * kv_heads * head_dim * 2


@pytest.mark.parametrize("depth", [10, 900, 100_000])
@pytest.mark.parametrize("key", ["text_config", "rope_scaling", "a"])
def test_deep_nesting(depth, key):
    text = f'{{"{key}":' * depth + "1" + "}" * depth
    with pytest.raises(KvlabError):
        read_config(text)
    nested: object = 1
    for _ in range(depth):
        nested = {key: nested}
    with pytest.raises(KvlabError):
        read_config(nested)
    for field in ("num_hidden_layers", "layer_types", "rope_scaling", "model_type", "head_dim"):
        with pytest.raises(KvlabError):
            read_config({**PRESETS["llama-3-8b"], field: nested})
    # taking a tower this deep apart would itself recurse: one level at a time
    while isinstance(nested, dict):
        nested = nested.pop(key)


NO_JSON = {"huge": 10**5000, "negative": -(10**5000), "object": object(), "set": {1, 2},
           "bytes": b"x", "complex": 1j, "infinite": float("inf")}  # fmt: skip


@pytest.mark.parametrize("name", NO_JSON)
def test_values_that_no_json_holds(name):
    value = NO_JSON[name]
    for field in ("num_hidden_layers", "head_dim", "layer_types", "rope_theta", "rope_scaling"):
        with pytest.raises(KvlabError) as caught:
            read_config({**PRESETS["llama-3-8b"], field: value})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 2**20, "x" * 2**20, '{"a": "' + "b" * 2**20 + '"}',
                                  '{"num_hidden_layers": 1' + "0" * 2**20 + "}"])  # fmt: skip
def test_a_megabyte_of_junk(text):
    with pytest.raises(KvlabError) as caught:
        ask_kv(config=text)
    assert len(str(caught.value)) < 400


def test_every_field_of_every_preset_with_every_wrong_type():
    wrong = [True, 3.5, "8", [], {}, [1], -1, 0, 10**30, float("nan"), float("inf"), None, [[[]]]]
    few = ("llama-3-8b", "gemma-3-27b", "qwen3.5-27b", "deepseek-v3", "falcon-7b", "gpt-oss-20b",
           "jamba-v0.1", "nemotron-3-nano-30b-a3b", "gemma-3n-e4b", "llama-4-scout")  # fmt: skip
    for stem in PRESETS if LONG else few:
        config = PRESETS[stem]
        place = config.get("text_config", config)
        for key in [k for k in place if k[:1] != "_"]:
            for value in wrong:
                changed = {**place, key: value}
                outcome({**config, "text_config": changed} if place is not config else changed)
