"""The adapter for transformers, on shapes of every version and on the one that is installed.

`make colab`, `make newest` and `make transformers4` run these tests on other versions.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import StaticCache

from kvlab.checkpoint import CheckpointError, cache_argument, cache_of, layer_key, load_with

KEY = torch.zeros(1, 3, 7, 64)


@pytest.mark.parametrize("cache", [
    SimpleNamespace(layers=[SimpleNamespace(keys=KEY, values=KEY)]),  # 4.56 and later, 5.x
    SimpleNamespace(key_cache=[KEY], value_cache=[KEY]),              # 4.36 to 4.55
    ((KEY, KEY),),                                                    # before
], ids=["layers", "key_cache", "tuples"])
def test_nb_04_layer_0_key_of_every_cache_object(cache):
    assert layer_key(cache).shape == (1, 3, 7, 64)
    for name in ("cache", "past_key_values"):
        assert cache_of(SimpleNamespace(**{name: cache})) is cache


def test_an_unknown_cache_object_is_named():
    with pytest.raises(CheckpointError, match="SimpleNamespace"):
        layer_key(SimpleNamespace(pages=[]))
    with pytest.raises(CheckpointError, match="use_cache=True"):
        cache_of(SimpleNamespace(logits=1))


def test_nb_04_the_dtype_keyword_of_every_version():
    class New:
        @classmethod
        def from_pretrained(cls, folder, dtype):
            return SimpleNamespace(eval=lambda: ("new", folder, dtype))

    class Old:
        @classmethod
        def from_pretrained(cls, folder, torch_dtype):
            return SimpleNamespace(eval=lambda: ("old", folder, torch_dtype))

    assert load_with(New, "f") == ("new", "f", torch.float32)
    assert load_with(Old, "f") == ("old", "f", torch.float32)


# --- the installed version ---


@pytest.fixture(scope="module")
def tiny():
    """A small Llama of the installed transformers, with random weights."""
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
                         eos_token_id=None)
    return LlamaForCausalLM(config).eval()


def run(model, length, **options):
    with torch.inference_mode():
        return model(torch.arange(length)[None], use_cache=True, **options)


def test_the_cache_of_a_forward(tiny):
    cache = cache_of(run(tiny, 5))
    for layer in (0, 1):
        assert layer_key(cache, layer).shape == (1, 2, 5, 8)
    assert not torch.equal(layer_key(cache, 0), layer_key(cache, 1))


def test_a_longer_forward_begins_with_the_same_keys(tiny):
    short, long = layer_key(cache_of(run(tiny, 5)), 1), layer_key(cache_of(run(tiny, 9)), 1)
    torch.testing.assert_close(long[:, :, :5], short)


def test_a_cache_that_is_handed_in_grows(tiny):
    cache = cache_of(run(tiny, 5))
    with torch.inference_mode():
        output = tiny(torch.tensor([[5]]), use_cache=True, **cache_argument(tiny, cache))
    torch.testing.assert_close(layer_key(cache_of(output)), layer_key(cache_of(run(tiny, 6))))


def test_the_cache_of_generate(tiny):
    """It holds the prompt and every new token but the last, which was never fed."""
    with torch.inference_mode():
        output = tiny.generate(torch.arange(1, 6)[None], max_new_tokens=4, do_sample=False,
                               use_cache=True, return_dict_in_generate=True)
    assert output.sequences.shape == (1, 9)
    assert layer_key(cache_of(output)).shape == (1, 2, 8, 8)


def test_a_static_cache_holds_rows_for_its_whole_length(tiny):
    cache = StaticCache(config=tiny.config, max_cache_len=16)
    keys = layer_key(cache_of(run(tiny, 5, **cache_argument(tiny, cache))))
    assert keys.shape == (1, 2, 16, 8)
    torch.testing.assert_close(keys[:, :, :5], layer_key(cache_of(run(tiny, 5))))
    assert not keys[:, :, 5:].any()


def test_without_a_cache_the_caller_is_told_how_to_get_one(tiny):
    with torch.inference_mode():
        output = tiny(torch.arange(5)[None], use_cache=False)
    with pytest.raises(CheckpointError, match="use_cache=True"):
        cache_of(output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_model_is_loaded_in_the_dtype_asked_for(tiny, tmp_path, dtype):
    tiny.save_pretrained(tmp_path)
    loaded = load_with(AutoModelForCausalLM, tmp_path, dtype)
    assert loaded.dtype is dtype and not loaded.training
    for name, weights in tiny.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weights.to(dtype)), name
