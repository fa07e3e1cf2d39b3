"""The paged cache and paged attention: naive = cached = paged; no unwritten slot is read."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny_spec

from kvlab import checkpoint
from kvlab.attention import attention, causal_mask
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.errors import AttentionError, BlockError, CacheError, OutOfBlocks, RequestError
from kvlab.generate import PagedDecoder, cached_generate, naive_generate, paged_generate
from kvlab.integrity import check_tables
from kvlab.model import Decoder
from kvlab.notebook.policies import FULL_HIT
from kvlab.paged import LAYOUTS, PagedKVCache, paged_attention
from kvlab.request import Request

NAN = float("nan")


def steps_of(generate, model, prompt, count, **options):
    steps = []
    ids = generate(model, prompt, count, on_step=steps.append, **options)
    return ids, torch.stack([step.logits for step in steps]), [step.seq_len for step in steps]


def poison(cache: PagedKVCache) -> None:
    """NaN everywhere: only what is written afterwards may ever be seen."""
    for layer in range(cache.spec.num_layers):
        cache.key_cache(layer).fill_(NAN)
        cache.value_cache(layer).fill_(NAN)


# -- naive = cached = paged ------------------------------------------------------------------

GQA = [(6, 1), (6, 2), (6, 3), (6, 6)]


def assert_three_ways_agree(block_size, heads, window, prompt_len, count, chunk, seed, layout):
    spec = tiny_spec(
        num_heads=heads[0], num_kv_heads=heads[1], window=window, num_layers=2, vocab_size=61
    )
    model = Decoder.random(spec, seed=seed, dtype=torch.float64)
    rng = random.Random(seed)
    prompt = [rng.randrange(61) for _ in range(prompt_len)]
    naive, naive_logits, lens = steps_of(naive_generate, model, prompt, count)
    cached, cached_logits, _ = steps_of(cached_generate, model, prompt, count, chunk_size=chunk)
    num_blocks = 3 + (prompt_len + count) // block_size
    decoder = PagedDecoder(model, num_blocks, block_size, layout=layout)
    assert decoder.manager.sliding_window == window
    poison(decoder.cache)
    steps = []
    paged = decoder.generate(prompt, count, chunk_size=chunk, on_step=steps.append)
    assert naive == cached == paged  # float64: exact
    assert lens == [step.seq_len for step in steps]
    logits = torch.stack([step.logits for step in steps])
    torch.testing.assert_close(logits, naive_logits, atol=1e-10, rtol=0)
    torch.testing.assert_close(cached_logits, naive_logits, atol=1e-10, rtol=0)
    check_tables(decoder.manager)
    assert decoder.manager.pool.num_free_blocks == num_blocks - 1


@pytest.mark.parametrize("block_size", range(1, 34))
def test_naive_cached_and_paged_agree_for_every_block_size(block_size):
    rng = random.Random(block_size)
    assert_three_ways_agree(
        block_size,
        GQA[block_size % 4],
        [None, 1, 3, 7][block_size // 4 % 4],
        prompt_len=rng.randint(1, 40),
        count=8,
        chunk=rng.randint(1, 12),
        seed=block_size,
        layout=LAYOUTS[block_size % 2],
    )


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.integers(1, 33),
    heads=st.sampled_from(GQA),
    window=st.sampled_from([None, 1, 2, 5, 8, 40]),
    prompt_len=st.integers(1, 50),
    count=st.integers(1, 12),
    chunk=st.one_of(st.none(), st.integers(1, 50)),
    seed=st.integers(0, 99),
    layout=st.sampled_from(LAYOUTS),
)
def test_naive_cached_and_paged_agree_on_random_models(**case):
    assert_three_ways_agree(**case)


def test_naive_cached_and_paged_agree_on_the_real_checkpoint():
    loaded = checkpoint.load()
    prompt = loaded.encode("A block table maps positions to blocks, so that")
    naive, naive_logits, _ = steps_of(naive_generate, loaded.model, prompt, 12)
    cached, cached_logits, _ = steps_of(cached_generate, loaded.model, prompt, 12)
    paged, paged_logits, _ = steps_of(
        paged_generate, loaded.model, prompt, 12, block_size=5, chunk_size=4
    )
    assert naive == cached == paged
    torch.testing.assert_close(paged_logits, naive_logits, atol=2e-3, rtol=0)
    torch.testing.assert_close(paged_logits, cached_logits, atol=2e-3, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    heads=st.sampled_from(GQA),
    window=st.sampled_from([None, 1, 3, 9]),
    block_size=st.integers(1, 9),
    layout=st.sampled_from(LAYOUTS),
)
def test_a_ragged_batch_equals_each_sequence_alone(data, heads, window, block_size, layout):
    """Idle rows, decode rows and chunks in one call, over shuffled blocks among NaN."""
    lens = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    counts = [data.draw(st.integers(0, min(n, 5))) for n in lens]
    torch.manual_seed(sum(lens))
    h, h_kv = heads
    spec = tiny_spec(num_heads=h, num_kv_heads=h_kv, num_layers=1)
    width = max(1, max(-(-n // block_size) for n in lens)) + 1
    num_blocks = sum(-(-n // block_size) for n in lens) + 3
    cache = PagedKVCache(spec, num_blocks, block_size, torch.float64, layout=layout)
    poison(cache)
    order = (torch.randperm(num_blocks - 1) + 1).tolist()  # never the null block
    tables = torch.full((len(lens), width), 10**6)  # read past the end, and it would show
    query = torch.randn(sum(counts) + 2, h, 8, dtype=torch.float64)
    expected = torch.zeros_like(query)
    start = 0
    for r, (seq_len, count) in enumerate(zip(lens, counts, strict=True)):
        key, value = torch.randn(2, seq_len, h_kv, 8, dtype=torch.float64)
        blocks = [order.pop() for _ in range(-(-seq_len // block_size))]
        tables[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.long)
        slots = [blocks[p // block_size] * block_size + p % block_size for p in range(seq_len)]
        cache.write(0, key, value, slots)
        if count:
            rows = slice(start, start + count)
            folded = (key.transpose(0, 1)[None], value.transpose(0, 1)[None])
            expected[rows] = attention(query[None, rows], *folded, window=window)[0]
        start += count
    starts = torch.tensor([0, *counts]).cumsum(0)
    out = paged_attention(
        query,
        cache.key_cache(0),
        cache.value_cache(0),
        tables,
        torch.tensor(lens),
        starts,
        window=window,
    )
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


# -- sharing, measured on K and V -----------------------------------------------------------


@pytest.mark.parametrize("full_hit", ["block", "token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_hit_changes_no_logit(full_hit, layout):
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    decoder = PagedDecoder(model, 40, 4, layout=layout, manager=FULL_HIT[full_hit])
    poison(decoder.cache)
    prompt = list(range(16))
    alone, alone_logits, _ = steps_of(naive_generate, model, prompt, 6)
    first = decoder.request(prompt)
    decoder.prefill(first)  # stays, so that a full hit is shared
    for _ in range(3):
        before = decoder.num_tokens_computed
        steps = []
        assert decoder.generate(prompt, 6, on_step=steps.append) == alone
        logits = torch.stack([step.logits for step in steps])
        torch.testing.assert_close(logits, alone_logits, atol=1e-10, rtol=0)
        computed = decoder.num_tokens_computed - before
        assert computed == 5 + (4 if full_hit == "block" else 1)
        check_tables(decoder.manager)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_11_forks_part_and_each_equals_its_own_run(layout):
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    decoder = PagedDecoder(model, 20, 4, layout=layout)
    poison(decoder.cache)
    parent = decoder.request([5, 6, 7, 8, 9])
    decoder.prefill(parent)
    child = decoder.manager.fork(parent, "child")
    parent.append(10)
    child.append(11)
    rows = decoder.forward([(parent, 1), (child, 1)])
    assert parent.block_table[0] == child.block_table[0]
    assert parent.block_table[1] != child.block_table[1]
    for row, token in zip(rows, (10, 11), strict=True):
        _, logits, _ = steps_of(naive_generate, model, [5, 6, 7, 8, 9, token], 1)
        torch.testing.assert_close(row, logits[0], atol=1e-10, rtol=0)
    check_tables(decoder.manager)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_11_a_block_copy_takes_k_and_v_of_every_layer(layout):
    spec = tiny_spec()
    cache = PagedKVCache(spec, 5, 4, layout=layout)
    for layer in range(spec.num_layers):
        cache.key_cache(layer)[2] = layer + 1
        cache.value_cache(layer)[2] = -layer - 1
    cache.copy_block(2, 4)
    for layer in range(spec.num_layers):
        assert (cache.key_cache(layer)[4] == layer + 1).all()
        assert (cache.value_cache(layer)[4] == -layer - 1).all()
        assert (cache.key_cache(layer)[[0, 1, 3]] == 0).all()
    for src, dst in ((2, 5), (-1, 2)):
        with pytest.raises(AssertionError, match=f"blocks {src}, {dst}"):
            cache.copy_block(src, dst)


def test_truncated_sequences_go_on_as_if_the_rest_had_never_been():
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    decoder = PagedDecoder(model, 20, 4)
    poison(decoder.cache)
    seq = decoder.request(list(range(11)))
    decoder.prefill(seq)
    for length, tail in ((6, [90, 91]), (4, [92]), (1, [93, 94, 95, 96])):
        decoder.manager.truncate_to(seq, length)
        for token in tail:
            seq.append(token)
        row = decoder.prefill(seq)
        _, logits, _ = steps_of(naive_generate, model, seq.token_ids, 1)
        torch.testing.assert_close(row, logits[0], atol=1e-10, rtol=0)
        check_tables(decoder.manager)


def test_out_of_blocks_touches_neither_tables_nor_tensors():
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    decoder = PagedDecoder(model, 3, 4)
    seq = decoder.request(list(range(8)))
    decoder.prefill(seq)
    seq.append(1)
    before = [decoder.cache.key_cache(0).clone(), list(seq.block_table), seq.num_computed_tokens]
    with pytest.raises(OutOfBlocks):
        decoder.forward([(seq, 1)])
    assert torch.equal(decoder.cache.key_cache(0), before[0])
    assert [seq.block_table, seq.num_computed_tokens] == before[1:]
    check_tables(decoder.manager)


def test_pfx_10_prompt_logprobs_need_every_row_both_times():
    model = Decoder.random(tiny_spec(), dtype=torch.float64)
    decoder = PagedDecoder(model, 20, 16)
    prompt = [i % 50 for i in range(33)]
    values = []
    for _ in range(2):
        seq = decoder.request(prompt, prompt_logprobs=True)
        assert decoder.manager.match_prefix(seq).num_tokens == 0
        logits = decoder.forward([(seq, 33)], all_rows=True)
        logprobs = logits[:-1].log_softmax(-1)
        values.append(logprobs.gather(1, torch.tensor(prompt[1:])[:, None]).flatten())
        check_tables(decoder.manager)
    assert len(values[0]) == len(values[1]) == 32
    torch.testing.assert_close(values[0], values[1])


# -- the write side --------------------------------------------------------------------------


def filled(num_rows: int, spec, start: float = 1.0) -> torch.Tensor:
    layer = spec.layers[0]
    rows = torch.arange(num_rows, dtype=torch.float32) + start
    return rows[:, None, None].expand(num_rows, layer.num_kv_heads, layer.key_dim).contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_05_a_negative_slot_is_written_nowhere(layout):
    spec = tiny_spec()
    cache = PagedKVCache(spec, 8, 16, layout=layout)
    rows = filled(2, spec)
    cache.write(0, rows, -rows, [3, -1])
    key, value = cache.key_cache(0), cache.value_cache(0)
    assert (key[0, 3] == 1).all() and (value[0, 3] == -1).all()
    assert (key[7, 15] == 0).all()  # slot 127, where Python's -1 would have landed
    assert key.count_nonzero() == key[0, 3].numel()


@pytest.mark.parametrize("slots", [[3], [3, -1], [-1, -5], []])
def test_page_05_rows_past_the_mapping_are_ignored(slots):
    spec = tiny_spec()
    cache = PagedKVCache(spec, 8, 16)
    cache.write(0, filled(2, spec), filled(2, spec), slots)
    written = cache.key_cache(0).flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist()
    assert written == [slot for slot in slots if slot >= 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_past_the_pool_is_refused_and_nothing_is_written(layout):
    spec = tiny_spec()
    cache = PagedKVCache(spec, 4, 4, layout=layout)
    with pytest.raises(CacheError, match=r"slot_mapping holds 16; .*below 16"):
        cache.write(0, filled(3, spec), filled(3, spec), [2, 16, 5])
    assert cache.key_cache(0).count_nonzero() == 0


@pytest.mark.parametrize("slots", [[3.7], torch.tensor([True]), torch.tensor([[3, 4]])], ids=str)
def test_page_05_a_mapping_that_is_no_row_of_slots_is_named(slots):
    spec = tiny_spec()
    cache = PagedKVCache(spec, 4, 4)
    with pytest.raises(CacheError, match="one whole number for each row"):
        cache.write(0, filled(2, spec), filled(2, spec), slots)
    assert cache.key_cache(0).count_nonzero() == 0


def test_a_cache_keeps_no_graph_of_what_it_stores():
    spec = tiny_spec()
    row = filled(1, spec).requires_grad_()
    for cache, args in (
        (PagedKVCache(spec, 4, 4), (row, row, [3])),
        (ContiguousKVCache(spec, 1, 8), (row[None], row[None])),
        (ConcatenatedKVCache(spec), (row[None], row[None])),
    ):
        cache.write(0, *args)
        kept = cache.key_cache(0) if isinstance(cache, PagedKVCache) else cache.read(0)[0]
        assert not kept.requires_grad and kept.count_nonzero() == row.numel()


def test_fewer_rows_than_slots_and_repeated_heads_are_refused():
    spec = tiny_spec()
    cache = PagedKVCache(spec, 4, 4)
    with pytest.raises(CacheError, match="3 or more"):
        cache.write(0, filled(2, spec), filled(2, spec), [1, 2, 3])
    good = filled(2, spec)
    with pytest.raises(CacheError, match="do not repeat"):
        cache.write(0, good.repeat_interleave(3, 1), good, [1, 2])
    with pytest.raises(CacheError, match=r"V of shape"):
        cache.write(0, good, good[:, :1], [1, 2])
    assert cache.key_cache(0).count_nonzero() == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_hold_the_same_in_the_planned_bytes(layout):
    spec = tiny_spec()
    cache = PagedKVCache(spec, 6, 4, torch.float32, layout=layout)
    assert cache.nbytes == 3 * 2 * 6 * 4 * 2 * 8 * 4  # layers, K and V, blocks, block, h_kv, d, b
    key, value = torch.randn(2, 10, 2, 8)
    table = [4, 1, 3]
    cache.write(1, key, value, [table[p // 4] * 4 + p % 4 for p in range(10)])
    got_key, got_value = cache.read(1, table, 10)
    assert torch.equal(got_key, key) and torch.equal(got_value, value)
    assert cache.key_cache(1).shape == (6, 4, 2, 8)
    contiguous = cache.key_cache(1) if layout == "NHD" else cache.key_cache(1).transpose(1, 2)
    assert contiguous.is_contiguous()


def test_layers_without_plain_k_and_v_are_refused():
    spec = tiny_spec()
    latent = type(spec.layers[0])("latent", 1, 12, 0)
    with pytest.raises(CacheError, match="latent"):
        PagedKVCache(tiny_spec(layers=(latent,) * 3), 4, 4)
    with pytest.raises(CacheError, match="layout"):
        PagedKVCache(spec, 4, 4, layout="DHN")


# -- the read side ---------------------------------------------------------------------------


def one_query(table, seq_len, num_blocks=4, block_size=4, **options):
    cache = PagedKVCache(tiny_spec(num_layers=1), num_blocks, block_size)
    return paged_attention(
        torch.randn(1, 6, 8),
        cache.key_cache(0),
        cache.value_cache(0),
        torch.tensor([table]),
        torch.tensor([seq_len]),
        torch.tensor([0, 1]),
        **options,
    )


def test_page_07_block_ids_are_checked_on_read_at_both_ends():
    for table in ([1, 4], [1, -1], [1, 10**6], [1, 0]):  # block 0 holds nothing, ever
        with pytest.raises(BlockError, match=rf"block_tables\[0\]\[1\] is {table[1]}"):
            one_query(table, 5)
        cache = PagedKVCache(tiny_spec(), 4, 4)
        with pytest.raises(BlockError):
            cache.read(0, table, 5)
    one_query([1, 4], 4)  # entry 1 belongs to nobody yet: not read


def test_page_07_entries_past_the_length_are_never_read():
    one_query([3, 2, 1, 10**6], 12)
    with pytest.raises(BlockError, match="take 4 blocks"):
        one_query([3, 2, 1], 13)


def test_a_batch_that_does_not_add_up_is_refused():
    with pytest.raises(AttentionError, match=r"window .*=0"):
        one_query([1], 2, window=0)
    cache = PagedKVCache(tiny_spec(num_layers=1), 4, 4)
    pools = (cache.key_cache(0), cache.value_cache(0))
    tables = torch.tensor([[1], [2]])
    for rows, lens, starts, words in (
        (3, [2, 2], [0, 1], "query_start_loc"),
        (3, [2, 2], [0, 3, 3], "at most as many queries as tokens"),
        (3, [2, 2], [-1, 0, 1], "query_start_loc"),  # as an index, -1 is the last row
        (3, [2.0, 2.0], [0, 1, 2], "whole numbers"),
        (3, [[2, 2]], [0, 1, 2], "whole numbers"),
    ):
        with pytest.raises(AttentionError, match=words):
            paged_attention(
                torch.randn(rows, 6, 8), *pools, tables, torch.tensor(lens), torch.tensor(starts)
            )


def test_att_08_a_window_of_w_sees_w_keys_with_its_own():
    def seen(position, window):
        return causal_mask(1, position + 1, window)[0].nonzero().flatten().tolist()

    assert seen(200, 128) == list(range(73, 201))
    assert seen(4, 3) == [2, 3, 4]
    assert seen(5, 3) == [3, 4, 5]
    # The paged side: the value of a key is its position, and all scores are equal.
    spec = tiny_spec(num_layers=1)
    cache = PagedKVCache(spec, 60, 4)
    poison(cache)
    positions = torch.arange(201.0)[:, None, None].expand(201, 2, 8)
    cache.write(0, torch.zeros(201, 2, 8), positions, list(range(4, 205)))
    table = torch.arange(1, 52)[None]
    for position, window in ((200, 128), (4, 3), (5, 3), (5, 1), (5, 100)):
        for rows in (1, min(position + 1, 3)):  # as a decode step, and as the end of a chunk
            out = paged_attention(
                torch.zeros(rows, 6, 8),
                cache.key_cache(0),
                cache.value_cache(0),
                table,
                torch.tensor([position + 1]),
                torch.tensor([0, rows]),
                window=window,
            )
            mean = sum(seen(position, window)) / len(seen(position, window))
            torch.testing.assert_close(out[-1], torch.full((6, 8), mean))


# -- rollback and windows of the contiguous caches -------------------------------------------


def write_positions(cache, spec, count: int) -> None:
    rows = torch.arange(cache.length, cache.length + count, dtype=torch.float32)
    for layer in range(spec.num_layers):
        kv = rows[None, :, None, None].expand(1, count, 2, 8)
        cache.write(layer, kv, kv)
        cache.read(layer)
    cache.advance(count)


def test_att_09_a_window_of_blocks_drops_the_oldest_and_never_what_is_read():
    spec = tiny_spec(window=8, num_layers=1)
    decoder = PagedDecoder(Decoder.random(spec), 40, 1)
    request = decoder.request(list(range(6)))
    decoder.prefill(request)
    held = []
    for token in range(6, 10):
        request.append(token)
        decoder.forward([(request, 1)])
        held.append([i for i, block in enumerate(request.block_table) if block])
    # What the next token sees without itself: seven positions.
    assert held == [list(range(max(0, n - 7), n)) for n in range(7, 11)]
    check_tables(decoder.manager)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 20, 30])
@pytest.mark.parametrize("chunk", [1, 5, 7, 8, 9, 20])
@pytest.mark.parametrize("block_size", [1, 3])
def test_att_09_every_chunking_equals_the_dense_windowed_mask(window, chunk, block_size):
    spec = tiny_spec(window=window, num_layers=2)
    model = Decoder.random(spec, seed=window, dtype=torch.float64)
    prompt = [(7 * i) % 101 for i in range(20)]
    naive, naive_logits, _ = steps_of(naive_generate, model, prompt, 12)
    options = {"chunk_size": chunk}
    cached, logits, _ = steps_of(cached_generate, model, prompt, 12, **options)
    paged, paged_logits, _ = steps_of(
        paged_generate, model, prompt, 12, block_size=block_size, **options
    )
    assert cached == paged == naive
    torch.testing.assert_close(logits, naive_logits, atol=1e-10, rtol=0)
    torch.testing.assert_close(paged_logits, naive_logits, atol=1e-10, rtol=0)


def test_att_09_hybrid_layers_keep_what_each_needs():
    full = tiny_spec().layers[0]
    sliding = tiny_spec(window=4).layers[0]
    spec = tiny_spec(layers=(full, sliding, full))
    model = Decoder.random(spec, dtype=torch.float64)
    prompt = list(range(10))
    assert cached_generate(model, prompt, 15) == naive_generate(model, prompt, 15)
    assert paged_generate(model, prompt, 15, block_size=3) == naive_generate(model, prompt, 15)


@pytest.mark.parametrize("make", [ContiguousKVCache, ConcatenatedKVCache])
def test_att_11_two_names_instead_of_a_signed_number(make):
    spec = tiny_spec()
    for call, argument, left in (
        ("truncate_to", 0, 0),
        ("drop_last", 5, 0),
        ("drop_last", 0, 3),
        ("drop_last", 1, 2),
        ("truncate_to", 9, 3),
    ):
        cache = make(spec, 1, 8)
        write_positions(cache, spec, 3)
        getattr(cache, call)(argument)
        assert cache.length == left
        if left:
            assert cache.read(0)[0].shape[2] == left
    for call in ("truncate_to", "drop_last"):
        with pytest.raises(CacheError):
            getattr(make(spec, 1, 8), call)(-1)


def test_att_11_removing_two_of_three():
    cache = ContiguousKVCache(tiny_spec(), 1, 8)
    write_positions(cache, tiny_spec(), 3)
    cache.drop_last(2)
    assert cache.length == 1


def test_sequences_print_what_matters():
    assert repr(Request("a", [1, 2])) == ("Request('a', 0 of 2 tokens computed, blocks [])")


@pytest.mark.parametrize("seq_len", [-1, -9])
def test_page_07_a_negative_length_is_named(seq_len):
    pool = torch.zeros(2, 4, 2, 8)
    where = torch.tensor([[1]]), torch.tensor([seq_len]), torch.tensor([0, 1])
    with pytest.raises(AttentionError, match=rf"seq_lens \[{seq_len}\]"):
        paged_attention(torch.zeros(1, 4, 8), pool, pool, *where)


def test_att_07_the_pool_is_sized_for_what_the_context_allows():
    model = Decoder.random(tiny_spec(num_layers=1, max_position_embeddings=10))
    outputs = paged_generate(model, [1, 2, 3, 4, 5], 10**9, block_size=4)
    assert outputs == cached_generate(model, [1, 2, 3, 4, 5], 10**9) and len(outputs) == 6


def test_prefill_of_a_computed_sequence_is_named_and_changes_nothing():
    decoder = PagedDecoder(Decoder.random(tiny_spec()), 20, 4)
    seq = decoder.request(list(range(8)))
    decoder.prefill(seq)
    child = decoder.manager.fork(seq, "child")
    for done in (seq, child):
        with pytest.raises(RequestError, match=r"expected 1 to 0.*append"):
            decoder.prefill(done)
    assert decoder.num_tokens_computed == 8
    child.append(3)
    assert decoder.prefill(child).shape == (decoder.model.spec.vocab_size,)
    check_tables(decoder.manager)


@pytest.mark.parametrize("count", [0, -1, 9])
def test_a_forward_of_more_or_fewer_tokens_than_are_left_is_named(count):
    decoder = PagedDecoder(Decoder.random(tiny_spec()), 20, 4)
    good, bad = decoder.request([1, 2, 3]), decoder.request(list(range(8)))
    with pytest.raises(RequestError, match="expected 1 to 8"):
        decoder.forward([(good, 3), (bad, count)])
    for work in ([], [(good, 1), (good, 1)]):
        with pytest.raises(AssertionError, match="each of them once"):
            decoder.forward(work)
    assert not decoder.manager.requests and decoder.num_tokens_computed == 0
    for chunk_size in (0, -2):
        with pytest.raises(RequestError, match="tokens to compute given"):
            decoder.prefill(good, chunk_size)


def test_a_hit_that_another_sequence_evicts_is_no_hit():
    """The second sequence's count was of the tokens after a hit that is gone when it starts."""
    model = Decoder.random(tiny_spec(), 0, torch.float64)
    decoder = PagedDecoder(model, 8, 4)
    first, second = list(range(20, 33)), list(range(60, 73))
    for prompt in (first, second):
        decoder.generate(prompt, 1)
    taker, reader = decoder.request([40, 41, 42, 43, 44, 45]), decoder.request(first)
    assert decoder.manager.match_prefix(reader).num_tokens == 12
    with pytest.raises(BlockError, match="match again"):
        decoder.forward([(taker, 6), (reader, 1)])
    assert not reader.block_table and taker.num_computed_tokens == 0
    check_tables(decoder.manager)
    left = 13 - decoder.manager.match_prefix(reader).num_tokens
    logits = decoder.forward([(taker, 6), (reader, left)])
    alone = steps_of(naive_generate, model, first, 1)[1]
    torch.testing.assert_close(logits[1:], alone)


def test_att_07_no_forward_passes_the_context_length():
    decoder = PagedDecoder(Decoder.random(tiny_spec(max_position_embeddings=8)), 9, 4)
    with pytest.raises(RequestError, match="context length of 8"):
        decoder.request(range(9))
    seq = decoder.request(range(8))
    decoder.prefill(seq)
    seq.append(1)
    with pytest.raises(RequestError, match=r"expected 1 to 0.*positions end at 8"):
        decoder.forward([(seq, 1)])


def test_page_13_the_window_is_the_models_and_no_option():
    with pytest.raises(TypeError, match="sliding_window"):
        PagedDecoder(Decoder.random(tiny_spec()), 9, 1, sliding_window=1)
    assert PagedDecoder(Decoder.random(tiny_spec()), 9, 1).manager.sliding_window is None
    assert PagedDecoder(Decoder.random(tiny_spec(window=3)), 9, 1).manager.sliding_window == 3
