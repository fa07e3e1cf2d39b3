"""A step that fails half way, at every point where it can: nothing is lost, nobody is harmed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import assert_empty
from small_models import tiny_spec

import kvlab
import kvlab.engine as engine_module
from kvlab.engine import Engine
from kvlab.errors import RequestError
from kvlab.integrity import check_scheduler
from kvlab.model import Decoder
from kvlab.notebook.policies import FULL_HIT, TokenRule
from kvlab.paged import PagedAttention
from kvlab.sampling import NgramProposer, SamplingParams

LONG = os.environ.get("KVLAB_LONG") == "1"
VOCAB = 13
MODEL = Decoder.random(tiny_spec(num_layers=2, vocab_size=VOCAB), seed=1, dtype=torch.float64)
# Shared beginnings, two equal prompts and one that ends with its last full block: copies on write.
PROMPTS = [[(3 * t) % VOCAB for t in range(n)] for n in (8, 8, 12, 5, 8, 12, 8)]
PROMPTS += [[7, 8, 9], [1] * 11]
WARM = SamplingParams(1.1, seed=3)
PARAMS = [None, WARM, None, SamplingParams(0.9, seed=4), None, None, None, WARM, None]
OUTPUTS = 9


class Broken(Exception):
    """The failure that the tests put in."""


class Fuse:
    """Wraps a function; its calls of the given numbers raise, before or after the real call."""

    def __init__(self, real, calls, after):
        self.real, self.calls, self.after, self.count = real, set(calls), after, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        blows = self.count in self.calls
        if blows and not self.after:
            raise Broken(self.real)
        result = self.real(*args, **kwargs)
        if blows:
            raise Broken(self.real)
        return result


def fused_attention(fuse_of):
    """Paged attention whose layers share one fuse: K and V of some layers are written, of others not."""

    class Fused(PagedAttention):
        def __call__(self, *args):
            fuse = fuse_of.setdefault("layers", Fuse(PagedAttention.__call__, (), False))
            return fuse(self, *args)

    return Fused


def made_engine(**options):
    fuses = {}
    made = Engine(
        MODEL,
        **{
            "num_blocks": 14,
            "block_size": 4,
            "max_num_batched_tokens": 9,
            "proposer": NgramProposer(2),
            "attention": fused_attention(fuses),
            "tables": TokenRule,
            **options,
        },
    )
    return made, fuses


def alone(index):
    made = Engine(MODEL, num_blocks=33, block_size=4)
    [output] = made.generate([PROMPTS[index]], OUTPUTS, sampling=PARAMS[index])
    return output.token_ids


ALONE = [alone(index) for index in range(len(PROMPTS))]

#: Where a step can break: (name, whether the real call is done first).
POINTS = [
    (name, after)
    for name in (
        "proposer.propose",
        "manager.match_prefix",
        "manager.start",
        "manager.grow",
        "scheduler.schedule",
        "build_batch",
        "cache.copy_block",
        "runner.run",
        "layers",
        "sampler.sample",
        "sampler._number",
        "clock",
        "scheduler.update",
    )
    for after in (False, True)
    if (name, after)
    not in {
        ("scheduler.update", True),
        ("manager.start", True),
        ("manager.grow", True),
        ("scheduler.schedule", True),
    }
]


def set_fuse(made, fuses, monkeypatch, name, calls, after):
    if name == "layers":
        fuses["layers"] = fuse = Fuse(PagedAttention.__call__, calls, after)
        return fuse
    holder, _, attribute = name.rpartition(".")
    target = {
        "": engine_module if name != "clock" else made,
        "proposer": made.proposer and NgramProposer,
        "manager": made.scheduler.manager,
        "scheduler": made.scheduler,
        "cache": made.runner.cache,
        "runner": made.runner,
        "sampler": made.sampler,
    }[holder]
    fuse = Fuse(getattr(target, attribute), calls, after)
    if target is NgramProposer:
        monkeypatch.setattr(target, attribute, lambda *args: fuse(*args))
    else:
        monkeypatch.setattr(target, attribute, fuse)
    return fuse


def run_all(made, outputs, on_failure=None):
    """Step to the end over all failures; how many there were."""
    failures = steps = 0
    while made.has_requests:
        try:
            made.step()
        except Broken:
            failures += 1
            if on_failure:
                on_failure(failures)
        check_scheduler(made.scheduler)
        for output in outputs:
            assert output.finish_reason != "length" or len(output.token_ids) == OUTPUTS
        steps += 1
        assert steps < 2000
    assert_empty(made.scheduler)
    return failures


def add_all(made):
    """The requests, the first of them finished before the others come: there is a prefix to hit."""
    first = made.add_request(PROMPTS[0], max_new_tokens=OUTPUTS, sampling=PARAMS[0])
    for _ in range(3):
        made.step()
    return [first] + [
        made.add_request(prompt, max_new_tokens=OUTPUTS, sampling=params)
        for prompt, params in zip(PROMPTS[1:], PARAMS[1:], strict=True)
    ]


@pytest.mark.parametrize(("name", "after"), POINTS)
@pytest.mark.parametrize("calls", [range(1, 400, 5), range(1, 4), range(2, 400, 11)], ids=str)
def test_a_failure_at_any_point_of_a_step_changes_no_output(monkeypatch, name, after, calls):
    traced = {}

    def trace(result):
        for request_id, tokens in result.new_tokens.items():
            traced.setdefault(request_id, []).extend(tokens)

    made, fuses = made_engine(on_step=trace)
    outputs = add_all(made)
    fuse = set_fuse(made, fuses, monkeypatch, name, calls, after)
    failures = run_all(made, outputs)
    assert failures == sum(call <= fuse.count for call in calls)
    assert failures > 0 or name == "cache.copy_block"
    assert [output.token_ids for output in outputs] == ALONE
    assert [traced[output.request_id] for output in outputs] == ALONE


def test_a_step_that_broke_off_is_computed_again_and_counted_as_dropped(monkeypatch):
    made, fuses = made_engine(num_blocks=40, proposer=None)
    output = made.add_request(PROMPTS[0], max_new_tokens=OUTPUTS)
    for _ in range(3):
        made.step()
    known, computed = output.num_computed_tokens, len(output.token_ids)
    set_fuse(made, fuses, monkeypatch, "runner.run", [1], False)
    with pytest.raises(Broken):
        made.step()
    assert (output.num_computed_tokens, len(output.token_ids)) == (0, computed)
    assert output.num_dropped_tokens == known and output.num_preemptions == 1
    run_all(made, [output])
    assert output.token_ids == ALONE[0] and output.num_recomputed_tokens == known


@pytest.mark.parametrize("name", ["build_batch", "cache.copy_block", "runner.run"])
def test_an_abort_after_a_failed_step_harms_nobody(monkeypatch, name):
    """The blocks of a step that broke off in a copy are given to others at once."""
    made, fuses = made_engine(num_blocks=8, proposer=None)
    first = made.add_request(PROMPTS[0], max_new_tokens=OUTPUTS)
    made.step()
    twin = made.add_request(PROMPTS[0], max_new_tokens=OUTPUTS)
    set_fuse(made, fuses, monkeypatch, name, [1], False)
    with pytest.raises(Broken):
        made.step()
    made.abort(twin.request_id)
    others = [
        made.add_request(PROMPTS[i], max_new_tokens=OUTPUTS, sampling=PARAMS[i]) for i in (3, 7, 8)
    ]
    run_all(made, [first, *others])
    assert first.token_ids == ALONE[0] and twin.token_ids == []
    assert [output.token_ids for output in others] == [ALONE[i] for i in (3, 7, 8)]


@settings(max_examples=400 if LONG else 25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(POINTS), st.lists(st.integers(1, 60), min_size=1, max_size=6)),
        min_size=1,
        max_size=3,
        unique_by=lambda pair: pair[0][0],
    ),
    st.sampled_from([9, 14, 40]),
    st.sampled_from(["block", "token"]),
    st.booleans(),
    st.none() | st.integers(0, 8),
)
def test_any_mix_of_failures_and_an_abort(points, num_blocks, full_hit, drafts, aborted):
    made, fuses = made_engine(
        num_blocks=num_blocks, tables=FULL_HIT[full_hit], proposer=NgramProposer(2) if drafts else None
    )
    outputs = add_all(made)

    def abort(failures):
        if aborted is not None and failures == 2 and not outputs[aborted].finished:
            made.abort(outputs[aborted].request_id)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for (name, after), calls in points:
            if drafts or not name.startswith("proposer"):
                set_fuse(made, fuses, monkeypatch, name, calls, after)
        run_all(made, outputs, abort)
    for index, output in enumerate(outputs):
        expected = ALONE[index]
        if output.finish_reason == "abort":
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected, index


@pytest.mark.parametrize(
    "place",
    [
        "pool.allocate",
        "pool.free",
        "pool.publish",
        "manager.start",
        "manager.grow",
        "manager.mark_computed",
        "manager.release",
        "sampler._number",
        "runner.run",
    ],
)
@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_leaves_no_half_booked_step(monkeypatch, place, call, after):
    """The signal of Ctrl-C, sent from inside the bookkeeping or from the forward."""
    made, _ = made_engine()
    outputs = add_all(made)
    holder, name = place.split(".")
    manager = made.scheduler.manager
    target = {"pool": manager.pool, "manager": manager}.get(holder) or getattr(made, holder)
    real, calls = getattr(target, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == call and not after:
            signal.raise_signal(signal.SIGINT)
        result = real(*args)
        if len(calls) == call and after:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(target, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(made, outputs)
    check_scheduler(made.scheduler)
    run_all(made, outputs)
    assert [output.token_ids for output in outputs] == ALONE


BOOKS = {str(Path(kvlab.__file__).parent / f"{n}.py") for n in ("blocks", "tables", "scheduler")}


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that runs in the files of the books, once."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in BOOKS:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("first", range(1, 60, 1 if LONG else 3))
def test_an_interrupt_at_any_line_of_the_books_changes_no_output(first):
    """Line by line through the bookkeeping of a whole run, each run stopped at another line."""
    for line in range(first, 12_000, 59 if LONG else 59 * 16):
        made, _ = made_engine(attention=PagedAttention)
        outputs = add_all(made)
        before = sys.gettrace()
        sys.settrace(InterruptAt(line))
        try:
            run_all(made, outputs)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        check_scheduler(made.scheduler)
        run_all(made, outputs)
        assert [output.token_ids for output in outputs] == ALONE, line


def test_a_failure_in_generate_takes_its_own_requests_out_only(monkeypatch):
    made, fuses = made_engine()
    other = made.add_request(PROMPTS[2], max_new_tokens=OUTPUTS)
    set_fuse(made, fuses, monkeypatch, "runner.run", [3], False)
    with pytest.raises(Broken):
        made.generate(PROMPTS[:2], OUTPUTS)
    assert set(made.scheduler.requests) == {other.request_id}
    run_all(made, [other])
    assert other.token_ids == ALONE[2]


def test_a_clock_that_fails_leaves_no_half_added_request(monkeypatch):
    made, fuses = made_engine()
    set_fuse(made, fuses, monkeypatch, "clock", [1], False)
    with pytest.raises(Broken):
        made.add_request(PROMPTS[0])
    assert_empty(made.scheduler)


def test_drafts_out_of_range_are_named_before_anything_is_scheduled():
    class Wild:
        def propose(self, token_ids, limit):
            return [VOCAB] if self.wild and limit else []

    wild = Wild()
    wild.wild = False
    made, _ = made_engine(proposer=wild)
    output = made.add_request(PROMPTS[2], max_new_tokens=OUTPUTS)
    for _ in range(3):
        made.step()
    wild.wild = True
    with pytest.raises(RequestError, match="draft token 0"):
        made.step()
    wild.wild = False
    run_all(made, [output])
    assert output.token_ids == ALONE[2]
