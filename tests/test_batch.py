"""The ragged batch: the book's example, positions, slots, padding and mode names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling import make_scheduler, request, step

from kvlab.batch import (
    ForwardMode,
    build_batch,
    context_lengths,
    cumulative,
    forward_mode,
    padded_position,
    query_positions,
    request_indices,
    slots,
    token_positions,
)
from kvlab.errors import BlockError


def test_two_five_and_three_tokens():
    counts = [2, 5, 3]
    assert request_indices(counts) == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert cumulative(counts) == [2, 7, 10]
    assert query_positions(counts) == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert token_positions([10, 0, 7], counts) == [10, 11, 0, 1, 2, 3, 4, 7, 8, 9]
    assert context_lengths([10, 0, 7], counts) == [12, 5, 10]


def test_build_batch_lays_out_what_was_scheduled():
    scheduler = make_scheduler(32, 4, max_num_batched_tokens=10)
    for name, prompt in (("a", 2), ("b", 5), ("c", 9)):
        scheduler.add(request(name, prompt))
    batch = build_batch(scheduler.schedule())
    assert batch.cu_num_scheduled == [2, 7, 10]
    assert batch.query_start_loc == [0, 2, 7, 10]
    assert batch.seq_lens == [2, 5, 3]
    assert batch.logits_rows == [1, 6]  # the third prompt is half way: nothing to sample
    assert (batch.num_reqs, batch.num_actual_tokens) == (3, 10)
    assert (batch.max_query_len, batch.max_seq_len) == (5, 5)
    assert batch.mode is ForwardMode.EXTEND
    assert batch.token_ids[7:] == scheduler.requests["c"].token_ids[:3]


def test_pos_01_the_first_decode_position_is_seq_len_minus_one():
    scheduler = make_scheduler(32, 4)
    scheduler.add(request("a", 5, 4))
    seen = []
    while scheduler.has_requests:
        schedule = scheduler.schedule()
        batch = build_batch(schedule)
        seen.append((batch.positions, batch.seq_lens))
        scheduler.update(schedule, {"a": [1]})
    assert seen == [([0, 1, 2, 3, 4], [5]), ([5], [6]), ([6], [7]), ([7], [8])]


def test_the_512th_decode_forward_of_the_running_example():
    scheduler = make_scheduler(2560 // 16, 16, max_num_batched_tokens=2048)
    scheduler.add(request("a", 2048, 513))
    for _ in range(512):  # the prefill and 511 decode forwards
        scheduler.update(scheduler.schedule(), {"a": [7]})
    batch = build_batch(scheduler.schedule())
    assert (batch.positions, batch.seq_lens, batch.query_start_loc) == ([2559], [2560], [0, 1])
    assert batch.mode is ForwardMode.DECODE


def test_page_03_one_block_size_for_prefill_and_decode():
    assert slots([9], [0], [[5, 2]], 8) == [17]
    scheduler = make_scheduler(8, 8)
    scheduler.add(request("a", 9, 3))
    prefill = build_batch(scheduler.schedule())
    table = prefill.block_tables[0]
    assert prefill.slot_mapping == [table[i // 8] * 8 + i % 8 for i in range(9)]


@pytest.mark.parametrize(
    ("counts", "mode"),
    [
        ([], ForwardMode.IDLE),
        ([1, 1], ForwardMode.DECODE),
        ([5, 2], ForwardMode.EXTEND),
        ([1, 5], ForwardMode.MIXED),
        ([0, 0], ForwardMode.IDLE),
        ([0, 1], ForwardMode.DECODE),
    ],
)
def test_modes_are_read_off_the_query_lengths(counts, mode):
    assert forward_mode(counts) is mode


def test_an_idle_step_is_an_empty_batch():
    batch = build_batch(make_scheduler().schedule())
    assert batch.mode is ForwardMode.IDLE
    assert batch.token_ids == batch.positions == batch.seq_lens == batch.logits_rows == []
    assert batch.query_start_loc == [0]


def test_padding_rows_touch_nothing():
    scheduler = make_scheduler()
    scheduler.add(request("a", 4, 4))
    step(scheduler)
    batch = build_batch(scheduler.schedule(), pad_to=4)
    assert batch.num_actual_tokens == batch.num_reqs == 1
    assert batch.positions[1:] == [0, 0, 0] and batch.seq_lens[1:] == [0, 0, 0]
    assert batch.slot_mapping[1:] == [-1, -1, -1]
    assert batch.block_tables[1:] == [[0], [0], [0]]
    assert batch.query_start_loc == [0, 1, 2, 3, 4]
    assert batch.logits_rows == [0]
    batch.check()


def test_pos_01_an_idle_row_has_position_zero():
    assert [padded_position(n) for n in (0, 1, 6)] == [0, 0, 5]


def test_padding_is_for_decode_steps_with_no_more_requests_than_rows():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(request(name, 4, 4))
    schedule = scheduler.schedule()
    with pytest.raises(AssertionError, match="DECODE"):
        build_batch(schedule, pad_to=4)
    with pytest.raises(AssertionError, match="pad_to=2 with 3 requests"):
        build_batch(schedule, pad_to=2)
    assert build_batch(schedule, pad_to=3) == build_batch(schedule)


def test_a_table_that_is_too_short_is_named():
    with pytest.raises(BlockError, match="position 8 asked for; this table covers 0 to 7"):
        slots([8], [0], [[5, 2]], 4)


@pytest.mark.parametrize(("position", "table"), [(-1, [5, 2]), (3, [0, 2]), (0, [])])
def test_page_05_a_negative_position_or_a_freed_block_is_no_slot(position, table):
    with pytest.raises(BlockError, match=f"position {position}"):
        slots([position], [0], [table], 4)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=8))
def test_rows_of_every_request_ascend_to_seq_len_minus_one(work):
    computed, counts = [c for c, _ in work], [n for _, n in work]
    rows, positions = request_indices(counts), token_positions(computed, counts)
    lengths = context_lengths(computed, counts)
    for index in range(len(work)):
        mine = [p for row, p in zip(rows, positions) if row == index]
        assert mine == list(range(computed[index], lengths[index]))
    assert len(rows) == len(query_positions(counts)) == sum(counts)
