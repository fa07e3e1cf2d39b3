"""The decoder against transformers' LlamaForCausalLM on the same weights, every position."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_spec
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab import checkpoint, costs
from kvlab.attention import CachedAttention, CountingAttention, UncachedAttention
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.errors import WeightError
from kvlab.fast import products_for
from kvlab.generate import cached_generate
from kvlab.model import Decoder, random_weights
from kvlab.specs import RopeSpec

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "grouped": {},
    "multi-head": {"num_kv_heads": 6},
    "multi-query": {"num_kv_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "declared-head-dim": {"head_dim": 16},
    "llama3-rope": {"rope": RopeSpec(500.0, 8, "llama3", tuple(sorted(LLAMA3_SCALING.items())))},
}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a girl who counted waves. " * 3,
    "1, 2, 3, 5, 8, 13,",
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def real():
    return checkpoint.load()


@pytest.fixture(scope="module")
def real_reference(real):
    return LlamaForCausalLM.from_pretrained(real.folder, dtype=torch.float32).eval()


def reference(spec, weights):
    """transformers' own Llama with these weights; the rotation named as before 5, which 5 reads."""
    scaling = {"rope_type": spec.rope.rope_type, **dict(spec.rope.params)}
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        tie_word_embeddings=spec.tie_word_embeddings,
        rope_theta=spec.rope.theta,
        rope_scaling=scaling if spec.rope.params else None,
    )
    model = LlamaForCausalLM(config).eval()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict({**weights, "lm_head.weight": head})
    return model


def run(model, token_ids, attend=None, rows=None, start=0):
    token_ids = torch.as_tensor(token_ids).view(1, -1)
    positions = torch.arange(start, start + token_ids.shape[1]).view(1, -1)
    return model.forward(token_ids, positions, attend or UncachedAttention(model.spec), rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 7, 50])
def test_logits_match_transformers_on_random_models(shape, length):
    spec = tiny_spec(**SHAPES[shape])
    weights = random_weights(spec, seed=length)
    ids = torch.randint(0, spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(2, -1)
    ours = Decoder(spec, weights).forward(ids, positions, UncachedAttention(spec))
    with torch.inference_mode():
        theirs = reference(spec, weights)(ids).logits
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_match_transformers_on_the_checkpoint(real, real_reference, prompt):
    ids = real.encode(prompt)
    ours = run(real.model, ids)
    with torch.inference_mode():
        theirs = real_reference(torch.tensor([ids])).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_logits_match_transformers_one_token_at_a_time(real, real_reference, prompt):
    ids = real.encode(prompt)
    attend = CachedAttention(real.spec, ContiguousKVCache(real.spec, 1, len(ids)))
    ours = []
    for position, token in enumerate(ids):
        ours.append(run(real.model, [token], attend, start=position)[0, 0])
        attend.cache.advance(1)
    with torch.inference_mode():
        theirs = real_reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.stack(ours), theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("chunks", [(7,), (1,) * 7, (3, 4), (5, 1, 1), (2, 3, 2)])
def test_att_01_chunked_prefill_gives_the_rows_of_a_whole_one(chunks):
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    ids = [3, 1, 4, 1, 5, 9, 2]
    whole = run(model, ids)
    cache = ContiguousKVCache(model.spec, 1, 7, torch.float64)
    attend, rows = CachedAttention(model.spec, cache), []
    for size in chunks:
        start = cache.length
        rows.append(run(model, ids[start : start + size], attend, start=start))
        cache.advance(size)
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, atol=1e-12, rtol=0)


def test_att_08_a_sliding_model_decodes_as_it_prefills():
    model = Decoder.random(tiny_spec(window=4), dtype=torch.float64)
    full = Decoder.random(tiny_spec(), dtype=torch.float64)
    ids = list(range(1, 12))
    whole = run(model, ids)
    assert not torch.allclose(whole[:, -1], run(full, ids)[:, -1])
    cache = ContiguousKVCache(model.spec, 1, len(ids), torch.float64)
    attend = CachedAttention(model.spec, cache)
    for position, token in enumerate(ids):
        row = run(model, [token], attend, start=position)
        cache.advance(1)
        torch.testing.assert_close(row[0, 0], whole[0, position], atol=1e-12, rtol=0)


@pytest.mark.parametrize("positions", [[[0]], [[0, 1]], [0, 1, 2, 3]], ids=str)
def test_pos_03_one_position_is_not_stretched_over_several_tokens(positions):
    model = Decoder.random(tiny_spec())
    with pytest.raises(AssertionError, match=r"tokens, .* positions"):
        model.forward(
            torch.tensor([[3, 1, 4]]), torch.tensor(positions), UncachedAttention(model.spec)
        )


def test_rows_picks_rows_and_changes_none():
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    positions = torch.arange(3).expand(2, -1)
    attend = UncachedAttention(model.spec)
    every = model.forward(ids, positions, attend)
    assert every.shape == (2, 3, 101)
    last = model.forward(ids, positions, attend, "last")
    torch.testing.assert_close(last, every[:, -1], atol=1e-12, rtol=0)
    some = model.forward(ids, positions, attend, torch.tensor([4, 0]))
    torch.testing.assert_close(some, every.view(6, -1)[[4, 0]], atol=1e-12, rtol=0)


