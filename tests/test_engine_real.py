"""The engine on the real checkpoint: 32 requests of all kinds at once, each as if alone."""

from __future__ import annotations

import pytest
from scheduling import assert_empty

from kvlab.checkpoint import load
from kvlab.engine import Engine
from kvlab.generate import cached_generate
from kvlab.integrity import check_scheduler
from kvlab.notebook.policies import PassHead
from kvlab.sampling import NgramProposer, SamplingParams

pytestmark = pytest.mark.real

OPENINGS = (
    "The capital of France is",
    "One, two, three, four, five, six,",
    "def add(a, b):\n    return",
    "Water boils at",
    "Once upon a time there was a small house at the edge of a forest, and in it lived",
    "1 apple, 2 apples, 3 apples, 4 apples,",
    "Q",
    "The keeper wrote in his book every evening. The keeper wrote in his book every",
)
SHARED = "You are a careful assistant. Answer in one short sentence. Question: "
OUTPUTS = (4, 7, 9, 5)
NEAR_TIE = 2e-3  # on logits near 45; the order of sums moves one by up to 6e-4


@pytest.fixture(scope="module")
def checkpoint():
    return load()


def mix(checkpoint) -> list[tuple[list[int], int, int]]:
    """(prompt, outputs, step of arrival) of 32 requests, every second one with a shared opening."""
    requests = []
    for i in range(32):
        text = OPENINGS[i % 8] + (f" {i}" if i >= 16 else "")
        ids = checkpoint.encode((SHARED if i % 2 else "") + text)
        requests.append((ids, OUTPUTS[i % 4], i // 3))
    return requests


def assert_like_alone(model, prompt: list[int], got: list[int], outputs: int) -> None:
    """Equal ids; where two candidates are closer than float32 can tell, up to there."""
    steps = []
    expected = cached_generate(model, prompt, outputs, on_step=steps.append)
    for index, (token, right) in enumerate(zip(got, expected, strict=True)):
        if token != right:
            best, second = steps[index].logits.topk(2).values.tolist()
            assert best - second < NEAR_TIE, f"output {index}: {token} for {right}, no near-tie"
            return


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 16, "proposer": NgramProposer(), "max_num_batched_tokens": 48,
         "long_prefill_token_threshold": 24},
    ],
    ids=["small pool, drafts, chunks, skipping"],
)  # fmt: skip
def test_32_requests_at_once_equal_each_alone(checkpoint, options):
    modes = set()
    engine = Engine(
        checkpoint.model, block_size=8, max_num_seqs=12, scheduler=PassHead,
        on_step=lambda result: modes.add(result.batch.mode), **options,
    )  # fmt: skip
    requests, live, aborted, now = mix(checkpoint), {}, set(), 0
    while now <= 11 or engine.has_requests:
        for i, (prompt, outputs, arrives) in enumerate(requests):
            if arrives == now:
                live[i] = engine.add_request(prompt, request_id=str(i), max_new_tokens=outputs)
        if now in (6, 9):
            victim = engine.scheduler.running[-1].request_id
            engine.abort(victim)
            aborted.add(int(victim))
        engine.step()
        check_scheduler(engine.scheduler)
        now += 1
    assert_empty(engine.scheduler)

    stats = engine.scheduler.stats
    assert len(live) == 32 and len(aborted) == 2
    assert stats.num_preemptions > 0 and stats.num_recomputed_tokens > 0
    assert stats.num_cached_tokens > 0 and stats.num_accepted_tokens > 0
    assert modes >= {"mixed", "decode"}
    for i, (prompt, outputs, _) in enumerate(requests):
        got = live[i].token_ids
        assert_like_alone(checkpoint.model, prompt, got, len(got) if i in aborted else outputs)


def test_end_of_sequence_and_seeds_on_real_text(checkpoint):
    prompt = checkpoint.encode("The capital of France is")
    params = [SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=s) for s in (1, 1, 2)]

    def run():
        engine = Engine(checkpoint.model, num_blocks=65, eos_token_id=checkpoint.eos_token_ids)
        return [o.token_ids for o in engine.generate([prompt] * 3, 10, sampling=params)]

    one, same, other = run()
    assert one == same != other
    assert run() == [one, same, other]
