"""Reference attention against a plain one written out per head."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_models import tiny_spec

from kvlab.attention import CachedAttention, UncachedAttention, attention, causal_mask
from kvlab.errors import AttentionError


def by_hand(query, key, value, window=None):
    """One head and one query at a time, in float64."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    out = torch.empty(batch, num_queries, num_heads, value.shape[-1], dtype=torch.float64)
    query, key, value = query.double(), key.double(), value.double()
    for b in range(batch):
        for i in range(num_queries):
            position = num_keys - num_queries + i
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                k = key[b, kv_head, first : position + 1]
                scores = k @ query[b, i, head] / math.sqrt(head_dim)
                out[b, i, head] = scores.softmax(0) @ value[b, kv_head, first : position + 1]
    return out


def random_qkv(batch=2, num_queries=3, num_keys=7, heads=6, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, num_queries, heads, dim, generator=g)
    key = torch.randn(batch, kv_heads, num_keys, dim, generator=g)
    value = torch.randn(batch, kv_heads, num_keys, dim, generator=g)
    return query, key, value


@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (6, 6), (9, 3)])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (2, 5), (5, 5), (4, 9), (9, 9)])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 64])
def test_attention_equals_the_plain_one(heads, lengths, window):
    qkv = random_qkv(num_queries=lengths[0], num_keys=lengths[1], heads=heads[0], kv_heads=heads[1])
    got = attention(*qkv, window=window)
    assert got.shape == qkv[0].shape
    torch.testing.assert_close(got.double(), by_hand(*qkv, window=window), atol=2e-6, rtol=1e-5)


def test_att_01_mask_is_aligned_bottom_right():
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 5).int().tolist() == [[1, 1, 1, 1, 1]]


def test_att_01_one_query_sees_every_key():
    query, key, value = random_qkv(num_queries=1, num_keys=5)
    only_first = value[:, :, :1].expand(-1, -1, 6 // 2, -1).reshape(2, 1, 6, 8)
    got = attention(query, key, value)
    assert not torch.allclose(got, only_first, atol=1e-2)
    torch.testing.assert_close(got.double(), by_hand(query, key, value), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_att_01_chunks_of_a_prompt_give_the_same_rows(chunk):
    query, key, value = random_qkv(batch=1, num_queries=5, num_keys=5)
    whole = attention(query, key, value)
    pieces = [
        attention(query[:, a : a + chunk], key[:, :, : a + chunk], value[:, :, : a + chunk])
        for a in range(0, 5, chunk)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 2, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3)])
def test_att_03_query_head_j_reads_kv_head_j_over_group(num_queries, heads, kv_heads):
    query = torch.randn(1, num_queries, heads, 4)
    value = torch.arange(float(kv_heads)).view(1, -1, 1, 1).expand(1, kv_heads, 5, 4).contiguous()
    got = attention(query, value, value)[0, -1, :, 0].round().int().tolist()
    assert got == [head // (heads // kv_heads) for head in range(heads)]


def test_att_08_a_window_counts_the_query_itself():
    mask = causal_mask(201, 201, window=128)
    assert mask[200].nonzero().flatten().tolist() == list(range(73, 201))
    small = causal_mask(6, 6, window=3)
    assert [small[i].nonzero().flatten().tolist() for i in (4, 5)] == [[2, 3, 4], [3, 4, 5]]


@pytest.mark.parametrize("num_queries", [1, 2])
def test_att_08_decode_and_chunk_cut_the_window_alike(num_queries):
    query, key, value = random_qkv(num_queries=num_queries, num_keys=201)
    got = attention(query, key, value, window=128)
    key[:, :, : 201 - 128 - num_queries + 1] = float("nan")  # a key outside must not be read
    narrow = attention(query[:, -1:], key[:, :, -128:], value[:, :, -128:])
    torch.testing.assert_close(got[:, -1:], narrow, atol=1e-6, rtol=1e-5)


def test_one_query_builds_no_mask_and_copies_neither_k_nor_v():
    query, key, value = random_qkv(num_queries=1, num_keys=4096, heads=6, kv_heads=2, dim=64)
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(query, key, value)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert allocated < key.nbytes / 4


def test_shapes_that_fit_no_group_are_named():
    query, key, value = random_qkv(heads=5, kv_heads=2)
    with pytest.raises(AssertionError, match="whole groups"):
        attention(query, key, value)
    query, key, value = random_qkv(num_queries=8, num_keys=7)
    with pytest.raises(AssertionError, match="last of the keys"):
        attention(query, key, value)


@pytest.mark.parametrize("num_queries", [1, 2, 5])
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)),  # one batch for two
        ((1, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
        ((1, 4, 8), (1, 2, 5, 8), (1, 1, 5, 8)),  # one V head for two
        ((1, 4, 8), (1, 2, 5, 8), (1, 2, 6, 8)),  # a value more than keys
        ((1, 4, 8), (1, 2, 5, 9), (1, 2, 5, 8)),
        ((1, 4, 8), (1, 0, 5, 8), (1, 0, 5, 8)),
        ((1, 0, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    ],
)
def test_att_03_nothing_is_stretched_to_fit(num_queries, query, key, value):
    query = torch.randn(query[0], num_queries, *query[1:])
    with pytest.raises(AssertionError, match=r"heads|head_dim|value"):
        attention(query, torch.randn(key), torch.randn(value))


@pytest.mark.parametrize("num_queries", [1, 2, 5])
def test_an_empty_batch_gives_an_empty_answer(num_queries):
    key, value = torch.randn(0, 2, 5, 8), torch.randn(0, 2, 5, 16)
    assert attention(torch.randn(0, num_queries, 4, 8), key, value).shape == (0, num_queries, 4, 16)


@pytest.mark.parametrize("num_queries", [1, 2, 5])
def test_att_08_a_window_of_nothing_is_refused(num_queries):
    query, key = torch.randn(1, num_queries, 4, 8), torch.randn(1, 2, 5, 8)
    for window in (0, -1):
        with pytest.raises(AttentionError, match="window"):
            attention(query, key, key, window=window)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
@pytest.mark.parametrize("num_queries", [1, 2, 5])
def test_att_13_a_scale_that_is_no_positive_number_is_refused(num_queries, scale):
    query, key = torch.randn(1, num_queries, 4, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(AttentionError, match="positive number"):
        attention(query, key, key, scale=scale)


def test_att_01_no_query_is_refused():
    with pytest.raises(AssertionError, match="last of the keys"):
        attention(torch.randn(1, 0, 4, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))


def test_cfg_17_a_chunked_layer_is_not_run_as_a_sliding_one():
    spec = tiny_spec(window=4)
    chunked = replace(spec, layers=(replace(spec.layers[0], kind="chunked"),) * 3)
    for make in (UncachedAttention, lambda spec: CachedAttention(spec, None)):
        make(spec)
        with pytest.raises(AttentionError, match="chunked"):
            make(chunked)
