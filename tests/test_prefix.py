"""Prefix reuse: what may be shared, when it may be found, and what is counted as a hit."""

from __future__ import annotations

import pytest
from block_model import check, make, run, snapshot

from kvlab.blocks import BlockPool, PrefixKey
from kvlab.errors import BlockError, OutOfBlocks
from kvlab.notebook.policies import HeadFirst
from kvlab.request import Request
from kvlab.scheduler import Scheduler, SchedulerConfig
from kvlab.tables import (
    ROOT_HASH,
    BlockManager,
    hash_block,
    longest_full_hit,
    longest_hybrid_hit,
    longest_sliding_hit,
    tags_between,
)


def cached_tokens(manager, tokens, **fields) -> int:
    return manager.match_prefix(Request("probe", tokens, **fields)).num_tokens


def test_pfx_01_a_reused_block_leaves_the_map():
    manager, cache = make(2, 2)
    manager.release(run(cache, "x", [1, 2, 3]))
    assert cached_tokens(manager, [1, 2, 3]) == 2
    manager.release(run(cache, "y", [7, 8, 9, 10]))
    assert cached_tokens(manager, [1, 2, 3]) == 0
    for block_hash, block_id in manager.pool.cached.items():
        key = manager.pool.blocks[block_id].prefix
        assert key is not None and key.block_hash == block_hash
        assert key.token_ids in {(7, 8), (9, 10)}
    check(cache)


@pytest.mark.parametrize(
    ("rule", "length", "cached", "left"),
    [("block", 8, 4, 4), ("token", 8, 7, 1), ("block", 9, 8, 1), ("token", 9, 8, 1)],
)
@pytest.mark.parametrize("still_running", [True, False])
def test_pfx_03_a_fully_cached_prompt_still_computes_a_token(
    rule, length, cached, left, still_running
):
    manager, cache = make(8, 4, full_hit=rule)
    tokens = list(range(length))
    first = run(cache, "first", tokens)
    if not still_running:
        manager.release(first)
    second = Request("second", tokens)
    hit = manager.match_prefix(second)
    assert (hit.num_tokens, length - hit.num_tokens) == (cached, left)
    copies = manager.start(second, left, hit)
    assert len(copies) == (rule == "token" and length == 8 and still_running)
    cache.compute(second, left, copies)
    check(cache)
    assert second.num_computed_tokens == length


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_pfx_03_never_zero_tokens_to_compute(length, rule, block_size):
    manager, cache = make(40, block_size, full_hit=rule)
    manager.release(run(cache, "first", list(range(length))))
    left = length - cached_tokens(manager, list(range(length)))
    assert left == 1 if rule == "token" and length % block_size == 0 else left >= 1
    run(cache, "second", list(range(length)))
    check(cache)


def test_pfx_03_a_full_hit_fits_into_a_pool_that_is_exactly_full():
    manager, cache = make(2, 4, full_hit="token")
    manager.release(run(cache, "first", list(range(8))))
    second = run(cache, "second", list(range(8)))
    assert second.num_found_tokens == 7
    check(cache)


def test_pfx_04_partial_blocks_stay_private():
    manager, cache = make(12, 2)
    first = run(cache, "1", [1, 2, 3])
    for token in (4, 5):
        first.append(token)
        cache.compute(first, 1, manager.grow(first, 1))
    second = run(cache, "2", [1, 2, 3, 4, 5])
    third = run(cache, "3", [1, 2, 3, 4, 5])
    assert second.num_found_tokens == third.num_found_tokens == 4
    assert first.block_table[:2] == second.block_table[:2] == third.block_table[:2]
    assert len({s.block_table[2] for s in (first, second, third)}) == 3
    for seq, token in ((second, 6), (third, 9)):
        seq.append(token)
        cache.compute(seq, 1, manager.grow(seq, 1))
    check(cache)
    published = {manager.pool.blocks[i].prefix.token_ids for i in manager.pool.cached.values()}
    assert published == {(1, 2), (3, 4), (5, 6), (5, 9)}


def test_pfx_04_a_partial_block_cannot_be_published_by_hand():
    manager, cache = make(8, 4)
    seq = run(cache, "a", [1, 2, 3])
    key = PrefixKey(b"h", (1, 2, 3))
    with pytest.raises(AssertionError, match="partial block"):
        manager.pool.publish(seq.block_table[0], key)
    manager.release(seq)
    with pytest.raises(AssertionError, match="is free"):
        manager.pool.publish(1, PrefixKey(b"h", (1, 2, 3, 4)))