@pytest.mark.parametrize("rows", [None, "last"])
def test_a_ragged_lead_of_tokens_works_as_a_batch_does(rows):
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    inner = UncachedAttention(model.spec)

    def attend(layer, *qkv):
        assert qkv[0].dim() == 3  # [num_tokens, heads, head_dim]
        return inner(layer, *(x[None] for x in qkv))[0]

    for length in (1, 4):
        ids = torch.arange(1, length + 1)
        flat = model.forward(ids, torch.arange(length), attend, rows)
        batch = model.forward(ids[None], torch.arange(length)[None], inner, rows)
        torch.testing.assert_close(flat, batch[0], atol=1e-12, rtol=0)


def test_cost_01_every_path_hands_over_the_same_kv_bytes():
    """Naive, cached, chunked, one token, batched, ragged: h_kv heads of K and V each, never h."""
    spec = tiny_spec()
    model = Decoder.random(spec)
    ids, per_token = [1, 2, 3, 4, 5, 6], costs.kv_bytes_per_token(spec, 4)
    seen = []

    class Watch:
        def __init__(self, attend):
            self.attend = attend

        def __call__(self, layer, query, key, value):
            assert key.shape[-2:] == value.shape[-2:] == (spec.num_kv_heads, spec.head_dim)
            seen.append(key.nbytes + value.nbytes)
            return self.attend(layer, query, key, value)

    def total(call):
        seen.clear()
        call()
        return sum(seen)

    cached = CachedAttention(spec, ContiguousKVCache(spec, 1, 6))
    grown = CachedAttention(spec, ConcatenatedKVCache(spec))
    inner = UncachedAttention(spec)

    def ragged(layer, *qkv):
        return inner(layer, *(x[None] for x in qkv))[0]

    whole = 6 * per_token
    assert total(lambda: run(model, ids, Watch(inner))) == whole
    assert total(lambda: run(model, ids, Watch(cached))) == whole
    assert total(lambda: run(model, ids, Watch(grown))) == whole
    assert total(lambda: model.forward(torch.tensor(ids), torch.arange(6), Watch(ragged))) == whole
    cached.cache.advance(6)
    cached.cache.drop_last(1)
    assert total(lambda: run(model, ids[-1:], Watch(cached), start=5)) == per_token
    cached.cache.truncate_to(2)
    assert total(lambda: run(model, ids[2:5], Watch(cached), start=2)) == 3 * per_token


def test_counting_attention_counts_one_row_per_token_and_layer():
    model = Decoder.random(tiny_spec())
    counter = CountingAttention(UncachedAttention(model.spec))
    run(model, [1, 2, 3], counter)
    assert counter.kv_rows == 3 * model.spec.num_layers


def test_weights_that_do_not_fit_the_spec_are_named():
    spec = tiny_spec()
    weights = random_weights(spec)
    short = dict(weights)
    del short["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightError, match=r"mlp\.up_proj"):
        Decoder(spec, short)
    with pytest.raises(WeightError, match="bias"):
        Decoder(spec, {**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.raises(WeightError, match="k_proj"):
        Decoder(tiny_spec(num_kv_heads=3, num_heads=6), weights)


def test_parameters_held_equal_the_formula():
    for spec in (tiny_spec(), tiny_spec(tie_word_embeddings=False)):
        held = sum(w.numel() for w in random_weights(spec).values())
        assert held == costs.resident_params(spec)


def test_layers_that_rotate_differently_are_refused():
    with pytest.raises(WeightError, match="rotates"):
        Decoder.random(tiny_spec(rope_local=RopeSpec(1_000.0, 8)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.1)]
)
def test_fast_products_give_the_logits_of_the_plain_ones(shape, dtype, atol):
    """A prompt, one token at a time after it, a chunk, and two rows at once."""
    spec = tiny_spec(**SHAPES[shape])
    plain = Decoder.random(spec, 1, dtype)
    fast = Decoder.random(spec, 1, dtype, products_for("cpu"))
    assert type(fast.products) is not type(plain.products)
    for sizes, batch in (((5, 1, 1, 3, 1), 1), ((4, 1, 1), 2)):
        logits = []
        for model in (plain, fast):
            cache = ContiguousKVCache(spec, batch, sum(sizes), dtype)
            attend, start, rows = CachedAttention(spec, cache), 0, []
            for size in sizes:
                ids = (torch.arange(batch * size).view(batch, size) * 7 + start) % spec.vocab_size
                positions = torch.arange(start, start + size).expand(batch, -1)
                rows.append(model.forward(ids, positions, attend, rows="last"))
                cache.advance(size)
                start += size
            logits.append(torch.stack(rows))
        torch.testing.assert_close(logits[0], logits[1], atol=atol, rtol=0)


def test_fast_products_write_the_same_text_on_the_checkpoint(real):
    plain = Decoder(real.spec, checkpoint.read_weights(real.folder))
    for prompt in PROMPTS[:2]:
        ids = real.encode(prompt)
        assert cached_generate(plain, ids, 24) == cached_generate(real.model, ids, 24)
