"""Waste figures, and the pool laboratory that the widget of chapter 5 asks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.notebook import NotebookError
from kvlab.notebook.page_questions import answer_json
from kvlab.notebook.pool_lab import BREAKS, MAX_BLOCK_SIZE, MAX_BLOCKS, TOUR, pool_trace
from kvlab.notebook.pool_waste import (
    expected_waste_per_request,
    num_that_fit_paged,
    num_that_fit_reserved,
    paged_waste,
    reserved_waste,
)

# -- waste -----------------------------------------------------------------------------------


def test_page_12_waste_of_given_lengths():
    waste = paged_waste([1, 16, 17, 257], 16)
    assert (waste.taken_slots, waste.used_slots, waste.wasted_slots) == (336, 291, 45)
    assert paged_waste([], 16).wasted_share == 0.0
    assert paged_waste([32, 64], 16).wasted_slots == 0


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(1, 64))
def test_paged_waste_is_below_one_block_a_request(lengths, block_size):
    waste = paged_waste(lengths, block_size)
    assert 0 <= waste.wasted_slots <= len(lengths) * (block_size - 1)
    assert waste.taken_slots % block_size == 0
    assert paged_waste(lengths, 1).wasted_slots == 0


@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
def test_the_expected_waste_is_the_mean_over_one_period(block_size):
    total = sum(paged_waste([n], block_size).wasted_slots for n in range(1, block_size + 1))
    assert total / block_size == expected_waste_per_request(block_size)


def test_reserving_and_admission():
    assert reserved_waste([100, 300], 1000).wasted_slots == 1600
    with pytest.raises(NotebookError, match="longer than max_len"):
        reserved_waste([100, 2000], 1000)
    assert num_that_fit_reserved(4095, 1000) == 4
    assert num_that_fit_paged(64, 16, [16, 17, 16, 1]) == 3
    assert num_that_fit_paged(63, 16, [16, 17, 16, 1]) == 2


# -- the laboratory --------------------------------------------------------------------------


def test_the_tour_shows_every_kind_of_event():
    states = pool_trace(TOUR)["states"]
    assert len(states) == len(TOUR) + 1
    assert not any(state["findings"] for state in states)
    said = " ".join(state["text"] for state in states)
    for event in ("found in the cache", "forks off", "copied to", "goes back", "ends", "Evicted"):
        assert event in said
    assert states[-1]["refused"] and "OutOfBlocks" in states[-1]["text"]
    assert states[-1] == {**states[-2], "text": states[-1]["text"], "refused": True}
    copies = [pair for state in states for pair in state["copies"]]
    assert copies == [[5, 6]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(1, MAX_BLOCKS),
    block_size=st.integers(1, MAX_BLOCK_SIZE),
    prefix_caching=st.booleans(),
    eviction=st.sampled_from(["lru", "head_first"]),
    full_hit=st.sampled_from(["block", "token"]),
)
def test_random_workloads_never_break_a_rule(seed, **options):
    trace = pool_trace(seed=seed, length=40, **options)
    assert not any(state["findings"] for state in trace["states"])
    for state in trace["states"]:
        counts = state["counts"]
        assert counts["in_use"] + counts["free"] == options["num_blocks"]
    # The same operations by hand give the same states: what a reader edits goes on from there.
    assert pool_trace(trace["operations"], **options)["states"] == trace["states"]


@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("number", range(3))
def test_every_break_is_heard(what, number):
    operation = {"op": "break", "what": what, "number": number}
    trace = pool_trace([*TOUR[:10], operation])
    assert trace["states"][-1]["findings"], what
    assert not trace["states"][-2]["findings"]
    follow = pool_trace([*TOUR[:10], operation, *TOUR[10:]])  # and nothing after it crashes
    assert len(follow["states"]) == len(TOUR) + 2


def test_breaking_what_is_not_there_is_refused():
    for what in BREAKS:
        state = pool_trace([{"op": "break", "what": what}])["states"][-1]
        assert state["refused"] or what == "lose"
    state = pool_trace([{"op": "break", "what": "nothing"}])["states"][-1]
    assert "no way to break" in state["text"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_blocks": 0}, "0 blocks of 4"),
        ({"block_size": 17}, "12 blocks of 17"),
        ({"operations": [{"op": "dance"}]}, "choose one of arrive"),
        ({"operations": [{"op": "state"}]}, "choose one of"),
        ({"operations": [{"op": "append"}]}, "'append' does not take {}"),
        ({"operations": [{"op": "append", "name": "A"}] * 81}, "too many"),
        ({"eviction": "random"}, "choose one of"),
    ],
)
def test_bad_questions_get_named_errors(arguments, words):
    reply = json.loads(answer_json("pool_trace", json.dumps(arguments)))
    assert words in reply["error"]["message"]


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ({"op": "append", "name": "Z"}, "no sequence 'Z'"),
        ({"op": "arrive", "text": "poem"}, "text 'poem'"),
        ({"op": "arrive", "length": 99}, "99 words"),
    ],
)
def test_bad_operations_are_refused_states(operation, words):
    state = pool_trace([operation])["states"][-1]
    assert state["refused"] and words in state["text"]
    assert state["counts"]["in_use"] == 0