def test_pfx_05_a_twin_in_the_same_step_finds_nothing():
    manager, cache = make(8, 4)
    a, b = Request("a", list(range(8))), Request("b", list(range(8)))
    copies_a, copies_b = manager.start(a, 8), manager.start(b, 8)
    assert (a.num_found_tokens, b.num_found_tokens) == (0, 0)
    assert not manager.pool.cached
    cache.compute(a, 8, copies_a)
    cache.compute(b, 8, copies_b)
    assert a.block_table == b.block_table  # after the step the twins share, two blocks go back
    assert manager.pool.num_free_blocks == 6
    check(cache)


def test_pfx_05_hashes_appear_as_chunks_complete_blocks():
    manager, cache = make(8, 4)
    seq = Request("a", list(range(8)))
    copies, published = manager.start(seq, 3), []
    for chunk in (3, 3, 2):
        cache.compute(seq, chunk, copies)
        published.append(len(manager.pool.cached))
        copies = manager.grow(seq, min(3, seq.num_uncomputed_tokens))
    assert published == [0, 1, 2]


def test_pfx_07_sources_are_tagged():
    tokens = list(range(4))
    assert tags_between([("adapter", "X")], 0, 4) != tags_between([("salt", "X")], 0, 4)
    pairs = [
        ({"tags": (("adapter", "X"),)}, {"tags": (("salt", "X"),)}),
        ({"tags": (("adapter", "a"), ("salt", "bc"))}, {"tags": (("adapter", "ab"), ("salt", "c"))}),
        ({"tags": (("adapter", "a"),)}, {}),
        ({"tags": (("salt", ""),)}, {}),
        ({"tags": (("image", "cat", 1, 2),)}, {"tags": (("image", "dog", 1, 2),)}),
        ({"tags": (("image", "cat", 1, 2),)}, {"tags": (("image", "cat", 2, 2),)}),
        ({"tags": (("image", "cat", 1, 2),)}, {"tags": (("image", "cat", 1, 3),)}),
        ({"tags": (("image", "cat", 1, 2),)}, {}),
        ({"tags": (("image", "X", 0, 4),)}, {"tags": (("adapter", "X"),)}),
        ({"tags": (("adapter", ""),)}, {}),
        ({"tags": (("salt", ""),)}, {"tags": (("adapter", ""),)}),
        ({"tags": (("adapter", "X"), ("salt", "Y"))}, {"tags": (("adapter", "Y"), ("salt", "X"))}),
    ]
    for one, other in pairs:
        manager, cache = make(8, 4)
        run(cache, "one", [*tokens, 9], **one)
        assert cached_tokens(manager, [*tokens, 9], **one) == 4
        assert cached_tokens(manager, [*tokens, 9], **other) == 0, (one, other)
        run(cache, "other", [*tokens, 9], **other)
        check(cache)
        assert len(manager.pool.cached) == 2


def test_pfx_07_an_image_changes_its_block_and_all_later_ones_only():
    manager, cache = make(12, 4)
    tokens = list(range(13))
    run(cache, "cat", tokens, tags=(("image", "cat", 5, 2),))
    assert cached_tokens(manager, tokens) == 4  # block 0 lies before the image
    assert cached_tokens(manager, tokens, tags=(("image", "cat", 5, 2),)) == 12


def test_pfx_07_token_borders_matter():
    assert hash_block(ROOT_HASH, (1, 23), ()) != hash_block(ROOT_HASH, (12, 3), ())
    assert hash_block(b"a", (1,), ()) != hash_block(b"b", (1,), ())


def test_a_hash_collision_is_a_miss_and_never_foreign_content(monkeypatch):
    monkeypatch.setattr("kvlab.tables.hash_block", lambda parent, tokens, tags: b"same")
    manager, cache = make(20, 2)
    run(cache, "a", [1, 2, 3, 4, 5])
    b = run(cache, "b", [6, 7, 3, 4, 5])
    assert b.num_found_tokens == 0
    assert cached_tokens(manager, [1, 2, 9]) == 2
    check(cache)


def test_the_same_block_after_another_prefix_is_another_block():
    manager, cache = make(20, 2)
    run(cache, "a", [1, 2, 3, 4, 5])
    assert cached_tokens(manager, [6, 7, 3, 4, 5]) == 0
    assert cached_tokens(manager, [3, 4, 5]) == 0


def test_pfx_09_rereads_after_preemption_are_not_hits():
    manager, cache = make(8, 16)
    seq = run(cache, "a", list(range(64)))
    seq.append(64)
    manager.preempt(seq)
    hit = manager.match_prefix(seq)
    manager.match_prefix(seq)  # looking counts nothing
    cache.compute(seq, 1, manager.start(seq, 1, hit))
    stats = manager.stats
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (64, 0, 0.0)
    assert (stats.reread_queried_tokens, stats.reread_tokens) == (65, 64)
    run(cache, "b", list(range(64)))
    assert (stats.queried_tokens, stats.hit_tokens) == (128, 48)
    check(cache)


