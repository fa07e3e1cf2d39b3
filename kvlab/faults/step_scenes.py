"""The small scenes in which a scheduler's faults show, and what is measured in them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from kvlab.engine import Engine
from kvlab.faults.drift import tiny_model
from kvlab.faults.seams import suspended
from kvlab.faults.step_checks import watch_steps
from kvlab.sampling import NgramProposer

#: Seven prompts of different lengths; the pool of `crowded` holds about three of them.
PROMPTS = tuple(tuple((7 * i + 3 * j) % 50 for j in range(6 + 3 * i)) for i in range(7))


def crowded(steps: int = 8, **options) -> Engine:
    """Run the prompts on the tiny model in a pool that is too small for all; returns the engine.

    steps   outputs per request are about this many, so a long watch is a long run
    """
    outputs = max(min(steps, 40), 12)
    settings = {
        "num_blocks": 22 if outputs <= 12 else 34,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "proposer": NgramProposer(),
    } | options
    engine = Engine(tiny_model(), **settings)
    engine.results = engine.generate(PROMPTS, outputs)
    return engine


def detect(steps: int = 8) -> None:
    """The crowded run, the same with light requests passing, and one prompt after another."""
    with watch_steps():
        for _ in range(max(steps // 40, 1)):
            crowded(steps)
        passing()


def passing() -> int:
    """A heavy request at the head while light ones keep coming; how long it stood there."""
    engine = Engine(
        tiny_model(), num_blocks=15, block_size=4, max_num_batched_tokens=48, prefix_caching=False,
        admission="full_length", head_of_line="skip", max_head_skips=3, max_num_seqs=4,
    )  # fmt: skip
    engine.add_request(list(range(12)), max_new_tokens=4)
    engine.step()
    engine.add_request(list(range(50)), request_id="heavy", max_new_tokens=2)
    heavy = engine.scheduler.requests["heavy"]
    for number in range(30):
        engine.add_request([number, 1, 2, 3, 4, 5], max_new_tokens=3)
        engine.step()
    while engine.has_requests:
        engine.step()
    return heavy.head_delay


def wrong_share(**options) -> Callable[[], float]:
    """Share of requests whose greedy outputs differ from running alone."""

    def measure() -> float:
        with suspended():
            right = [crowded(proposer=None, num_blocks=200).results[i].token_ids for i in range(7)]
        try:
            got = [result.token_ids for result in crowded(**options).results]
        except Exception:  # a fault may also end in an error: nothing right came out
            return 1.0
        return sum(a != b for a, b in zip(got, right)) / len(right)

    return measure


def budget_ratio() -> float:
    """Most tokens in one step over the budget."""
    steps = crowded(keep_trace=True).trace
    return max(step["used"] / step["budget"] for step in steps)


def false_hits() -> float:
    """Tokens reported as prefix hits although no two prompts share a block."""
    return float(crowded(proposer=None).scheduler.stats.num_cached_tokens)


def later_ones_first() -> float:
    """Requests that got their last token before an earlier one of the same length did."""
    done = []
    engine = Engine(tiny_model(), num_blocks=12, block_size=4, max_num_batched_tokens=64)
    for index in range(5):
        engine.add_request([index + j for j in range(9)], request_id=str(index), max_new_tokens=16)
    while engine.has_requests:
        done += [int(output.request_id) for output in engine.step().finished]
    return float(sum(a > b for a, b in pairwise(done)))
