"""The pool, the tables and their errors, on inputs small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_model import check, make, run, snapshot

from kvlab.blocks import BlockPool, blocks_for, slot_of
from kvlab.errors import BlockError, IntegrityError, OutOfBlocks, RequestError
from kvlab.integrity import check_tables
from kvlab.request import Request
from kvlab.tables import BlockManager

# -- the pool ------------------------------------------------------------------------------


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5, 4)
    assert pool.num_usable_blocks == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    with pytest.raises(BlockError, match="null block"):
        pool.free([0])


def test_out_of_blocks_allocates_nothing():
    manager, _ = make(3, 4)
    manager.pool.allocate(2)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks, match=r"2 block.s. needed, 1 free"):
        manager.pool.allocate(2)
    assert snapshot(manager) == before


@pytest.mark.parametrize("bad", [-1, 0, 15, 99, 2.0, "1", None, False])
@pytest.mark.parametrize("call", ["free", "ref", "forget"])
def test_a_block_id_outside_the_pool_is_named(bad, call):
    manager, _ = make(14, 4)
    held = manager.pool.allocate(1)
    before = snapshot(manager)
    argument = bad if call == "forget" else [*held, bad]
    with pytest.raises(BlockError, match=f"block id {bad!r} "):
        getattr(manager.pool, call)(argument)
    assert snapshot(manager) == before


def test_a_free_empty_block_cannot_be_shared():
    pool = BlockPool(4, 4)
    with pytest.raises(BlockError):
        pool.ref([2])


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_blocks": num_blocks, "block_size": block_size}
        for num_blocks, block_size in ((1, 4), (4, 0), (2.5, 4), ("9", 4), (9, None), (9, 2.0))
    ],
)
def test_a_pool_without_room_is_refused(arguments):
    with pytest.raises(BlockError, match="expected a whole number"):
        BlockPool(**arguments)


@pytest.mark.parametrize("count", [-1, 2.0, None, "2", True])
def test_a_count_that_is_no_count_is_named_and_changes_nothing(count):
    manager, _ = make(5, 4)
    seq = Request("a", [1, 2, 3])
    before = snapshot(manager)
    for call in (
        lambda: manager.pool.allocate(count),
        lambda: manager.start(seq, count),
        lambda: BlockManager(BlockPool(4, 4), sliding_window=0 if count is None else count),
    ):
        with pytest.raises((BlockError, RequestError), match="expected"):
            call()
    assert snapshot(manager) == before


@pytest.mark.parametrize("token", ["x", None, 1.7, [1]])
def test_a_token_that_is_no_id_is_named(token):
    seq = Request("a", [1, 2, 3])
    with pytest.raises(RequestError, match="expected a whole number"):
        seq.append(token)
    assert seq.token_ids == [1, 2, 3]
    for prompt in ("text", b"text", 5, {1, 2}, {1: 2}, [token], torch.tensor([[1, 2]])):
        with pytest.raises(RequestError, match=r"expected a (list of token ids|whole number)"):
            Request("a", prompt)


@pytest.mark.parametrize(
    "prompt", [torch.tensor([1, 2, 3]), np.array([1, 2, 3]), [*np.array([1, 2, 3])]], ids=repr
)
def test_pfx_07_a_prompt_in_other_numbers_hits_the_same_blocks(prompt):
    manager, cache = make(8, 2)
    run(cache, "a", [1, 2, 3])
    assert manager.match_prefix(Request("b", prompt)).num_tokens == 2


# -- the cases -----------------------------------------------------------------------------


def test_page_01_a_block_is_requested_exactly_when_the_length_passes_a_multiple():
    # Tokens are appended first; K and V of the newest are then written at index len - 1.
    manager, cache = make(1, 4)
    seq = run(cache, "a", [1, 2, 3])
    assert manager.pool.num_free_blocks == 0
    seq.append(4)  # 3 -> 4: index 3 still fits
    cache.compute(seq, 1, manager.grow(seq, 1))
    assert len(seq.block_table) == 1
    seq.append(5)  # 4 -> 5: index 4 needs a block, and none is free
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks):
        manager.grow(seq, 1)
    assert snapshot(manager) == before
    check(cache)


@pytest.mark.parametrize("block_size", range(1, 34))
def test_page_01_for_every_block_size(block_size):
    manager, cache = make(100, block_size)
    seq = run(cache, "a", [7])
    for length in range(2, 3 * block_size + 3):
        seq.append(length)
        blocks = len(seq.block_table)
        cache.compute(seq, 1, manager.grow(seq, 1))
        assert (len(seq.block_table) > blocks) == ((length - 1) % block_size == 0)
    check(cache)


def test_page_03_one_block_size_for_prefill_and_decode():
    assert slot_of([5, 2], 8, 9) == 17
    manager, _cache = make(10, 8)
    seq = Request("a", list(range(10)))
    seq.block_table = [5, 2]
    assert manager.slot_mapping(seq, 9, 10) == [17]  # as decode asks
    assert manager.slot_mapping(seq, 0, 10)[9] == 17  # as prefill asks
    assert manager.block_size == manager.pool.block_size == 8


def test_page_04_two_releases_in_one_call_count_as_two():
    manager, _ = make(16, 4)
    pool = manager.pool
    [b], [c] = pool.allocate(1), pool.allocate(1)
    pool.ref([b])
    assert pool.num_free_blocks == 14
    pool.free([b, b])
    assert pool.num_free_blocks == 15
    before = snapshot(manager)
    with pytest.raises(BlockError, match=rf"block {c} released 2 time.s. but held 1"):
        pool.free([c, c])
    assert snapshot(manager) == before
    with pytest.raises(BlockError):
        pool.free([b])
    assert snapshot(manager) == before


def test_page_04_a_request_released_twice_gives_its_blocks_back_once():
    manager, cache = make(8, 4)
    seq = run(cache, "a", list(range(9)))
    manager.release(seq)
    manager.release(seq)
    assert manager.pool.num_free_blocks == 8
    check(cache)


def test_page_07_a_position_past_the_table_is_refused():
    for position in (-1, 8, 100):
        with pytest.raises(BlockError, match="0 to 7"):
            slot_of([5, 2], 4, position)


def test_page_07_a_table_entry_past_the_pool_is_found():
    manager, cache = make(3, 4)
    seq = run(cache, "a", list(range(8)))
    seq.block_table[1] = 4
    with pytest.raises(IntegrityError, match="table entry 1 is 4, outside the pool of 4"):
        check_tables(manager)


def test_page_08_eviction_counts_blocks_and_never_tokens():
    manager, cache = make(4, 4)
    manager.release(run(cache, "old", list(range(8))))  # two cached blocks, free
    held = manager.pool.allocate(2)
    pool = manager.pool
    assert pool.num_evictable_blocks == 2
    assert pool.num_free_blocks == 2
    [taken] = pool.allocate(1)
    assert (pool.num_evictions, pool.num_evictable_blocks) == (1, 1)
    [other] = pool.allocate(1)
    assert len({taken, other, *held}) == 4
    slots = [range(i * 4, i * 4 + 4) for i in (taken, other, *held)]
    assert len({s for r in slots for s in r}) == 16  # no two blocks share a slot


def test_page_08_room_is_counted_in_tokens():
    manager, cache = make(3, 4)
    seq = run(cache, "a", [1, 2, 3, 4, 5])
    assert manager.num_tokens_that_fit(seq) == 7  # 3 left in its block, 4 in the free one
    manager.grow(seq, 7)
    assert manager.num_tokens_that_fit(seq) == 7
    with pytest.raises(OutOfBlocks):
        manager.grow(seq, 8)


def test_page_11_a_fork_copies_once_and_the_other_keeps_the_original():
    manager, cache = make(8, 4)
    parent = run(cache, "parent", [1, 2, 3, 4, 5])
    child = manager.fork(parent, "child")
    assert [manager.pool.blocks[i].ref_count for i in parent.block_table] == [2, 2]
    parent.append(6)
    child.append(7)
    first = manager.grow(parent, 1)
    assert first == [(child.block_table[1], parent.block_table[1])]
    cache.compute(parent, 1, first)
    second = manager.grow(child, 1)
    assert second == []  # held once by now: written in place
    cache.compute(child, 1, second)
    assert parent.block_table[0] == child.block_table[0]
    assert len({*parent.block_table, *child.block_table}) == 3
    assert manager.pool.num_free_blocks == 5
    check(cache)


def test_page_11_a_fork_at_a_block_border_copies_nothing():
    manager, cache = make(8, 4)
    parent = run(cache, "parent", [1, 2, 3, 4])
    child = manager.fork(parent, "child")
    for seq, token in ((parent, 5), (child, 6)):
        seq.append(token)
        copies = manager.grow(seq, 1)
        assert copies == []
        cache.compute(seq, 1, copies)
    check(cache)


def test_page_11_a_fork_does_not_share_room_that_is_not_computed():
    manager, cache = make(8, 4)
    parent = Request("parent", list(range(10)))
    copies = manager.start(parent, 10)  # room for 10, but only 5 get computed
    cache.compute(parent, 5, copies)
    child = manager.fork(parent, "child")
    assert child.block_table == parent.block_table[:2]
    for seq in (child, parent):
        cache.compute(seq, 5, manager.grow(seq, 5))
    check(cache)


@pytest.mark.parametrize(
    ("length", "blocks", "wasted"), [(1, 1, 15), (16, 1, 0), (17, 2, 15), (257, 17, 15)]
)
def test_page_12_waste_at_exact_multiples(length, blocks, wasted):
    assert blocks_for(length, 16) == blocks
    assert blocks_for(length, 16) * 16 - length == wasted
    _, cache = make(20, 16)
    assert len(run(cache, "a", list(range(length))).block_table) == blocks


# -- going back ----------------------------------------------------------------------------


def test_truncation_releases_whole_blocks_and_rewrites_what_is_left():
    manager, cache = make(8, 4)
    seq = run(cache, "a", list(range(11)))
    manager.truncate_to(seq, 6)
    assert (len(seq.block_table), seq.num_computed_tokens) == (2, 6)
    seq.append(99)
    cache.compute(seq, 1, manager.grow(seq, 1))
    check(cache)
    twin = run(cache, "b", list(range(11)))  # block 1 was rewritten, so only block 0 is found
    assert twin.num_found_tokens == 4
    check(cache)


def test_truncation_into_a_shared_block_copies_it():
    manager, cache = make(8, 4)
    a = run(cache, "a", list(range(9)))
    b = run(cache, "b", list(range(9)))
    assert b.num_found_tokens == 8
    manager.truncate_to(b, 6)
    b.append(99)
    copies = manager.grow(b, 1)
    assert len(copies) == 1
    cache.compute(b, 1, copies)
    check(cache)
    assert a.token_ids == list(range(9))


def test_att_11_drop_last_clamps_and_truncate_to_does_not_guess():
    for call, argument, left in (
        ("truncate_to", 0, 0),
        ("drop_last", 5, 0),
        ("drop_last", 0, 3),
        ("drop_last", 2, 1),
    ):
        manager, cache = make(8, 4)
        seq = run(cache, "a", [1, 2, 3])
        getattr(manager, call)(seq, argument)
        assert (seq.num_tokens, seq.num_computed_tokens) == (left, left)
        assert len(seq.block_table) == blocks_for(left, 4)
        check(cache)
    for call, argument in (("truncate_to", -1), ("truncate_to", 4), ("drop_last", -1)):
        manager, cache = make(8, 4)
        seq = run(cache, "a", [1, 2, 3])
        with pytest.raises(RequestError):
            getattr(manager, call)(seq, argument)


def test_preemption_keeps_tokens_and_gives_every_block_back():
    manager, cache = make(4, 4)
    seq = run(cache, "a", list(range(5)))
    seq.append(5)
    manager.preempt(seq)
    assert (seq.num_computed_tokens, seq.num_tokens, seq.output_token_ids) == (0, 6, [5])
    assert manager.pool.num_free_blocks == 4
    check(cache)


def test_a_window_frees_blocks_and_refuses_what_it_no_longer_has():
    manager, cache = make(8, 2, sliding_window=3)
    seq = run(cache, "a", list(range(9)))
    assert seq.block_table[:3] == [0, 0, 0]  # the next token, 9, sees 7, 8 and itself
    assert len([i for i in seq.block_table if i]) == 2
    check(cache)
    with pytest.raises(BlockError, match="window"):
        manager.slot_mapping(seq, 2, 3)
    with pytest.raises(RequestError, match="window"):
        manager.truncate_to(seq, 5)
    manager.truncate_to(seq, 8)
    check(cache)


# -- misuse of a sequence ------------------------------------------------------------------


def test_counters_cannot_run_ahead():
    manager, cache = make(8, 4)
    seq = run(cache, "a", [1, 2, 3])
    with pytest.raises(RequestError, match="marked computed"):
        manager.mark_computed(seq, 1)
    seq.append(4)
    seq.append(5)
    with pytest.raises(RequestError, match="grow"):
        manager.mark_computed(seq, 2)
    with pytest.raises(RequestError, match="0 or more"):
        manager.grow(seq, -1)
    with pytest.raises(AssertionError, match="started"):
        manager.start(seq, 1)
    with pytest.raises(AssertionError, match="unique"):
        manager.start(Request("a", [1]), 1)
    with pytest.raises(AssertionError, match="in use"):
        manager.fork(seq, "a")
    with pytest.raises(RequestError, match="empty prompt"):
        Request("b", [])
    check(cache)


# -- the integrity check itself --------------------------------------------------------------

BREAK = {
    "held": (lambda m, s: setattr(m.pool.blocks[1], "ref_count", 3), "block 1: ref_count 3"),
    "negative": (lambda m, s: setattr(m.pool.blocks[5], "ref_count", -1), "negative"),
    "lost": (lambda m, s: m.pool.free_list.pop(7), "block 7: lost"),
    "free and held": (
        lambda m, s: m.pool.free_list.__setitem__(1, None),
        "block 1: in the free list and held",
    ),
    "null": (lambda m, s: m.pool.free_list.__setitem__(0, None), "null block"),
    "outside": (lambda m, s: m.pool.free_list.__setitem__(40, None), "id 40 is outside"),
    "stale hash": (
        lambda m, s: m.pool.cached.__setitem__(b"abcd", 6),
        "leads to block 6, which does not carry it",
    ),
    "unmapped hash": (lambda m, s: m.pool.cached.clear(), "the map does not lead back"),
    "early publication": (lambda m, s: setattr(s, "num_computed_tokens", 3), "blocks published"),
    "twice in a table": (
        lambda m, s: s.block_table.__setitem__(1, s.block_table[0]),
        "more than once",
    ),
    "computed past known": (
        lambda m, s: setattr(s, "num_computed_tokens", 99),
        "99 tokens computed, only 9 known",
    ),
    "foreign tokens": (lambda m, s: s.token_ids.__setitem__(0, 77), "its table reads it for"),
    "null in a table": (
        lambda m, s: s.block_table.__setitem__(0, 0),
        "null block stands where tokens are still read",
    ),
}


@pytest.mark.parametrize("name", BREAK)
def test_every_way_to_break_the_pool_is_named(name):
    manager, cache = make(8, 4)
    seq = run(cache, "a", list(range(9)))
    check(cache)
    damage, words = BREAK[name]
    damage(manager, seq)
    with pytest.raises(IntegrityError) as error:
        check_tables(manager)
    assert words in str(error.value)


def test_two_owners_of_one_block_are_found():
    manager, cache = make(8, 4)
    a = run(cache, "a", [1, 2, 3])
    b = run(cache, "b", [4, 5, 6])
    manager.pool.free(b.block_table)
    b.block_table = list(a.block_table)
    manager.pool.ref(b.block_table)
    with pytest.raises(IntegrityError, match="which hold different tokens"):
        check_tables(manager)


def test_two_sequences_of_one_name_do_not_lose_each_others_blocks():
    manager = BlockManager(BlockPool(6, 4))
    first, second = Request("same", [1, 2, 3]), Request("same", [4, 5, 6])
    manager.grow(first, 3)
    for enter in (manager.start, manager.grow):
        with pytest.raises(AssertionError, match="names are unique"):
            enter(second, 3)
    assert not second.block_table and manager.pool.num_free_blocks == 4
    for leave in (manager.release, lambda seq: manager.truncate_to(seq, 0)):
        leave(second)  # it holds nothing, and the first one stays where it is
        assert manager.requests == {"same": first}
    check_tables(manager)


@pytest.mark.parametrize("call", ["release", "preempt", "grow", "truncate_to", "fork"])
def test_page_04_a_sequence_of_another_pool_frees_nothing_here(call):
    mine, other = (BlockManager(BlockPool(6, 4)) for _ in range(2))
    here, there = Request("here", [1, 2, 3]), Request("there", [4, 5, 6])
    mine.start(here, 3)
    other.start(there, 3)
    with pytest.raises(AssertionError, match="no blocks of this pool"):
        getattr(mine, call)(
            there, *{"grow": (1,), "truncate_to": (0,), "fork": ("x",)}.get(call, ())
        )
    assert there.block_table == here.block_table and there.num_preemptions == 0
    check_tables(mine)