def test_pfx_09_a_refused_admission_counts_nothing():
    manager, cache = make(2, 4)
    run(cache, "a", list(range(5)))
    before = snapshot(manager)
    for _ in range(3):
        with pytest.raises(OutOfBlocks):
            manager.start(Request("b", list(range(9))), 5)
    assert snapshot(manager) == before


@pytest.mark.parametrize(("block_size", "length"), [(16, 33), (16, 117)])
def test_pfx_10_prompt_logprobs_read_no_cached_block(block_size, length):
    manager, cache = make(40, block_size)
    for name in ("first", "second"):
        seq = run(cache, name, list(range(length)), prompt_logprobs=True)
        assert seq.num_found_tokens == 0  # so length rows, and length - 1 values, are computed
        check(cache)
    assert manager.stats.skipped_requests == 2
    assert manager.stats.queried_tokens == 0
    full = length // block_size * block_size
    assert cached_tokens(manager, list(range(length))) == full  # they may still be read by others


def test_pfx_11_a_window_forgives_an_early_hole():
    cached = [True, True, False, True, True]
    # 6 tokens: 5 may be reused, one must be computed.
    assert longest_full_hit(cached) == 2
    assert longest_sliding_hit(cached, window=2, block_size=1) == 5
    assert longest_hybrid_hit(cached, cached, window=2, block_size=1) == 2
    # 5 tokens: length 4 is tried, which needs blocks 3 and 4, and 3 is gone.
    assert longest_full_hit(cached[:4]) == 2
    assert longest_sliding_hit(cached[:4], window=2, block_size=1) == 2
    assert longest_hybrid_hit(cached[:4], cached[:4], window=2, block_size=1) == 2


def test_pfx_11_in_a_manager_with_a_window():
    manager, cache = make(12, 1, sliding_window=2)
    manager.release(run(cache, "a", [1, 2, 3, 4, 5]))
    hole = manager.pool.lookup(manager.key(Request("k", [1, 2, 3]), 2))
    assert hole is not None
    manager.pool.forget(hole)
    assert cached_tokens(manager, [1, 2, 3, 4, 5, 6]) == 5
    assert cached_tokens(manager, [1, 2, 3, 4, 5]) == 2
    seq = run(cache, "b", [1, 2, 3, 4, 5, 6])
    assert seq.block_table[:3] == [0, 0, 0]
    check(cache)
    full, _ = make(12, 1)
    full.pool = manager.pool
    assert cached_tokens(full, [1, 2, 3, 4, 5, 6]) == 2


@pytest.mark.parametrize(
    ("length", "found"),
    [(863, 0), (864, 0), (865, 864), (1728, 864), (1729, 1728), (2000, 1728)],
)
def test_pfx_12_hits_come_in_the_big_pages_of_a_hybrid_model(length, found):
    """At least one token is computed: a prompt of 1,728 finds 864, not 1,728."""
    manager = BlockManager(BlockPool(6, 864))
    first = Request("first", list(range(length)))
    manager.start(first, length)
    manager.mark_computed(first, length)
    assert cached_tokens(manager, list(range(length))) == found


def test_page_12_blocks_reserved_ahead_are_not_shared_hashed_or_kept():
    """Block 16, prompt 16, one token reserved: two blocks are held, one holds K and V."""
    manager = BlockManager(BlockPool(5, 16))
    parent = Request("parent", list(range(16)))
    manager.start(parent, 16)
    manager.mark_computed(parent, 16)
    manager.grow(parent, 1)
    first, reserved = parent.block_table
    assert manager.fork(parent, "fork").block_table == [first]
    assert manager.pool.blocks[reserved].ref_count == 1
    assert manager.pool.blocks[reserved].prefix is None
    manager.release(parent)
    assert cached_tokens(manager, list(range(40))) == 16


def test_pfx_13_the_share_is_what_the_hit_leaves_in_the_same_look():
    """A prompt of 12 tokens, 8 of them cached while it waits, budget 16: 4 tokens are charged."""
    scheduler = Scheduler(BlockManager(BlockPool(12, 4)), SchedulerConfig(max_num_batched_tokens=16))
    scheduler.add(Request("a", [*range(8), 9]))
    scheduler.add(Request("b", [*range(8), 1, 2, 3, 4], max_new_tokens=1))
    first = scheduler.schedule()  # 9 tokens of a, and 7 of b: nothing is cached yet
    assert [entry.num_tokens for entry in first.scheduled] == [9, 7]
    scheduler.update(first, {"a": [5]})
    scheduler.add(Request("c", [*range(8), 1, 2, 3, 4], max_new_tokens=1))
    second = scheduler.schedule()
    shares = {entry.request_id: entry for entry in second.scheduled}
    assert shares["c"].num_cached == 8 and shares["c"].num_tokens == 4
    assert second.num_scheduled_tokens <= 16


