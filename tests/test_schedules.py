"""Thousands of random workloads: invariants after every step, outputs equal to running alone."""

from __future__ import annotations

import os
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import alone, assert_empty, drain, make_scheduler, request, shares, step

from kvlab.sampling import NgramProposer
from kvlab.scheduler import Reason

LONG = os.environ.get("KVLAB_LONG") == "1"
EXAMPLES = 6000 if LONG else 150

block_sizes = st.sampled_from([1, 2, 4, 16])
policies = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(1, 24),
        "max_num_seqs": st.integers(1, 6),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 3, 8]),
        "admission": st.sampled_from(["first_chunk", "full_length"]),
        "head_of_line": st.sampled_from(["strict", "skip"]),
        "prompts": st.sampled_from(["mixed", "first"]),
        "max_head_skips": st.integers(1, 5),
        "prefix_caching": st.booleans(),
        "full_hit": st.sampled_from(["block", "token"]),
    }
)


@st.composite
def workloads(draw):
    """Up to eight requests with shared beginnings, arrivals, priorities, and some aborts."""
    requests = []
    for i in range(draw(st.integers(1, 8))):
        shared = draw(st.integers(0, 12))
        own = draw(st.integers(0 if shared else 1, 10))
        prompt = [t % 5 for t in range(shared)] + draw(
            st.lists(st.integers(0, 4), min_size=own, max_size=own)
        )
        requests.append(
            {
                "name": f"r{i}",
                "prompt": prompt,
                "outputs": draw(st.integers(1, 12)),
                "priority": draw(st.integers(0, 2)),
                "arrives": draw(st.integers(0, 10)),
                "aborted_at": draw(st.none() | st.none() | st.integers(0, 20)),
            }
        )
    longest = max(len(r["prompt"]) + r["outputs"] - 1 for r in requests)
    spare_tokens = draw(st.integers(0, 40))
    return requests, longest + spare_tokens, draw(st.booleans())


@settings(max_examples=EXAMPLES, deadline=None)
@given(workloads(), policies, block_sizes)
def test_any_workload_under_any_policy(workload, policy, block_size):
    requests, tokens, drafts = workload
    if policy["max_num_batched_tokens"] > 20:  # also without chunking
        longest = max(len(r["prompt"]) + r["outputs"] - 1 for r in requests)
        policy = {
            **policy,
            "enable_chunked_prefill": False,
            "long_prefill_token_threshold": 0,
            "max_num_batched_tokens": max(longest, policy["max_num_batched_tokens"]),
        }
    scheduler = make_scheduler(-(-tokens // block_size), block_size, **policy)
    proposer = NgramProposer(num_drafts=3)
    live, aborted, now = {}, set(), 0
    while now <= 20 or scheduler.has_requests:
        for r in requests:
            if r["arrives"] == now:
                live[r["name"]] = request(
                    r["name"], r["prompt"], r["outputs"], priority=r["priority"]
                )
                scheduler.add(live[r["name"]])
            if r["aborted_at"] == now and r["name"] in scheduler.requests:
                scheduler.abort(r["name"])
                aborted.add(r["name"])
        if drafts:
            for running in scheduler.running:
                if running.num_computed_tokens == running.num_tokens - 1:
                    scheduler.set_drafts(running.request_id, proposer.propose(running.token_ids))
        schedule = step(scheduler)
        stalled = {schedule.reasons.get(r.request_id) for r in scheduler.running}
        assert stalled <= {None, Reason.TOKEN_BUDGET, Reason.PROMPTS_FIRST}
        now += 1
        assert now < 3000, "no end: somebody starves"
    assert_empty(scheduler)
    for r in requests:
        if r["name"] not in aborted:
            got = live[r["name"]]
            assert got.output_token_ids == alone(r["prompt"], r["outputs"]), r["name"]
            assert got.num_recomputed_tokens <= got.num_dropped_tokens
    stats = scheduler.stats
    assert stats.num_dropped_tokens == sum(r.num_dropped_tokens for r in live.values())
    assert stats.num_scheduled_tokens >= sum(r.num_computed_tokens for r in live.values())


def test_nobody_starves_over_a_long_run():
    """A pool for about three requests, and a new one in every second step."""
    scheduler = make_scheduler(
        24, 4, max_num_batched_tokens=12, max_num_seqs=6, head_of_line="skip", max_head_skips=4
    )
    every = []
    for now in range(4000 if LONG else 600):
        if now % 4 == 0:
            made = request(f"r{now}", 3 + (now * 7) % 40, 1 + (now * 3) % 20)
            every.append(made)
            scheduler.add(made)
        step(scheduler)
        # First come is first served: whoever is oldest is always among the running.
        if scheduler.requests and len(scheduler.running):
            oldest = min(scheduler.requests.values(), key=lambda r: r.order)
            assert oldest.head_delay < 200
    drain(scheduler)
    assert all(r.finish_reason == "length" for r in every)
    assert_empty(scheduler)
    # The queue grows (more comes in than goes out), yet each one that came early went early.
    firsts = [r.first_step for r in every]
    assert all(b > a - 400 for a, b in pairwise(firsts))


def test_the_oldest_request_progresses_in_every_step():
    scheduler = make_scheduler(9, 4, max_num_batched_tokens=6, max_num_seqs=4)
    for i in range(10):
        scheduler.add(request(f"r{i}", 4 + i, 12))
    while scheduler.has_requests:
        oldest = min(scheduler.requests.values(), key=lambda r: r.order)
        assert shares(step(scheduler)).get(oldest.request_id, 0) > 0
