"""The naive and the cached loop: the same tokens, and the counts the formulas promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny_spec

from kvlab import checkpoint, costs
from kvlab.attention import CountingAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.errors import CacheError, RequestError
from kvlab.generate import (
    cached_generate,
    max_outputs,
    naive_generate,
    padded_generate,
    paged_generate,
)
from kvlab.model import Decoder

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-4, torch.bfloat16: 0.25}


def steps_of(generate, model, prompt, count, **options):
    steps = []
    outputs = generate(model, prompt, count, on_step=steps.append, **options)
    assert outputs == [step.token_id for step in steps]
    return steps


def agree_until_a_near_tie(naive, cached, tolerance):
    """Logits within tolerance at every step; ids equal until a top-2 gap is below it.

    Returns the number of steps compared. After a near-tie the two feed different tokens.
    """
    for count, (a, b) in enumerate(zip(naive, cached, strict=True)):
        assert a.seq_len == b.seq_len
        torch.testing.assert_close(a.logits, b.logits, atol=tolerance, rtol=0)
        top = a.logits.float().topk(2).values
        if a.token_id != b.token_id:
            assert top[0] - top[1] <= 2 * tolerance
            return count + 1
    return len(naive)


@pytest.mark.parametrize("seed", range(4))
def test_naive_and_cached_ids_are_equal_in_float64(seed):
    model = Decoder.random(tiny_spec(), seed, torch.float64)
    prompt = [seed + 1, 2, 3, 5, 8]
    naive = steps_of(naive_generate, model, prompt, 64)
    cached = steps_of(cached_generate, model, prompt, 64)
    assert [s.token_id for s in naive] == [s.token_id for s in cached]
    assert agree_until_a_near_tie(naive, cached, TOLERANCE[torch.float64]) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_att_05_lower_precision_agrees_until_a_near_tie(dtype):
    model = Decoder.random(tiny_spec(), 3, dtype)
    naive = steps_of(naive_generate, model, [1, 2, 3, 5, 8], 64)
    cached = steps_of(cached_generate, model, [1, 2, 3, 5, 8], 64)
    compared = agree_until_a_near_tie(naive, cached, TOLERANCE[dtype])
    assert compared >= (32 if dtype == torch.float32 else 1)


def test_naive_and_cached_agree_on_the_checkpoint_at_every_step():
    loaded = checkpoint.load()
    prompt = loaded.encode("The capital of France is Paris. The capital of Italy is")
    naive = steps_of(naive_generate, loaded.model, prompt, 24)
    cached = steps_of(cached_generate, loaded.model, prompt, 24)
    # one thread and several add up in other orders, which moves a logit by up to 6e-4
    assert agree_until_a_near_tie(naive, cached, 2e-3) == 24
    assert "Rome" in loaded.decode([s.token_id for s in cached])


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 100), min_size=1, max_size=20),
    count=st.integers(1, 12),
    chunk=st.integers(1, 25),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    window=st.sampled_from([None, 1, 4, 16]),
)
def test_att_01_any_chunking_of_any_prompt_gives_the_naive_ids(
    prompt, count, chunk, kv_heads, window
):
    model = Decoder.random(tiny_spec(num_kv_heads=kv_heads, window=window), 1, torch.float64)
    expected = naive_generate(model, prompt, count)
    assert cached_generate(model, prompt, count) == expected
    assert cached_generate(model, prompt, count, chunk_size=chunk) == expected


def test_pos_02_each_token_is_fed_at_its_own_position_once():
    model = Decoder.random(tiny_spec())
    steps = steps_of(cached_generate, model, [1, 2, 3, 4, 5, 6], 4)
    fed = [s.positions.flatten().tolist() for s in steps]
    assert fed == [[0, 1, 2, 3, 4, 5], [6], [7], [8]]
    assert [positions[0] for positions in fed] == [0, 6, 7, 8]
    for step in steps:
        assert step.positions[0, -1] == step.seq_len - 1


def test_pos_02_four_draft_tokens_stand_at_four_positions():
    """A chunk after 10 cached tokens is fed at 10, 11, 12, 13."""
    model = Decoder.random(tiny_spec())
    cache = ContiguousKVCache(model.spec, 1, 14)
    cached_generate(model, list(range(10)), 1, cache=cache)
    steps = steps_of(cached_generate, model, list(range(14)), 1, cache=cache)
    assert steps[0].positions.flatten().tolist() == [10, 11, 12, 13]


def test_prefill_samples_the_first_output_and_n_forwards_make_n_plus_one():
    model = Decoder.random(tiny_spec())
    steps = steps_of(cached_generate, model, [1, 2, 3, 4], 6)
    assert [s.t for s in steps] == [0, 1, 2, 3, 4, 5]
    assert [s.seq_len for s in steps] == [4, 5, 6, 7, 8, 9]  # s_t = p + t
    assert [s.num_rows for s in steps] == [1] * 6


def test_att_07_the_last_output_needs_no_position():
    model = Decoder.random(tiny_spec(max_position_embeddings=10))
    for generate in (naive_generate, cached_generate):
        steps = steps_of(generate, model, [1, 2, 3, 4, 5], 10)
        assert len(steps) == 6  # 5 fed back at positions 5..9, and one more sampled
        assert max(int(s.positions.max()) for s in steps) == 9
        assert len(generate(model, list(range(10)), 10)) == 1
        with pytest.raises(RequestError, match="context length of 10"):
            generate(model, list(range(11)), 1)
        with pytest.raises(RequestError):
            generate(model, [], 1)
    assert max_outputs(10, 5, 10) == 6 and max_outputs(None, 5, 10) == 10
    assert cached_generate(model, [1, 2], 0) == naive_generate(model, [1, 2], 0) == []


def test_both_loops_stop_at_any_of_several_end_tokens():
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    free = naive_generate(model, [1, 2, 3], 12)
    last = free[4]
    expected = free[: free.index(last) + 1]
    for generate in (naive_generate, cached_generate):
        assert generate(model, [1, 2, 3], 12, eos=last) == expected
        assert generate(model, [1, 2, 3], 12, eos={last, 100_000}) == expected


@pytest.mark.parametrize(("prompt_len", "decode"), [(1, 1), (4, 7), (11, 20)])
def test_recomputed_rows_and_discarded_logits_equal_their_closed_forms(prompt_len, decode):
    model = Decoder.random(tiny_spec())
    prompt = list(range(1, prompt_len + 1))
    counter = CountingAttention(UncachedAttention(model.spec))
    steps = steps_of(naive_generate, model, prompt, decode + 1, attend=counter)
    distinct = model.spec.num_layers * (prompt_len + decode)
    recomputed = costs.kv_rows_recomputed(model.spec, prompt_len, decode)
    assert counter.kv_rows - distinct == recomputed
    for step in steps:
        assert step.num_rows - 1 == costs.logit_rows_discarded(step.seq_len)


def test_the_cached_loop_allocates_its_cache_once_and_no_more_than_it_fills():
    model = Decoder.random(tiny_spec())
    cache = ContiguousKVCache(model.spec, 1, 40)
    pointers = [t.data_ptr() for t in cache.keys + cache.values]
    cached_generate(model, [1, 2, 3], 20, cache=cache)
    assert cache.length == 3 + 20 - 1
    assert [t.data_ptr() for t in cache.keys + cache.values] == pointers
    assert cache.bytes_copied == 0


def test_a_cache_that_holds_a_prefix_is_continued():
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    expected = naive_generate(model, [1, 2, 3, 4, 5, 6], 5)
    for known in (3, 6):  # a whole known prompt still needs one token computed
        cache = ContiguousKVCache(model.spec, 1, 12, torch.float64)
        cached_generate(model, [1, 2, 3, 4, 5, 6][:known], 1, cache=cache)
        assert cached_generate(model, [1, 2, 3, 4, 5, 6], 5, cache=cache) == expected


def test_a_decode_step_allocates_the_same_whatever_the_context():
    """No mask, no positions, no copy of the cache: none of a step's memory grows with s."""

    def allocated(context):
        spec = tiny_spec(max_position_embeddings=4096)
        model, peak = Decoder.random(spec), []
        cache = ContiguousKVCache(spec, 1, context + 1)
        cache.length = context  # as if so many tokens were written
        with torch.profiler.profile(profile_memory=True) as profile:
            cached_generate(model, [1] * (context + 1), 1, cache=cache)
        for event in profile.events():
            peak.append(max(event.self_cpu_memory_usage, 0))
        # what does grow: the prompt's own ids and positions, 8 bytes a token each
        return sum(peak) - 2 * 8 * (context + 1)

    # past 512 keys torch's attention works in tiles of a fixed size
    assert allocated(4000) <= allocated(1000) + 4096