def test_pfx_12_the_cache_keeps_its_own_copy_of_tokens_and_ids():
    manager, cache = make(8, 4)
    tokens = list(range(9))
    seq = run(cache, "a", tokens)
    table = list(seq.block_table)
    tokens[:] = [99] * 9
    seq.prompt_token_ids[:] = [99] * 9
    assert seq.token_ids == list(range(9))
    hit = manager.match_prefix(Request("b", list(range(9))))
    manager.release(seq)
    seq.block_table[:] = []
    assert list(hit.block_ids) == table[:2]
    assert cached_tokens(manager, list(range(9))) == 8
    assert all(manager.pool.blocks[i].prefix.token_ids for i in hit.block_ids)


def test_pfx_12_a_matched_block_is_held_itself_and_not_only_its_parents():
    manager, cache = make(8, 4)
    manager.release(run(cache, "a", [1, 2, 3, 4]))
    assert manager.pool.num_evictable_blocks == 1
    seq = Request("b", [1, 2, 3, 4, 5])
    manager.start(seq, 1)
    [first, _] = seq.block_table
    assert manager.pool.blocks[first].ref_count == 1
    assert manager.pool.num_evictable_blocks == 0


def test_a_stale_hit_is_refused():
    manager, cache = make(2, 4)
    manager.release(run(cache, "a", [1, 2, 3, 4, 5]))
    seq = Request("b", [1, 2, 3, 4, 5])
    hit = manager.match_prefix(seq)
    assert hit.num_tokens == 4
    manager.pool.free(manager.pool.allocate(2))  # another request came and went
    before = snapshot(manager)
    with pytest.raises(BlockError):
        manager.start(seq, 1, hit)
    assert snapshot(manager) == before


def test_free_cached_blocks_of_a_hit_are_not_counted_as_free_as_well():
    manager, cache = make(3, 4)
    manager.release(run(cache, "a", list(range(8))))
    seq = Request("b", [*range(8), *range(20, 28)])  # 2 cached + 2 new = 4 blocks, 3 exist
    hit = manager.match_prefix(seq)
    assert manager.pool.num_free_blocks == 3
    assert manager.num_blocks_needed(seq, 8, hit) == 4
    assert manager.num_tokens_that_fit(seq, hit) == 4
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks):
        manager.start(seq, 8, hit)
    assert snapshot(manager) == before
    manager.start(seq, 4, hit)


def test_eviction_takes_the_tail_of_the_oldest_chain_first():
    manager, cache = make(6, 2)
    manager.release(run(cache, "old", [1, 2, 3, 4, 5, 6]))
    manager.release(run(cache, "new", [11, 12, 13, 14, 15, 16]))
    lengths = []
    for _ in range(6):
        manager.pool.allocate(1)
        old = cached_tokens(manager, [1, 2, 3, 4, 5, 6, 7])
        lengths.append((old, cached_tokens(manager, [11, 12, 13, 14, 15, 16, 17])))
    assert lengths == [(4, 6), (2, 6), (0, 6), (0, 4), (0, 2), (0, 0)]


def test_head_first_eviction_loses_the_whole_chain_at_once():
    manager, cache = make(3, 2, pool=HeadFirst)
    manager.release(run(cache, "a", [1, 2, 3, 4, 5, 6]))
    manager.pool.allocate(1)
    assert cached_tokens(manager, [1, 2, 3, 4, 5, 6, 7]) == 0
    assert len(manager.pool.cached) == 2  # still there, and out of reach


def test_empty_blocks_are_handed_out_before_any_cached_one():
    manager, cache = make(4, 4)
    manager.release(run(cache, "a", [1, 2, 3, 4, 5, 6]))  # one cached block, one partial
    manager.pool.allocate(3)
    assert cached_tokens(manager, [1, 2, 3, 4, 5]) == 4


def test_a_hit_makes_a_chain_young_again():
    manager, cache = make(4, 2)
    manager.release(run(cache, "a", [1, 2, 3, 4]))
    manager.release(run(cache, "b", [5, 6, 7, 8]))
    manager.release(run(cache, "a again", [1, 2, 3, 4]))
    manager.pool.allocate(2)
    assert cached_tokens(manager, [1, 2, 3, 4, 9]) == 4
    assert cached_tokens(manager, [5, 6, 7, 8, 9]) == 0


def test_caching_can_be_switched_off():
    manager, cache = make(8, 2, prefix_caching=False)
    manager.release(run(cache, "a", [1, 2, 3, 4]))
    assert cached_tokens(manager, [1, 2, 3, 4, 5]) == 0
    assert not manager.pool.cached
    check(cache)
