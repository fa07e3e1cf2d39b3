"""The contiguous cache: what it holds, what it refuses, what it copies."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_spec

from kvlab import costs
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.errors import CacheError


def rows(spec, num_tokens, start=0, batch=1):
    """K and V rows whose content tells their position."""
    key = torch.arange(start, start + num_tokens, dtype=torch.float32)
    key = key.view(1, -1, 1, 1).expand(batch, -1, spec.num_kv_heads, spec.head_dim)
    return key, -key


def fill(cache, spec, num_tokens):
    for layer in range(spec.num_layers):
        cache.write(layer, *rows(spec, num_tokens, cache.length))
    cache.advance(num_tokens)


def test_write_then_read_returns_every_row_in_order():
    spec = tiny_spec()
    cache = ContiguousKVCache(spec, 1, 16)
    for num_new in (6, 1, 1, 3):
        fill(cache, spec, num_new)
    for layer in range(spec.num_layers):
        key, value = cache.read(layer)
        assert key.shape == (1, 2, 11, 8)
        assert torch.equal(key[0, 1, :, 0], torch.arange(11.0))
        assert torch.equal(value, -key)


def test_a_layer_reads_what_it_has_just_written_before_the_others_have():
    spec = tiny_spec()
    cache = ContiguousKVCache(spec, 1, 16)
    fill(cache, spec, 4)
    cache.write(0, *rows(spec, 2, 4))
    assert cache.read(0)[0].shape[2] == 6 and cache.length == 4


def test_att_04_heads_are_stored_once_per_kv_head_and_bytes_match_the_cost_model():
    spec = tiny_spec(num_layers=1, hidden_size=32, num_heads=8, num_kv_heads=2, head_dim=4)
    cache = ContiguousKVCache(spec, 1, 10, torch.float32)
    assert cache.keys[0].shape == (1, 2, 10, 4)
    assert cache.keys[0].shape[1] == spec.num_kv_heads
    assert cache.nbytes == 640 == costs.kv_bytes(spec, 10, bytes_per_element=4)
    expanded = torch.zeros(1, 1, 8, 4)
    with pytest.raises(CacheError, match="do not repeat them"):
        cache.write(0, expanded, expanded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_allocated_bytes_equal_the_formula(dtype, num_kv_heads):
    spec = tiny_spec(num_kv_heads=num_kv_heads)
    for batch, max_len in ((1, 1), (1, 33), (4, 7)):
        cache = ContiguousKVCache(spec, batch, max_len, dtype)
        storages = {t.untyped_storage().data_ptr(): t for t in cache.keys + cache.values}
        measured = sum(t.untyped_storage().nbytes() for t in storages.values())
        formula = batch * costs.kv_bytes(spec, max_len, bytes_per_element=dtype.itemsize)
        assert cache.nbytes == measured == formula


def test_att_11_rollback_has_two_names_and_no_signed_argument():
    spec = tiny_spec()
    for change, length in (
        (lambda c: c.truncate_to(0), 0),
        (lambda c: c.drop_last(5), 0),
        (lambda c: c.drop_last(0), 3),
        (lambda c: c.drop_last(2), 1),
        (lambda c: c.truncate_to(9), 3),
        (lambda c: c.reset(), 0),
    ):
        cache = ContiguousKVCache(spec, 1, 8)
        fill(cache, spec, 3)
        change(cache)
        assert cache.length == length
        assert cache.read(0)[0].shape[2] == length
    for call in (cache.truncate_to, cache.drop_last):
        with pytest.raises(CacheError):
            call(-1)


def test_rows_after_a_rollback_are_overwritten():
    spec = tiny_spec()
    cache = ContiguousKVCache(spec, 1, 8)
    fill(cache, spec, 5)
    cache.drop_last(3)
    for layer in range(spec.num_layers):
        cache.write(layer, *rows(spec, 1, 70))
    cache.advance(1)
    assert cache.read(0)[0][0, 0, :, 0].tolist() == [0.0, 1.0, 70.0]


def test_a_full_cache_says_so_and_stays_as_it_was():
    spec = tiny_spec()
    cache = ContiguousKVCache(spec, 1, 4)
    fill(cache, spec, 4)
    with pytest.raises(CacheError, match="max_len 4"):
        cache.write(0, *rows(spec, 1))
    assert cache.length == 4
    with pytest.raises(CacheError):
        ContiguousKVCache(spec, 0, 4)


def test_preallocating_copies_nothing_and_never_moves():
    spec = tiny_spec()
    cache = ContiguousKVCache(spec, 1, 16)
    pointers = [t.data_ptr() for t in cache.keys + cache.values]
    for num_new in (6, 1, 1, 1):
        fill(cache, spec, num_new)
        key, value = cache.read(1)
        assert (key.data_ptr(), value.data_ptr()) == (pointers[1], pointers[spec.num_layers + 1])
    assert [t.data_ptr() for t in cache.keys + cache.values] == pointers
    assert cache.bytes_copied == 0


@pytest.mark.parametrize(("prompt", "decode"), [(1, 1), (5, 9), (12, 30)])
def test_growing_by_concatenation_copies_what_the_closed_form_says(prompt, decode):
    spec = tiny_spec()
    grown, preallocated = ConcatenatedKVCache(spec), ContiguousKVCache(spec, 1, prompt + decode)
    for num_new in [prompt] + [1] * decode:
        fill(grown, spec, num_new)
        fill(preallocated, spec, num_new)
    assert grown.bytes_copied == costs.kv_bytes_copied_by_concatenation(spec, prompt, decode, 4)
    assert grown.nbytes == preallocated.nbytes
    for layer in range(spec.num_layers):
        assert torch.equal(grown.read(layer)[0], preallocated.read(layer)[0])


@pytest.mark.parametrize("cache", [ContiguousKVCache])
@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (1, 1, 2, 8), (1, 2, 2, 1), (1, 2, 2, 7)])
@pytest.mark.parametrize("side", [0, 1])
def test_att_04_k_and_v_of_another_shape_are_refused_and_not_stretched(cache, shape, side):
    kept = cache(tiny_spec(window=4), 1, 10)
    rows = [torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8)]
    rows[side] = torch.ones(shape)
    with pytest.raises(CacheError, match="expected"):
        kept.write(0, *rows)
    assert not kept.keys[0].any() and not kept.values[0].any() and kept.length == 0


@pytest.mark.parametrize("cache", [ContiguousKVCache])
def test_att_04_a_layer_past_the_last_is_not_the_first_ones_values(cache):
    spec = tiny_spec(window=4)
    cache = cache(spec, 1, 8)
    row = torch.ones(1, 1, 2, 8)
    cache.write(0, row, 2 * row)
    with pytest.raises(IndexError):
        cache.write(spec.num_layers, 3 * row, 4 * row)
    with pytest.raises(IndexError):
        cache.read(spec.num_layers)
    assert [(t == i).all() for i, t in enumerate(cache.read(0), 1)] == [True, True]


def test_a_growing_cache_keeps_its_own_copy():
    cache, row = ConcatenatedKVCache(tiny_spec()), torch.ones(1, 1, 2, 8)
    cache.write(0, row, row)
    row.zero_()
    assert (cache.read(0)[0] == 1).all()


@pytest.mark.parametrize("make", [ContiguousKVCache, ConcatenatedKVCache])
def test_att_14_both_caches_answer_to_the_same_calls(make):
    spec = tiny_spec()
    cache = make(spec, 1, 6)
    fill(cache, spec, 4)
    cache.truncate_to(3)
    fill(cache, spec, 1)
    assert cache.read(0)[0][0, 0, :, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    cache.drop_last(2)
    assert cache.length == cache.read(1)[0].shape[2] == 2
    with pytest.raises(CacheError, match="exceed max_len 6"):
        cache.write(0, *rows(spec, 5, 2))
    cache.reset()
    cache.write(0, *rows(spec, 1))
    with pytest.raises(CacheError, match="1 tokens were written"):
        cache.advance(2)
    cache.reset()
    fill(cache, spec, 6)
    assert torch.equal(cache.read(2)[0][0, 0, :, 0], torch.arange(6.0))
