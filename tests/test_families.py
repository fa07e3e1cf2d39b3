"""Each family that kvlab runs, against transformers on tiny random models in float64.

A config and weights are saved by transformers and loaded by kvlab from the folder. Logits and greedy
ids agree through every way to decode: no cache, cached, padded, paged, the engine.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvlab import costs
from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.checkpoint import load, read_weights
from kvlab.configs import families, model_index, read_config
from kvlab.engine import Engine
from kvlab.errors import WeightError
from kvlab.generate import cached_generate, naive_generate, padded_generate, paged_generate
from kvlab.model import Decoder
from kvlab.notebook.measure import count_flops
from kvlab.sheet.cli import main
from kvlab.sheet.run import cost_report

SHAPE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "rope_theta": 1e4}  # fmt: skip


def longrope(share: float = 1.0) -> dict:
    pairs = int(8 * share) // 2
    settings = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": share,
                "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
                "long_factor": [2.0 + i for i in range(pairs)]}  # fmt: skip
    return {"rope_parameters": settings, "original_max_position_embeddings": 8}


CASES = {
    ("llama", "tied"): {"tie_word_embeddings": True},
    ("llama", "biased"): {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ("llama", "llama3"): {"rope_parameters": LLAMA3, "num_key_value_heads": 6},
    ("mistral", "window"): {"sliding_window": 5},
    ("mistral", "full"): {"sliding_window": None, "tie_word_embeddings": True},
    ("mistral", "head_dim"): {"sliding_window": 3, "head_dim": 16, "num_key_value_heads": 1},
    ("qwen2", "full"): {"tie_word_embeddings": True},
    ("qwen2", "window"): {**SLIDING, "max_window_layers": 1},
    ("qwen2", "listed"): {
        **SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    ("qwen3", "tied"): {"head_dim": 16, "tie_word_embeddings": True},
    ("qwen3", "window"): {**SLIDING, "head_dim": 8, "max_window_layers": 2},
    ("qwen3", "biased"): {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN},
    ("smollm3", "tied"): {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    ("smollm3", "window"): {**SLIDING, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    ("smollm3", "biased"): {
        "attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 1],
    },
    ("phi3", "window"): {"sliding_window": 5},
    ("phi3", "longrope"): longrope(),
    ("phi3", "partial"): {**longrope(0.5), "tie_word_embeddings": True, "sliding_window": 7},
}  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 90], [7, 18, 28, 18, 28, 45, 90, 45, 23, 53])


def folder_of(model_type: str, changes: dict, folder) -> object:
    """A random model of transformers, saved: norms and biases are random too."""
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    torch.manual_seed(len(changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn_like(weight) * scale + ("norm" in name))
    model.save_pretrained(folder)
    Tokenizer(WordLevel({"x": 0}, unk_token="x")).save(str(folder / "tokenizer.json"))
    return model


def in_float64(model):
    """transformers norms in float32 whatever the dtype: the same norm, with its mean in float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: (
                m.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
            )
    return model


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request, tmp_path_factory):
    """(transformers' model, what kvlab loads from its folder)."""
    folder = tmp_path_factory.mktemp("-".join(request.param))
    theirs = in_float64(folder_of(request.param[0], CASES[request.param], folder))
    return theirs, load(str(folder), dtype=torch.float64)


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def continued(model, prompt, n):
    ids = list(prompt)
    for _ in range(n):  # every token again: a longrope of transformers would leave stale keys
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_there_are_three_cases_of_each_family():
    listed = [model_type for model_type, _ in CASES]
    assert all(listed.count(model_type) >= 3 for model_type in families())
    assert set(listed) == set(families())


