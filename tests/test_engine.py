"""The engine: any mix of requests gives each one what it would have got alone."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import assert_empty
from small_models import tiny_spec

from kvlab.batch import build_batch
from kvlab.engine import Engine
from kvlab.errors import RequestError
from kvlab.generate import cached_generate
from kvlab.integrity import check_scheduler
from kvlab.model import Decoder
from kvlab.notebook.policies import FULL_HIT, scheduler_for
from kvlab.paged import table_rows
from kvlab.sampling import NgramProposer, SamplingParams

LONG = os.environ.get("KVLAB_LONG") == "1"
VOCAB = 13
# float64, so that a different order of sums cannot flip an argmax: ids must be equal.
MODEL = Decoder.random(tiny_spec(num_layers=2, vocab_size=VOCAB), seed=1, dtype=torch.float64)
WINDOWED = Decoder.random(tiny_spec(num_layers=2, vocab_size=VOCAB, window=6), dtype=torch.float64)


def alone(prompt, outputs, model=MODEL):
    return cached_generate(model, prompt, outputs)


def engine(model=MODEL, full_hit="block", admission="first_chunk", head_of_line="strict",
           prompts="mixed", **options) -> Engine:
    """A small engine; policies by name."""
    return Engine(
        model,
        **{"num_blocks": 65, "block_size": 4, "max_model_len": None, **options},
        tables=FULL_HIT[full_hit],
        scheduler=scheduler_for(admission=admission, head_of_line=head_of_line, prompts=prompts),
    )


def checked_run(made: Engine) -> int:
    """Step to the end; after every step the queues and the pool are in order."""
    steps = 0
    while made.has_requests:
        result = made.step()
        check_scheduler(made.scheduler)
        assert result.schedule.num_scheduled_tokens <= result.schedule.budget
        steps += 1
        assert steps < 3000
    assert_empty(made.scheduler)
    return steps


@st.composite
def mixes(draw):
    """Requests with shared beginnings, arrivals and aborts; an engine that is tight or roomy."""
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        shared = draw(st.integers(0, 14))
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=10))
        requests.append(
            (
                [(3 * t) % VOCAB for t in range(shared)] + own,
                draw(st.integers(1, 14)),
                draw(st.integers(0, 6)),  # arrives
                draw(st.sampled_from([None, None, None, 3, 9])),  # aborted
                draw(st.integers(0, 1)),  # priority
            )
        )
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    longest = max(len(prompt) + outputs - 1 for prompt, outputs, *_ in requests)
    options = {
        "block_size": block_size,
        "num_blocks": 1 + -(-(longest + draw(st.integers(0, 60))) // block_size),
        "max_num_batched_tokens": draw(st.integers(1, 40)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 2, 5])),
        "prefix_caching": draw(st.booleans()),
        "full_hit": draw(st.sampled_from(["block", "token"])),
        "admission": draw(st.sampled_from(["first_chunk", "full_length"])),
        "head_of_line": draw(st.sampled_from(["strict", "skip"])),
        "prompts": draw(st.sampled_from(["mixed", "first"])),
        "proposer": draw(st.sampled_from([None, NgramProposer(3), NgramProposer(2, 2, 2)])),
    }
    return requests, options


@settings(max_examples=1500 if LONG else 50, deadline=None)
@given(mixes(), st.sampled_from([MODEL, MODEL, WINDOWED]))
def test_any_mix_equals_each_request_alone(mix, model):
    requests, options = mix
    made = engine(model, **options)
    live, aborted, now = {}, set(), 0
    while now <= 10 or made.has_requests:
        for index, (prompt, outputs, arrives, stops, priority) in enumerate(requests):
            if arrives == now:
                live[index] = made.add_request(
                    prompt, request_id=str(index), max_new_tokens=outputs, priority=priority
                )
            if stops == now and str(index) in made.scheduler.requests:
                made.abort(str(index))
                aborted.add(index)
        made.step()
        check_scheduler(made.scheduler)
        now += 1
    assert_empty(made.scheduler)
    for index, (prompt, outputs, *_) in enumerate(requests):
        expected = alone(prompt, outputs, model)
        got = live[index].token_ids
        assert got == (expected[: len(got)] if index in aborted else expected), index


PROMPTS = [[(5 * i + j * j) % VOCAB for j in range(1 + (7 * i) % 23)] for i in range(9)]
ALONE = [cached_generate(MODEL, prompt, 15) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 16, "num_blocks": 9},
        {"max_num_batched_tokens": 5},
        {"long_prefill_token_threshold": 3},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 40},
        {"num_blocks": 12},
        {"num_blocks": 12, "prefix_caching": False, "admission": "full_length"},
        {"num_blocks": 12, "head_of_line": "skip"},
        {"proposer": NgramProposer()},
        {"num_blocks": 12, "proposer": NgramProposer(), "max_num_batched_tokens": 6},
        {"full_hit": "token"},
    ],
    ids=str,
)
def test_policies_change_the_order_and_never_the_tokens(options):
    made = engine(**options)
    outputs = made.generate([*PROMPTS, *PROMPTS], 15)
    assert [o.token_ids for o in outputs] == [*ALONE, *ALONE]
    assert_empty(made.scheduler)
    if options.get("num_blocks") == 12:
        assert sum(o.num_preemptions for o in outputs) > 0 or "admission" in options
    if "proposer" in options:
        assert sum(o.num_accepted_tokens for o in outputs) > 0


def test_tokens_stream_in_order_and_the_trace_tells_the_same():
    steps = []
    made, streamed = engine(on_step=steps.append), {}
    outputs = made.generate(
        PROMPTS, 15, on_token=lambda name, token: streamed.setdefault(name, []).append(token)
    )
    assert [streamed[o.request_id] for o in outputs] == ALONE
    for output in outputs:
        traced = [t for step in steps for t in step.new_tokens.get(output.request_id, [])]
        assert traced == output.token_ids
    assert all(s.schedule.num_scheduled_tokens <= s.schedule.budget for s in steps)
    # The first prompt has one token: by its query length a decode among prefills.
    assert steps[0].batch.mode == "mixed" and steps[-1].batch.mode == "decode"


def test_stream_yields_while_others_move_along():
    made = engine()
    other = made.add_request(PROMPTS[1], max_new_tokens=15)
    assert list(made.stream(PROMPTS[2], max_new_tokens=15)) == ALONE[2]
    checked_run(made)
    assert other.token_ids == ALONE[1]
    for token in made.stream(PROMPTS[2], max_new_tokens=15):
        assert token == ALONE[2][0]
        break
    del token
    made.generate([PROMPTS[0]], 15)
    assert_empty(made.scheduler)


def test_every_token_is_told_once_whoever_makes_the_step():
    made, streamed = engine(proposer=NgramProposer()), {}

    def tell(name, token):
        streamed.setdefault(name, []).append(token)
        if len(streamed) == 1 and len(streamed[name]) == 2:  # a callback may run prompts of its own
            assert made.generate([PROMPTS[5]], 15)[0].token_ids == ALONE[5]

    outputs = made.generate(PROMPTS[:3], 15, on_token=tell)
    assert [streamed[output.request_id] for output in outputs] == ALONE[:3]


def test_a_name_that_is_somebody_elses_by_now_is_not_aborted_with_the_stream():
    made = engine()
    tokens = made.stream(PROMPTS[2], request_id="x", max_new_tokens=1)
    assert next(tokens) == ALONE[2][0]
    second = made.add_request(PROMPTS[1], request_id="x", max_new_tokens=15)
    tokens.close()
    checked_run(made)
    assert second.token_ids == ALONE[1]


def test_end_of_sequence_stops_and_is_returned():
    stop = ALONE[3][4]
    first = ALONE[3].index(stop)
    [output] = engine(eos_token_id=stop).generate([PROMPTS[3]], 15)
    assert output.token_ids == ALONE[3][: first + 1] and output.finish_reason == "stop"
    made = engine(proposer=NgramProposer())
    output = made.add_request(PROMPTS[3], max_new_tokens=15, stop_token_ids=[stop])
    checked_run(made)
    assert output.token_ids == ALONE[3][: first + 1]
    assert engine().generate([PROMPTS[3]], 15)[0].finish_reason == "length"


def test_times_are_read_from_the_clock():
    ticks = iter(range(1000))
    made = engine(clock=lambda: float(next(ticks)), max_num_batched_tokens=4)
    output = made.add_request(PROMPTS[1], max_new_tokens=3)  # eight tokens: two steps of prefill
    assert output.ttft_seconds is None and output.time_per_output_token_seconds is None
    checked_run(made)
    assert (output.arrival, output.first_token, output.last_token) == (0.0, 2.0, 4.0)
    assert output.ttft_seconds == 2.0 and output.time_per_output_token_seconds == 1.0


def test_counters_of_hits_and_preemptions():
    made = engine(num_blocks=65)
    made.generate([PROMPTS[3]], 2)
    [again] = made.generate([PROMPTS[3]], 2)
    assert again.num_cached_tokens == (len(PROMPTS[3]) - 1) // 4 * 4
    running = made.add_request(PROMPTS[3], max_new_tokens=2)
    made.step()
    assert running.num_cached_tokens == again.num_cached_tokens and not running.finished
    checked_run(made)
    tight = engine(num_blocks=12, prefix_caching=False)
    outputs = tight.generate(PROMPTS, 15)
    assert sum(o.num_preemptions for o in outputs) == tight.scheduler.stats.num_preemptions > 0
    assert sum(o.num_recomputed_tokens for o in outputs) > 0
    assert sum(o.num_cached_tokens for o in outputs) == 0


def test_salted_requests_share_nothing():
    made = engine()
    for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 12)):
        tags = (("salt", salt),) if salt else ()
        output = made.add_request(PROMPTS[3][:13] * 1, max_new_tokens=2, tags=tags)
        checked_run(made)
        assert output.num_cached_tokens <= expected
    assert output.num_cached_tokens > 0


def test_bad_requests_are_named_and_harm_nobody():
    made = engine(num_blocks=9, max_model_len=30)
    good = made.add_request(PROMPTS[1], request_id="good", max_new_tokens=15)
    made.step()
    for error, call in (
        (RequestError, lambda: made.add_request([])),
        (RequestError, lambda: made.add_request([1] * 40)),
        (RequestError, lambda: made.add_request([1] * 20, max_new_tokens=12)),
        (RequestError, lambda: made.add_request([1, VOCAB])),
        (RequestError, lambda: made.add_request([-1])),
        (RequestError, lambda: made.add_request([1.0])),
        (RequestError, lambda: made.add_request([1], request_id="good")),
        (RequestError, lambda: made.add_request([1], max_new_tokens=0)),
        (RequestError, lambda: made.abort("nobody")),
        (RequestError, lambda: made.add_request([1], sampling=SamplingParams(top_p=0))),
        (RequestError, lambda: made.generate([[1], [2]], [3])),
        (RequestError, lambda: made.generate([[1], [VOCAB]], 3)),
    ):
        with pytest.raises(error):
            call()
        check_scheduler(made.scheduler)
    assert set(made.scheduler.requests) == {"good"}
    checked_run(made)
    assert good.token_ids == ALONE[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 0},
        {"long_prefill_token_threshold": 4, "enable_chunked_prefill": False},
    ],
)
def test_engine_settings_that_cannot_work(settings):
    with pytest.raises(RequestError):
        engine(**settings)


def test_att_07_no_request_may_pass_the_context_length_of_the_model():
    context = MODEL.spec.max_position_embeddings
    with pytest.raises(RequestError, match=f"max_model_len={context + 1}.*{context}"):
        engine(max_model_len=context + 1)
    for asked in (None, context, context - 1):
        made = engine(max_model_len=asked)
        longest = made.scheduler.config.max_model_len
        assert longest == (asked or context)
        with pytest.raises(RequestError, match=f"{longest} positions of the model"):
            made.add_request([1] * longest, max_new_tokens=2)
        output = made.add_request([1] * (longest - 1), max_new_tokens=2)
        checked_run(made)
        assert output.token_ids == alone([1] * (longest - 1), 2)


def test_several_ids_may_end_every_request():
    stops = {ALONE[3][4], ALONE[3][6]}
    first = next(i for i, token in enumerate(ALONE[3]) if token in stops)
    for eos in (stops, sorted(stops), tuple(stops)):
        [output] = engine(eos_token_id=eos).generate([PROMPTS[3]], 15)
        assert output.token_ids == ALONE[3][: first + 1]
    for wrong in ("</s>", VOCAB, -1, [1, VOCAB], 2.0, True):  # no step would ever end at these
        with pytest.raises(RequestError, match="eos_token_id: token"):
            engine(eos_token_id=wrong)


@pytest.mark.parametrize(
    "prompts",
    [[1, 2, 3], ["text"], [None], [b"text"], [{1, 2}], [{1: 2}], torch.tensor([1, 2])],
)
def test_a_prompt_that_is_no_row_of_tokens_is_named(prompts):
    made = engine()
    with pytest.raises(RequestError, match="expected a list of token ids"):
        made.generate(prompts, 3)
    for no_list in (None, 3, "text", {"a": [1]}):
        with pytest.raises(RequestError, match="expected a list of lists"):
            made.generate(no_list, 3)
    assert_empty(made.scheduler)


@pytest.mark.parametrize("kind", [iter, tuple, torch.tensor, np.array])
def test_prompts_may_come_from_a_generator_or_as_tensors(kind):
    outputs = engine().generate((kind(prompt) for prompt in PROMPTS[:3]), 15)
    assert [output.token_ids for output in outputs] == ALONE[:3]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS[:3]
    assert engine().generate([], 15) == []


def test_a_raising_callback_takes_its_own_requests_out_only():
    made = engine()
    other = made.add_request(PROMPTS[1], max_new_tokens=15)

    def stop(name, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS[2:4], 15, on_token=stop)
    assert set(made.scheduler.requests) == {other.request_id}
    checked_run(made)
    assert other.token_ids == ALONE[1]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "drawn"])
def test_logits_without_a_number_are_named_and_others_go_on(number, params):
    made = engine()
    bad = made.add_request(PROMPTS[1], max_new_tokens=15, sampling=params)
    good = made.add_request(PROMPTS[2], max_new_tokens=15)
    run = made.runner.run

    def poisoned(batch):
        logits = run(batch).clone()
        if bad.request_id in batch.request_ids:
            logits[0] = number
        return logits

    made.runner.run = poisoned
    for _ in range(2):
        with pytest.raises(RequestError, match=f"{bad.request_id}.*expected finite"):
            made.step()
    made.abort(bad.request_id)
    checked_run(made)
    assert bad.token_ids == [] and good.token_ids == ALONE[2]


def test_a_failing_forward_can_be_stepped_again():
    made = engine()
    output = made.add_request(PROMPTS[4], max_new_tokens=15)
    made.step()
    run = made.runner.run
    made.runner.run = lambda *args: (_ for _ in ()).throw(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError):
        made.step()
    made.runner.run = run
    checked_run(made)
    assert output.token_ids == ALONE[4]


def test_an_idle_step_does_nothing():
    made = engine()
    result = made.step()
    assert result.schedule.is_idle and not result.new_tokens and not result.finished
    assert result.batch.mode == "idle"


def test_sch_01_a_request_that_can_never_move_is_named_and_ends_no_loop_but_its_own():
    made = engine()
    broken = made.add_request(PROMPTS[1], max_new_tokens=15)
    good = made.add_request(PROMPTS[2], max_new_tokens=15)
    made.step()
    request = made.scheduler.requests[broken.request_id]
    request.num_computed_tokens = request.num_tokens  # a fault from elsewhere
    with pytest.raises(AssertionError, match="nothing_new"):
        while made.has_requests:
            made.step()
    assert good.token_ids == ALONE[2] and list(made.scheduler.requests) == [broken.request_id]
    checked_run(made)  # the step that broke off made it compute everything again
    assert broken.token_ids == ALONE[1]
    assert made.generate([PROMPTS[3]], 15)[0].token_ids == ALONE[3]


def test_seeded_sampling_depends_on_the_request_alone():
    params = [SamplingParams(temperature=1.2, top_k=8, top_p=0.9, seed=i) for i in range(9)]
    single = [
        engine().generate([prompt], 15, sampling=p)[0].token_ids
        for prompt, p in zip(PROMPTS, params)
    ]
    for options in (
        {},
        {"num_blocks": 12, "max_num_batched_tokens": 7},
        {"proposer": NgramProposer()},
    ):
        outputs = engine(**options).generate(PROMPTS, 15, sampling=params)
        assert [o.token_ids for o in outputs] == single, options
    assert len({tuple(tokens) for tokens in single}) == 9
    mixed = engine().generate(PROMPTS[:2], 15, sampling=[SamplingParams(), params[1]])
    assert [o.token_ids for o in mixed] == [ALONE[0], single[1]]


def test_a_progress_bar_is_shown_on_request_only(capsys):
    engine().generate(PROMPTS[:2], 3)
    assert capsys.readouterr().err == ""
    engine().generate(PROMPTS[:2], 3, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_block_tables_become_a_rectangle():
    assert table_rows([[3], [4, 5]]).tolist() == [[3, 0], [4, 5]]
    assert table_rows([]).shape == (0, 0)


def test_padding_rows_change_no_logits_and_no_slot():
    """A DECODE step padded to a fixed size, as a captured graph runs it."""
    made = engine()
    for prompt in PROMPTS[1:3]:
        made.add_request(prompt, max_new_tokens=5)
    made.step()
    schedule = made.scheduler.schedule()
    plain = made.runner.run(build_batch(schedule))
    before = [made.runner.cache.key_cache(layer).clone() for layer in range(2)]
    padded = made.runner.run(build_batch(schedule, pad_to=5))
    assert torch.equal(plain.argmax(-1), padded.argmax(-1))
    assert torch.allclose(plain, padded, atol=1e-12)
    for layer in range(2):
        assert torch.allclose(before[layer], made.runner.cache.key_cache(layer), atol=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": 7},
        {"request_id": ["x"]},
        {"sampling": {"temperature": 1.0}},
        {"tags": object()},
        {"tags": (("salt", b"x"),)},
        {"stop_token_ids": 5},
        {"stop_token_ids": [5.0]},
        {"stop_token_ids": [VOCAB]},
        {"max_new_tokens": None},
        {"priority": "high"},
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_before_it_harms_a_step(fields):
    engine = Engine(MODEL, num_blocks=12, block_size=4)
    good = engine.add_request([1, 2, 3, 4, 5], max_new_tokens=3)
    with pytest.raises(RequestError, match="expected"):
        engine.add_request([1, 2, 3], **fields)
    while engine.has_requests:
        engine.step()
    assert len(good.token_ids) == 3
    assert_empty(engine.scheduler)


def test_cost_16_a_length_that_can_never_fit_is_refused_at_start():
    """Nine blocks of four tokens, one of them the null block: room for 32 tokens."""
    assert Engine(MODEL, num_blocks=9, block_size=4, max_model_len=32)
    with pytest.raises(RequestError, match="max_model_len=33; expected at most 32"):
        Engine(MODEL, num_blocks=9, block_size=4, max_model_len=33)