@pytest.mark.parametrize(
    ("num_layers", "dtype"), [(2, torch.float32), (4, torch.float32), (3, torch.float16)]
)
def test_att_04_a_cache_of_another_model_is_named(num_layers, dtype):
    cache = ContiguousKVCache(tiny_spec(num_layers=num_layers), 1, 8, dtype)
    with pytest.raises(CacheError, match="expected the model's 3 layers"):
        cached_generate(Decoder.random(tiny_spec()), [1, 2], 3, cache=cache)


LOOPS = {
    "naive": naive_generate,
    "cached": cached_generate,
    "paged": paged_generate,
    "padded": lambda model, prompt, count: padded_generate(model, [[1, 2], prompt], count),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ([1, 101], 2, "prompt token 1 is 101; expected a whole number from 0 to 100"),
        ([-1], 2, "prompt token 0=-1"),
        ([1.0], 2, "prompt token 0=1.0"),
        (torch.tensor([[1, 2]]), 2, "prompt token 0="),
        ("text", 2, "encode text first"),
        (7, 2, "expected a list of token ids"),
        ([1], 2.5, "max_new_tokens=2.5; expected a whole number"),
        ([1], None, "max_new_tokens=None"),
    ],
    ids=str,
)
def test_what_is_no_prompt_or_no_count_is_named_by_every_loop(loop, prompt, count, words):
    with pytest.raises(RequestError, match=words):
        loop(Decoder.random(tiny_spec()), prompt, count)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_tensor_is_a_prompt_for_every_loop(loop):
    model = Decoder.random(tiny_spec())
    assert loop(model, torch.tensor([3, 1, 4]), 3) == loop(model, [3, 1, 4], 3)


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_a_chunk_of_no_tokens_is_named(chunk_size):
    with pytest.raises(CacheError, match=f"chunk_size={chunk_size}; expected a whole number, 1 or more"):
        cached_generate(Decoder.random(tiny_spec()), [1, 2, 3], 2, chunk_size=chunk_size)