def test_logits_are_those_of_transformers(pair):
    """A whole prompt, and the same one in chunks and single tokens over a cache."""
    theirs, ours = pair
    ids = [*PROMPTS[0], *PROMPTS[1]]
    expected = logits_of(theirs, ids)
    assert float(expected.std()) > 0.1
    model, row = ours.model, torch.arange(len(ids))[None]
    naive = model.forward(torch.tensor([ids]), row, UncachedAttention(ours.spec))[0]
    torch.testing.assert_close(naive, expected, atol=1e-6, rtol=0)
    cache = ContiguousKVCache(ours.spec, 1, len(ids), torch.float64)
    attend, rows = CachedAttention(ours.spec, cache), []
    for start, stop in ((0, 4), (4, 5), (5, 11), *((i, i + 1) for i in range(11, len(ids)))):
        tokens = torch.tensor([ids[start:stop]])
        rows.append(model.forward(tokens, row[:, start:stop], attend)[0])
        cache.advance(stop - start)
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-6, rtol=0)


def test_greedy_ids_are_those_of_transformers(pair):
    theirs, ours = pair
    model = ours.model
    expected = [continued(theirs, prompt, 8) for prompt in PROMPTS]
    for loop in (naive_generate, cached_generate, paged_generate):
        assert [loop(model, prompt, 8) for prompt in PROMPTS] == expected, loop.__name__
    assert padded_generate(model, PROMPTS, 8) == expected
    engine = Engine(model, num_blocks=40, block_size=4, max_num_batched_tokens=8)
    assert [output.token_ids for output in engine.generate(PROMPTS, 8)] == expected


def test_parameters_and_flops_are_those_of_the_formulas(pair):
    theirs, ours = pair
    spec, model = ours.spec, ours.model
    assert costs.resident_params(spec) == sum(p.numel() for p in theirs.parameters())
    cache = ContiguousKVCache(spec, 1, 12, torch.float64)
    attend = CachedAttention(spec, cache)
    for start, stop in ((0, 7), (7, 10), (10, 11), (11, 12)):
        ids, positions = torch.ones(1, stop - start, dtype=torch.long), torch.arange(start, stop)
        fed = ids, positions[None], attend, "last"
        counted = count_flops(lambda fed=fed: model.forward(*fed))
        cache.advance(stop - start)
        assert counted == costs.masked_forward_flops(spec, stop - start, stop, 1), (start, stop)
        if stop - start == 1:  # what a run of `kvlab cost` sums up
            params = costs.streamed_params(spec)
            assert counted == costs.cached_step_flops(spec, params, stop), (start, stop)
    assert cost_report(spec, params="exact")["num_parameters"] == costs.streamed_params(spec)


def test_a_window_leaves_the_pairs_that_one_counts():
    spec = read_config({**SHAPE, "model_type": "mistral", "sliding_window": 5})
    for keys in range(1, 13):
        for queries in range(1, keys + 1):
            seen = sum(min(c, 5) for c in range(keys - queries + 1, keys + 1))
            assert costs.window_pairs(spec.layers[0], queries, keys) == seen


def test_a_short_context_of_longrope_takes_the_short_factors(tmp_path):
    """Chosen once, by the context that is served: within the original length as transformers."""
    theirs = in_float64(folder_of("phi3", longrope(), tmp_path))
    spec = replace(read_config(tmp_path), max_position_embeddings=8)
    model = Decoder(spec, read_weights(tmp_path))
    ids = PROMPTS[0][:8]
    ours = model.forward(torch.tensor([ids]), torch.arange(8)[None], UncachedAttention(spec))[0]
    torch.testing.assert_close(ours, logits_of(theirs, ids), atol=1e-6, rtol=0)


# --- what is refused --------------------------------------------------------------------------


def config_of(model_type: str, **changes) -> dict:
    text = CONFIG_MAPPING[model_type](**SHAPE).to_json_string(use_diff=False)
    config = json.loads(text)
    return {**config, "architectures": [families()[model_type]["architecture"]], **changes}


def refusal(config: dict) -> str:
    spec = read_config(config)
    if not spec.unsupported:
        return ""
    with pytest.raises(WeightError) as error:
        Decoder.random(spec)
    assert spec.unsupported in str(error.value)
    return spec.unsupported


