"""The scheduler on reported faults (SCH, PFX, PAGE rows) and on bad input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scheduling import alone, assert_empty, drain, make_scheduler, request, shares, step

from kvlab.errors import RequestError
from kvlab.integrity import check_tables
from kvlab.notebook.policies import scheduler_for
from kvlab.request import Request, Status
from kvlab.scheduler import Reason, Schedule, SchedulerConfig, clamp_new_tokens, num_new_tokens

# -- the subtraction --------------------------------------------------------------------


@pytest.mark.parametrize(("computed", "expected"), [(99, 1), (100, 0), (101, -1)])
def test_sch_01_zero_or_negative_is_skipped_with_a_reason(computed, expected):
    new = num_new_tokens(100, 0, computed)
    assert new == expected
    share, reason = clamp_new_tokens(new, threshold=0, budget=8)
    assert (share, reason) == ((1, None) if expected > 0 else (0, Reason.NOTHING_NEW))


def test_sch_01_a_request_with_nothing_new_harms_nobody():
    scheduler = make_scheduler()
    scheduler.add(request("a", 5, 9))
    scheduler.add(request("b", 5, 9))
    step(scheduler)
    broken = scheduler.requests["a"]
    broken.num_computed_tokens = broken.num_tokens + 1  # a fault from elsewhere
    schedule = scheduler.schedule()
    assert shares(schedule) == {"b": 1}
    assert schedule.reasons == {"a": Reason.NOTHING_NEW}


def test_sch_01_drafts_and_placeholders_are_known_tokens():
    assert num_new_tokens(101, 0, 100) == 1
    assert num_new_tokens(104, 0, 100) == 4
    assert num_new_tokens(101, 2, 100) == 3


@pytest.mark.parametrize("new", [5000, 2048, 2049])
@pytest.mark.parametrize("budget", [8192, 1000, 0])
def test_sch_02_threshold_cuts_only_where_chunking_is_on(new, budget):
    assert clamp_new_tokens(new, 2048, budget)[0] == min(new, 2048, budget)
    assert clamp_new_tokens(new, 0, budget)[0] == min(new, budget)
    whole = clamp_new_tokens(new, 2048, budget, chunked=False)[0]
    assert whole == (new if new <= budget else 0)


@pytest.mark.parametrize("new", [-1, 0, 1, 2047, 2048, 2049])
@pytest.mark.parametrize("threshold", [0, 1, 2048])
@pytest.mark.parametrize("budget", [-1, 0, 1, 1000, 8192])
def test_sch_02_every_share_is_the_least_of_the_three_and_a_cut_has_a_reason(
    new, threshold, budget
):
    share, reason = clamp_new_tokens(new, threshold, budget)
    assert share == max(min(new, threshold or new, budget), 0)
    assert (reason is None) == (share == new > 0)
    whole, reason = clamp_new_tokens(new, threshold, budget, chunked=False)
    assert whole in (0, new) and (reason is None) == (whole == new > 0)


def test_sch_02_budget_spent_ends_the_step():
    scheduler = make_scheduler(max_num_batched_tokens=5)
    for name in "abc":
        scheduler.add(request(name, 5))
    schedule = step(scheduler)
    assert shares(schedule) == {"a": 5}
    assert schedule.reasons == {"b": Reason.TOKEN_BUDGET, "c": Reason.TOKEN_BUDGET}


def test_sch_04_budget_counts_every_share():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(request("a", 5))
    scheduler.add(request("b", 5))
    assert shares(step(scheduler)) == {"a": 5, "b": 3}
    scheduler = make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)
    scheduler.add(request("a", 5))
    scheduler.add(request("b", 5))
    schedule = step(scheduler)
    assert shares(schedule) == {"a": 5}
    assert schedule.reasons == {"b": Reason.CHUNKING_OFF}


def test_sch_04_prefix_hits_are_known_before_the_budget_is_cut():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    prompt = list(range(100, 108))
    scheduler.add(request("a", prompt, 1))
    drain(scheduler)
    scheduler.add(request("b", [*prompt[:4], 1, 2, 3, 4], 1))
    [entry] = step(scheduler).scheduled
    assert (entry.start, entry.num_tokens, entry.num_cached) == (4, 4, 4)
    scheduler.add(request("c", [*prompt, 9], 1))  # nine tokens, eight of them cached
    [entry] = step(scheduler).scheduled
    assert (entry.start, entry.num_tokens) == (8, 1)


def test_sch_04_preempted_work_leaves_the_budget_whole():
    # 128 tokens of budget; the youngest is dropped in the very step that others use.
    scheduler = make_scheduler(8, 16, max_num_batched_tokens=128, prefix_caching=False)
    scheduler.add(request("old", 63, 8))
    scheduler.add(request("young", 64, 2))
    step(scheduler)
    schedule = step(scheduler)  # old grows into its last slot, young needs a fifth block
    assert schedule.preempted == ["young"]
    assert schedule.num_scheduled_tokens == 1 and schedule.budget == 128
    drain(scheduler)
    assert_empty(scheduler)


def test_sch_05_a_chunk_is_cut_to_the_free_blocks():
    scheduler = make_scheduler(
        20, 64, max_num_batched_tokens=2048, prefix_caching=False, admission="first_chunk"
    )
    scheduler.add(request("holder", 9 * 64, 20))
    step(scheduler)
    assert scheduler.manager.pool.num_free_blocks == 11  # 704 tokens
    scheduler.add(request("long", 1000, 1))
    schedule = step(scheduler)  # the holder's next token takes one block first
    assert shares(schedule) == {"holder": 1, "long": 640}
    assert schedule.scheduled[1].limited_by is Reason.NO_BLOCKS
    drain(scheduler)
    assert_empty(scheduler)


def test_sch_05_exactly_704_tokens_fit_eleven_blocks():
    scheduler = make_scheduler(20, 64, max_num_batched_tokens=2048, prefix_caching=False)
    scheduler.add(request("holder", 9 * 64 - 1, 20))
    step(scheduler)
    scheduler.add(request("long", 1000, 1))
    assert shares(step(scheduler)) == {"holder": 1, "long": 704}


def fill_four_running(admission, **config):
    """SCH-07: 40 blocks of 16, four running requests of 9 blocks, a fifth prompt of 9."""
    scheduler = make_scheduler(
        40, 16, max_num_batched_tokens=144, prefix_caching=False, admission=admission
    )
    for name in "abcd":
        scheduler.add(request(name, 130, 14))
        step(scheduler)
    assert [len(r.block_table) for r in scheduler.running] == [9] * 4
    scheduler.config = replace(scheduler.config, **config)
    scheduler.add(request("e", 144, 1))
    return scheduler


def test_sch_07_first_chunk_admits_drops_and_repeats():
    scheduler = fill_four_running(admission="first_chunk")
    fifth = scheduler.requests["e"]
    step(scheduler)
    assert fifth.num_computed_tokens == 64 and scheduler.manager.pool.num_free_blocks == 0
    assert step(scheduler).preempted == ["e"]
    assert fifth.num_dropped_tokens == 64 and scheduler.stats.num_dropped_tokens == 64
    drain(scheduler)
    assert scheduler.stats.num_dropped_tokens % 64 == 0
    assert scheduler.stats.num_dropped_tokens >= 3 * 64, "it must come in again and again"
    assert scheduler.stats.num_recomputed_tokens == scheduler.stats.num_dropped_tokens


def test_sch_07_chunks_of_32_reach_64_before_the_drop():
    scheduler = fill_four_running(admission="first_chunk", long_prefill_token_threshold=32)
    shares_of_fifth = []
    while not scheduler.stats.num_preemptions:
        shares_of_fifth.append(shares(step(scheduler)).get("e", 0))
    assert shares_of_fifth == [32, 32, 0]
    assert scheduler.requests["e"].num_dropped_tokens == 64


def test_sch_07_full_length_waits_and_wastes_nothing():
    scheduler = fill_four_running(admission="full_length")
    schedule = step(scheduler)
    assert schedule.reasons == {"e": Reason.NO_BLOCKS}  # needs 9, 4 are free
    drain(scheduler)
    assert scheduler.stats.num_dropped_tokens == 0
    assert scheduler.stats.num_preemptions == 0


def test_sch_07_full_length_does_not_promise_a_block_twice():
    scheduler = make_scheduler(
        10,
        16,
        max_num_batched_tokens=32,
        prefix_caching=False,
        admission="full_length",
        long_prefill_token_threshold=16,
    )
    scheduler.add(request("a", 96, 1))  # 6 blocks, one per step
    scheduler.add(request("b", 96, 1))
    schedule = step(scheduler)
    assert shares(schedule) == {"a": 16}
    assert schedule.reasons == {"b": Reason.PROMISED_BLOCKS}  # 9 free, 5 of them promised
    drain(scheduler)
    assert scheduler.stats.num_preemptions == 0


def test_sch_08_preemption_keeps_outputs_and_resumes_as_a_prefill():
    scheduler = make_scheduler(8, 4, max_num_batched_tokens=64, prefix_caching=False)
    scheduler.add(request("young", 3, 9))
    young = scheduler.requests["young"]
    for _ in range(5):
        step(scheduler)
    assert (young.num_computed_tokens, young.num_output_tokens) == (7, 5)
    outputs = young.output_token_ids
    plan = Schedule(5, 64, 4)
    scheduler.preempt(young, plan)
    assert plan.preempted == ["young"] and young.status == Status.PREEMPTED
    assert (young.num_computed_tokens, young.block_table) == (0, [])
    assert young.output_token_ids == outputs
    [entry] = step(scheduler).scheduled
    assert (entry.start, entry.num_tokens, entry.num_recomputed) == (0, 8, 7)
    assert young.num_output_tokens == 6 and young.output_token_ids[:5] == outputs
    drain(scheduler)
    assert young.num_output_tokens == 9


@pytest.mark.parametrize(("policy", "admitted"), [("strict", 0), ("skip", 5)])
def test_sch_09_head_of_line(policy, admitted):
    scheduler = make_scheduler(
        14,
        16,
        max_num_batched_tokens=512,
        prefix_caching=False,
        admission="full_length",
        head_of_line=policy,
    )
    scheduler.add(request("holder", 60, 3))
    step(scheduler)
    assert scheduler.manager.pool.num_free_blocks == 10
    scheduler.add(request("head", 12 * 16, 1))
    for i in range(8):
        scheduler.add(request(f"light{i}", 2 * 16, 1))
    schedule = step(scheduler)
    light = [name for name in shares(schedule) if name.startswith("light")]
    assert len(light) == admitted
    head = scheduler.requests["head"]
    assert head.head_delay == 1 and head.num_skips == admitted
    assert schedule.reasons["head"] is Reason.NO_BLOCKS
    if policy == "strict":
        assert schedule.reasons["light0"] is Reason.BEHIND_HEAD
    drain(scheduler)
    assert_empty(scheduler)


def test_sch_09_skipping_is_bounded_so_the_head_gets_in():
    scheduler = make_scheduler(
        12,
        16,
        max_num_batched_tokens=512,
        prefix_caching=False,
        admission="full_length",
        head_of_line="skip",
        max_head_skips=3,
    )
    scheduler.add(request("first", 2 * 16, 3))
    step(scheduler)
    scheduler.add(request("head", 12 * 16, 1))
    head = scheduler.requests["head"]
    for i in range(60):  # a light one arrives in every step
        scheduler.add(request(f"light{i}", 20, 3))
        step(scheduler)
    assert head.num_skips == 3
    assert head.status == Status.FINISHED and head.head_delay < 12
    drain(scheduler)


@pytest.mark.parametrize(
    ("outputs", "computed", "tokens"), [([7, 8], 12, 13), ([7], 11, 12), ([], 10, 11)]
)
def test_sch_11_rejected_drafts_are_not_computed(outputs, computed, tokens):
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(request("a", 11, 9))
    seq = scheduler.requests["a"]
    first = scheduler.schedule()
    scheduler.update(first, {"a": []})  # ten computed, the last one taken back
    assert (seq.num_computed_tokens, seq.num_tokens) == (10, 11)
    scheduler.set_drafts("a", [7, 1, 2])
    schedule = scheduler.schedule()
    assert shares(schedule) == {"a": 4}
    scheduler.update(schedule, {"a": outputs})
    assert (seq.num_computed_tokens, seq.num_tokens) == (computed, tokens)
    assert seq.num_computed_tokens <= seq.num_tokens - 1
    drain(scheduler)
    assert_empty(scheduler)


@pytest.mark.parametrize("num_drafts", range(5))
def test_sch_11_every_number_of_outputs_leaves_one_token_to_compute(num_drafts):
    for num_outputs in range(num_drafts + 2):
        scheduler = make_scheduler(64, 2, max_num_batched_tokens=64)
        scheduler.add(seq := request("a", 11, 30))
        scheduler.update(scheduler.schedule(), {"a": []})
        scheduler.set_drafts("a", range(num_drafts))
        schedule = scheduler.schedule()
        assert shares(schedule) == {"a": 1 + num_drafts}
        scheduler.update(schedule, {"a": list(range(num_outputs))})
        assert (seq.num_computed_tokens, seq.num_tokens) == (10 + num_outputs, 11 + num_outputs)
        assert seq.num_accepted_tokens == max(num_outputs - 1, 0)
        check_tables(scheduler.manager)
        drain(scheduler)
        assert_empty(scheduler)


def test_sch_11_drafts_may_come_before_the_prompt_is_through():
    scheduler = make_scheduler(64, 4, max_num_batched_tokens=4)
    scheduler.add(seq := request("a", 10, 9))
    step(scheduler)
    scheduler.set_drafts("a", [1, 2, 3])
    seen = [(e.start, len(e.draft_token_ids), e.samples) for s in drain(scheduler)[:2]
            for e in s.scheduled]  # fmt: skip
    assert seen == [(4, 0, False), (8, 2, True)]
    assert seq.output_token_ids == alone(seq.prompt_token_ids, 9)


def test_sch_12_rows_keep_their_own_lengths():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    for name in "ab":
        scheduler.add(request(name, 5, 12))
    step(scheduler)
    for name in "ab":
        scheduler.set_drafts(name, [1, 2, 3])
    schedule = scheduler.schedule()
    before = {r.request_id: r.num_tokens for r in scheduler.running}
    scheduler.update(schedule, {"a": [1, 2, 3, 4], "b": [4]})
    grown = {r.request_id: r.num_tokens - before[r.request_id] for r in scheduler.running}
    assert grown == {"a": 4, "b": 1}
    assert [r.num_accepted_tokens for r in scheduler.running] == [3, 0]


def test_sch_14_the_sampled_token_is_not_computed_yet():
    scheduler = make_scheduler(16, 4, max_num_batched_tokens=8)
    scheduler.add(request("a", 20, 3))
    seen = [(e.start, e.num_tokens) for s in drain(scheduler)[:4] for e in s.scheduled]
    assert seen == [(0, 8), (8, 8), (16, 4), (20, 1)]


@pytest.mark.parametrize(("prompt", "budget"), [(16, 8), (8, 8), (1, 8), (9, 4), (5, 1), (8, 3)])
def test_sch_14_computed_and_scheduled_of_every_step(prompt, budget):
    scheduler = make_scheduler(64, 4, max_num_batched_tokens=budget)
    scheduler.add(request("a", prompt, 4))
    seen = [(e.start, e.num_tokens) for s in drain(scheduler) for e in s.scheduled]
    starts = range(0, prompt, budget)
    chunks = [(start, min(budget, prompt - start)) for start in starts]
    assert seen == [*chunks, *[(prompt + i, 1) for i in range(3)]]


# -- prefix sharing through the scheduler -----------------------------------------------


@pytest.mark.parametrize(("rule", "left"), [("block", 4), ("token", 1)])
def test_pfx_03_a_cached_prompt_still_computes_a_token(rule, left):
    scheduler = make_scheduler(full_hit=rule)
    prompt = list(range(8))
    scheduler.add(request("a", prompt, 1))
    drain(scheduler)
    scheduler.add(request("b", prompt, 1))
    [entry] = step(scheduler).scheduled
    assert entry.num_tokens == left and entry.samples
    scheduler.add(request("c", [*prompt, 8], 1))
    [entry] = step(scheduler).scheduled
    assert (entry.num_cached, entry.num_tokens) == (8, 1)


def test_pfx_05_a_twin_in_the_same_step_gets_nothing_cached():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    prompt = list(range(8))
    for name in "ab":
        scheduler.add(request(name, prompt, 2))
    assert [e.num_cached for e in step(scheduler).scheduled] == [0, 0]


def test_pfx_05_chunks_publish_only_computed_full_blocks():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    scheduler.add(request("a", list(range(8)), 1))
    published = []
    for _ in range(3):
        step(scheduler)
        published.append(len(scheduler.manager.pool.cached))
    assert published == [0, 1, 2]


def test_pfx_09_rereading_after_preemption_is_no_hit():
    # A pool of 22 blocks of 4: the old one grows until the young one, 64 computed, must go.
    scheduler = make_scheduler(22, 4, max_num_batched_tokens=128)
    scheduler.add(request("old", 15, 30))
    scheduler.add(request("young", 64, 20))
    drain(scheduler)
    assert scheduler.stats.num_preemptions >= 1
    assert scheduler.stats.num_resumed_tokens > 0
    assert scheduler.stats.num_cached_tokens == 0
    assert scheduler.manager.stats.hit_rate == 0.0


def test_page_01_the_block_is_taken_with_the_token_that_needs_it():
    scheduler = make_scheduler(2, 4, max_num_batched_tokens=16, prefix_caching=False)
    scheduler.add(request("a", 3, 6))
    step(scheduler)  # 3 computed, 4 known
    held = []
    for _ in range(3):
        step(scheduler)
        held.append(len(scheduler.requests["a"].block_table))
    assert held == [1, 2, 2]  # position 3 is in the first block, position 4 needs the second


def test_page_01_without_a_free_block_the_fifth_token_preempts():
    scheduler = make_scheduler(2, 4, max_num_batched_tokens=16, prefix_caching=False)
    scheduler.add(request("a", 3, 4))
    scheduler.add(request("b", 3, 4))
    step(scheduler)
    assert not step(scheduler).preempted  # 3 -> 4 needs no block
    assert step(scheduler).preempted == ["b"]  # 4 -> 5 needs one, the youngest gives it
    drain(scheduler)
    assert_empty(scheduler)


# -- order, priority, abort -------------------------------------------------------------


def test_a_preempted_request_keeps_its_place_before_later_ones():
    scheduler = make_scheduler(6, 4, max_num_batched_tokens=64, prefix_caching=False)
    for name, prompt in (("a", 8), ("b", 8)):
        scheduler.add(request(name, prompt, 8))
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    scheduler.add(request("late", 2, 1))
    assert [r.request_id for r in scheduler.waiting] == ["b", "late"]
    finished = []
    while scheduler.has_requests:
        before = set(scheduler.requests)
        step(scheduler)
        finished += sorted(before - set(scheduler.requests))
    assert finished.index("a") < finished.index("b")


def test_priority_is_served_first_and_preempted_last():
    scheduler = make_scheduler(4, 4, max_num_batched_tokens=64, prefix_caching=False)
    scheduler.add(request("low", 7, 8, priority=5))
    scheduler.add(request("high", 7, 8, priority=1))
    schedule = step(scheduler)
    assert list(shares(schedule)) == ["high", "low"]
    while not scheduler.stats.num_preemptions:
        schedule = step(scheduler)
    assert schedule.preempted == ["low"]
    drain(scheduler)
    assert_empty(scheduler)


def test_abort_anywhere_gives_everything_back():
    scheduler = make_scheduler(6, 4, max_num_batched_tokens=8, max_num_seqs=2)
    for name in "abcd":
        scheduler.add(request(name, 8, 8))
    for _ in range(6):
        step(scheduler)
    for name in list(scheduler.requests):
        assert scheduler.abort(name).status == Status.ABORTED
        check_tables(scheduler.manager)
    assert_empty(scheduler)


def test_abort_between_schedule_and_update_is_passed_over():
    scheduler = make_scheduler()
    scheduler.add(request("a", 5))
    scheduler.add(request("b", 5))
    schedule = scheduler.schedule()
    scheduler.abort("a")
    kept = scheduler.update(schedule, {"a": [1], "b": [2]})
    assert kept == {"b": [2]}
    drain(scheduler)
    assert_empty(scheduler)


def test_a_stop_token_ends_a_request_in_the_middle_of_accepted_drafts():
    scheduler = make_scheduler()
    scheduler.add(request("a", 5, 20, stop_token_ids=(2,)))
    step(scheduler)
    scheduler.set_drafts("a", [1, 2, 3])
    seq = scheduler.requests["a"]
    known = seq.num_output_tokens
    kept = scheduler.update(scheduler.schedule(), {"a": [1, 2, 3, 4]})
    assert kept == {"a": [1, 2]} and seq.finish_reason == "stop"
    assert (seq.num_accepted_tokens, seq.num_draft_tokens) == (3, 3)  # all were right, two in use
    assert seq.num_output_tokens == known + 2
    assert_empty(scheduler)


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 0},
        {"max_num_batched_tokens": -1},
        {"max_num_batched_tokens": 2.5},
        {"max_num_seqs": 0},
        {"max_model_len": 0},
        {"long_prefill_token_threshold": -1},
        {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
        {"enable_chunked_prefill": "no"},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(RequestError, match=next(iter(settings))):
        SchedulerConfig(**settings)


def test_bad_requests_are_refused_and_harm_nobody():
    scheduler = make_scheduler(8, 4, max_num_batched_tokens=16, max_model_len=24)
    scheduler.add(request("good", 5, 6))
    step(scheduler)
    with pytest.raises(RequestError, match="empty prompt"):
        request("empty", [])
    with pytest.raises(RequestError, match="'good'"):
        scheduler.add(request("good", 3))
    with pytest.raises(RequestError, match="33 positions"):
        scheduler.add(request("long", 33, 1))
    with pytest.raises(RequestError, match="positions of the model"):
        scheduler.add(request("long", 20, 6))
    with pytest.raises(RequestError, match="max_new_tokens=0"):
        scheduler.add(request("none", 5, 0))
    with pytest.raises(RequestError, match="'nobody'"):
        scheduler.abort("nobody")
    with pytest.raises(RequestError, match="'nobody'"):
        scheduler.set_drafts("nobody", [1])
    drain(scheduler)
    assert_empty(scheduler)
    with pytest.raises(RequestError, match="finished"):
        scheduler.abort("good")


def test_what_just_fits_is_taken():
    scheduler = make_scheduler(8, 4, max_num_batched_tokens=16)
    scheduler.add(request("exact", 30, 3))  # computes 32 positions: the last output is not fed
    drain(scheduler)
    assert_empty(scheduler)
    with pytest.raises(RequestError):
        scheduler.add(request("more", 30, 4))


def test_without_chunking_a_text_longer_than_a_step_is_refused_at_once():
    scheduler = make_scheduler(max_num_batched_tokens=16, enable_chunked_prefill=False)
    scheduler.add(request("a", 10, 7))
    with pytest.raises(RequestError, match="chunked prefill"):
        scheduler.add(request("b", 10, 8))
    drain(scheduler)


@pytest.mark.parametrize(
    ("sampled", "error"),
    [
        ({"a": [1]}, RequestError),
        ({"b": [1]}, RequestError),
        ({"a": [1], "b": [1, 2]}, RequestError),
        ({"a": [1, 2], "b": [1]}, RequestError),
        (None, RequestError),
        ({"a": [1], "b": None}, RequestError),
        ({"a": [1], "b": 2}, RequestError),
        ({"a": [1], "b": ["2"]}, RequestError),
        ({"a": [1], "b": [None]}, RequestError),
        ({"a": [1], "b": [2.5]}, RequestError),
        ({"a": [1], "b": [True]}, RequestError),
    ],
)
def test_sch_11_outputs_that_do_not_fit_the_step_change_nothing(sampled, error):
    scheduler = make_scheduler()
    pair = [request("a", 5), request("b", 6)]
    for each in pair:
        scheduler.add(each)
    schedule = scheduler.schedule()
    with pytest.raises(error):
        scheduler.update(schedule, sampled)
    assert [(r.num_computed_tokens, r.num_output_tokens) for r in pair] == [(0, 0), (0, 0)]
    scheduler.update(schedule, {"a": [1], "b": [2]})
    assert [(r.num_computed_tokens, r.num_output_tokens) for r in pair] == [(5, 1), (6, 1)]


def test_sch_14_a_step_is_counted_once():
    scheduler = make_scheduler()
    scheduler.add(one := request("a", 5))
    schedule = scheduler.schedule()
    scheduler.update(schedule, {"a": [1]})
    with pytest.raises(RequestError, match="update with each step once"):
        scheduler.update(schedule, {"a": [1]})
    assert (one.num_computed_tokens, one.output_token_ids) == (5, [1])


@pytest.mark.parametrize(
    "fields",
    [{name: bad} for name in ("priority", "arrival") for bad in (None, "high", float("nan"))]
    + [{"outputs": value} for value in (None, "2", 2.5, True)],
)
def test_a_limit_or_priority_that_is_no_number_is_refused(fields):
    scheduler = make_scheduler()
    scheduler.add(request("good", 5))
    with pytest.raises(RequestError, match="expected a"):
        scheduler.add(request("bad", 5, **fields))
    assert list(scheduler.requests) == ["good"] and len(scheduler.waiting) == 1
    drain(scheduler)
    assert_empty(scheduler)


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": value} for value in (None, 5, "ab", (None,), (2.5,))]
    + [{"tags": value} for value in (
        None, 5, (5,), (("cat",),), ((1, "x"),), (("image", "cat", 0, "2"),),
        (("image", "cat", -1, 2),), (("image", "cat", 0),), ("ab",),
    )],
)  # fmt: skip
def test_pfx_07_fields_that_would_fail_in_a_later_step_are_refused_at_once(fields):
    with pytest.raises(RequestError, match=f"{next(iter(fields))}=.*expected"):
        request("bad", 5, **fields)


def test_a_priority_may_be_any_number():
    scheduler = make_scheduler()
    for name, priority in (("a", 10**400), ("b", float("inf")), ("c", -(10**400)), ("d", 0.5)):
        scheduler.add(request(name, 5, priority=priority))
    assert list(shares(step(scheduler))) == ["c", "d", "a", "b"]
    drain(scheduler)


@pytest.mark.parametrize(("urgent", "served"), [(1, "bca"), (0, "cba")])
def test_an_arrival_that_is_given_comes_before_the_order_of_adding(urgent, served):
    scheduler = make_scheduler()
    for name, arrival, priority in (("a", 2.5, 1), ("b", 1, 1), ("c", 2, urgent)):
        scheduler.add(request(name, 5, arrival=arrival, priority=priority))
    assert "".join(shares(step(scheduler))) == served
    drain(scheduler)


@pytest.mark.parametrize("bad", [None, 5, ["x"], [1.5], [None], "ab"], ids=repr)
def test_tokens_that_are_no_whole_numbers_are_refused_before_a_step_meets_them(bad):
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=r"expected a (list of token ids|whole number)"):
        Request("bad", bad)
    scheduler.add(request("a", 5))
    step(scheduler)
    with pytest.raises(RequestError, match=r"expected a (list of token ids|whole number)"):
        scheduler.set_drafts("a", bad)
    drain(scheduler)


def test_tokens_may_come_as_any_row_of_whole_numbers():
    for row in (np.arange(9), torch.arange(9), list(np.arange(9)), range(9), iter(range(9))):
        made = Request("a", row)
        assert made.token_ids == list(range(9)) and all(type(t) is int for t in made.token_ids)


def test_a_request_that_runs_in_one_scheduler_is_refused_by_another():
    first, second = make_scheduler(), make_scheduler()
    first.add(moving := request("a", 5, 3))
    step(first)
    with pytest.raises(RequestError, match="is running and holds 2 blocks"):
        second.add(moving)
    second.add(waiting := request("b", 5, 3))
    with pytest.raises(RequestError, match="is waiting and holds 0 blocks"):
        first.add(waiting)
    drain(first)
    drain(second)
    assert_empty(second)


def test_a_request_that_has_ended_does_not_come_back():
    scheduler = make_scheduler()
    scheduler.add(gone := request("a", 5))
    scheduler.abort("a")
    with pytest.raises(RequestError, match="is aborted"):
        scheduler.add(gone)
    scheduler.add(again := request("a", 5, 3))
    drain(scheduler)
    assert again.num_output_tokens == 3 and again.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "steps"),
    [
        ("mixed", [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}, {"a": 1, "b": 1}]),
        ("first", [{"b": 8}, {"b": 8}, {"b": 4}, {"a": 1, "b": 1}]),
    ],
)
def test_prompts_share_the_step_or_freeze_the_streams(prompts, steps):
    scheduler = make_scheduler(prompts=prompts, max_num_batched_tokens=8)
    scheduler.add(request("a", 4, 9))
    assert shares(step(scheduler)) == {"a": 4}
    scheduler.add(request("b", 20, 3))
    assert [shares(step(scheduler)) for _ in steps] == steps


def test_a_stream_is_told_why_it_stands_still_and_moves_where_no_prompt_fits():
    scheduler = make_scheduler(4, admission="full_length", prompts="first", max_num_batched_tokens=8)
    scheduler.add(request("a", 8, 5))
    step(scheduler)
    scheduler.add(request("b", 4, 2))
    assert step(scheduler).reasons["a"] == Reason.PROMPTS_FIRST
    scheduler.add(request("c", 16, 1))  # as long as the pool: it must wait, and nobody for it
    assert all("a" in shares(step(scheduler)) for _ in range(3))
    assert {"c"} in [set(shares(step(scheduler))) for _ in range(6)]


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(RequestError, match="expected mixed, first"):
        scheduler_for(prompts="last")
    with pytest.raises(RequestError, match="expected a policy out of admission"):
        scheduler_for(order="first")