@pytest.mark.parametrize("model_type", families())
def test_the_whole_config_of_each_class_is_known(model_type):
    """use_diff=False writes every field of the class: the allow-list leaves none out."""
    assert refusal(config_of(model_type)) == ""


@pytest.mark.parametrize("model_type", families())
@pytest.mark.parametrize("name", ["attn_logit_cap", "brand_new_switch", "residual_multiplier"])
@pytest.mark.parametrize("value", [False, 0, 2.5, "on", [1]], ids=str)
def test_a_key_that_nobody_knows_is_refused_unless_it_is_null(model_type, name, value):
    assert refusal(config_of(model_type, **{name: value})).startswith(name)
    assert refusal(config_of(model_type, **{name: None})) == ""


@pytest.mark.parametrize("model_type", families())
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "brand_new", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}},
        {"tie_encoder_decoder": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_value_that_is_not_computed_is_refused_by_name(model_type, changes):
    key = next(iter(changes))
    assert key.split("_")[0] in refusal(config_of(model_type, **changes))


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "sliding_window", 4),
        ("mistral", "layer_types", ["full_attention"] * 3),
        ("qwen2", "attention_bias", True),
        ("qwen2", "no_rope_layers", [1, 0, 1]),
        ("qwen3", "mlp_bias", True),
        ("phi3", "use_sliding_window", True),
        ("llama", "partial_rotary_factor", 0.5),
    ],
)
def test_a_key_of_another_family_is_refused(model_type, key, value):
    assert refusal(config_of(model_type, **{key: value})).startswith(key)


def test_layers_that_slide_by_one_key_and_not_by_another_are_refused():
    listed = ["sliding_attention", "full_attention", "full_attention"]
    config = config_of("qwen3", sliding_window=4, layer_types=listed)
    del config["use_sliding_window"]
    assert refusal(config).startswith("layers slide")
    config = config_of("mistral")
    del config["sliding_window"]
    assert refusal(config).startswith("sliding_window is not in the file")


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "mixtral", "qwen2_moe", "granite", "new"])
def test_another_model_type_is_refused(model_type):
    config = {**SHAPE, "model_type": model_type, "sliding_window": 4, "num_local_experts": 2}
    assert refusal(config).startswith("model_type")


def test_a_decoder_inside_another_model_is_refused():
    inner = {**SHAPE, "model_type": "llama"}
    assert refusal({"model_type": "llava", "text_config": inner}).startswith("model_type")


def test_load_refuses_before_it_reads_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3", hidden_act="gelu")))
    Tokenizer(WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WeightError, match="hidden_act"):
        load(str(tmp_path))


def test_a_tied_head_that_is_another_matrix_is_refused(tmp_path):
    folder_of("llama", {"tie_word_embeddings": True}, tmp_path)
    weights, spec = read_weights(tmp_path), read_config(tmp_path)
    embedding = weights["model.embed_tokens.weight"]
    Decoder(spec, {**weights, "lm_head.weight": embedding.clone()})
    with pytest.raises(WeightError, match="tie_word_embeddings"):
        Decoder(spec, {**weights, "lm_head.weight": embedding + 1})


# --- the command line -------------------------------------------------------------------------


def test_models_runnable_lists_the_families(capsys):
    assert main(["models", "--runnable", "--json"]) == 0
    rows = {row["model_type"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"]
    assert "qwen3-0.6b" in rows["qwen3"]["presets"] and "smollm2-135m" in rows["llama"]["presets"]
    assert main(["models", "--runnable"]) == 0
    text = capsys.readouterr().out
    assert all(row["architecture"] in text for row in rows.values())


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen2.5-7b", "phi-4", "phi-3-mini-4k"])
def test_cost_needs_no_number_of_parameters(model, capsys):
    assert main(["cost", model, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counted = model_index()[model]["params"]  # counted apart from the formulas
    assert report["num_parameters"] == int(float(f"{counted:.2e}"))
