"""Exercises of chapter 8: bytes, roofs, and what fits."""

from __future__ import annotations

import math
import random
from typing import Any

from kvlab import costs, kv_costs, roofline
from kvlab.configs import hardware, preset
from kvlab.exercises import Exercise, Wrong, number, register

_LLAMA = preset("llama-3-8b")
_P = 8_030_000_000  # coarse accounting, as the running example
_L4, _H100 = hardware("l4"), hardware("h100-sxm")

_CONTEXT = 4096
_WEIGHTS = costs.weight_bytes(_P)
_MOVED = costs.cached_step_bytes(_LLAMA, _P, _CONTEXT)
_RATE = 1 / costs.memory_seconds(_MOVED, _L4.bandwidth_bytes_per_second)
_WIDE = costs.kv_bytes_per_token(_LLAMA) * _LLAMA.num_heads // _LLAMA.num_kv_heads

register(
    Exercise(
        id="8.1",
        title="The most a card can give",
        question=(
            f"Llama-3-8B in bf16 (P = {_P:,}) decodes one sequence on an L4, which moves "
            f"{_L4.bandwidth_bytes_per_second / 1e9:.0f} GB/s. At context {_CONTEXT:,}, how many "
            "tokens a second are possible at most? (to half a percent)"
        ),
        check=number(
            _RATE,
            [
                (
                    _L4.bandwidth_bytes_per_second / _WEIGHTS,
                    "the step reads the cache too, not only the weights",
                ),
                (
                    _L4.bandwidth_bytes_per_second / (_P + _MOVED - _WEIGHTS),
                    "a bf16 weight has two bytes",
                ),
                (1 / _RATE, "that is seconds a token; asked is tokens a second"),
                (1e3 / _RATE, "that is milliseconds a token; asked is tokens a second"),
                (
                    _L4.bandwidth_bytes_per_second * 1.024**3 / _MOVED,
                    "a datasheet's GB is a power of ten; you took GiB",
                ),
                (
                    _L4.bandwidth_bytes_per_second / (_WEIGHTS + _CONTEXT * _WIDE),
                    "the cache holds KV heads; you charged the query heads",
                ),
                (
                    _L4.peak_flops_per_second["bf16"]
                    / costs.cached_step_flops(_LLAMA, _P, _CONTEXT),
                    "that is the roof of the arithmetic; the bytes take longer",
                ),
            ],
            "bandwidth / (bytes of the weights + bytes of the cache at this context)",
            rel_tol=5e-3,
        ),
        solution=_RATE,
        hint="What does one step read? Add it up, then divide the bandwidth by it.",
    )
)

_CROSSING = roofline.kv_weight_crossover_tokens(_LLAMA, _P)
_RATE_KV = costs.kv_bytes_per_token(_LLAMA)

register(
    Exercise(
        id="8.2",
        title="Where KV outweighs the weights",
        question=(
            f"The same model, weights and KV in bf16 (P = {_P:,}). From how many resident tokens "
            "on, over the whole batch, does a step read more KV than weights? (to half a percent)"
        ),
        check=number(
            _CROSSING,
            [
                (_P / _RATE_KV, "a weight has two bytes as well"),
                (_WEIGHTS / (_RATE_KV / 2), "K and V are both read, in two bytes each"),
                (_WEIGHTS / (_RATE_KV / _LLAMA.num_layers), "that is the rate of one layer"),
                (_WEIGHTS / _WIDE, "the cache holds KV heads; you charged the query heads"),
                (_RATE_KV / _WEIGHTS, "that is the quotient upside down"),
                (_CROSSING / 2048, "that is a number of sequences; asked is tokens"),
            ],
            "bytes of the weights / bytes of one token's K and V",
            rel_tol=5e-3,
        ),
        solution=_CROSSING,
        hint="Both sides in bytes: the weights once, and a number of tokens times 128 KiB.",
    )
)


def _check_roof(answer: Any) -> None:
    """8.3 asks for step_seconds(flops, bytes_moved, peak, bandwidth)."""
    if not callable(answer):
        raise Wrong("define the function step_seconds(...) and pass the function itself")
    rng = random.Random(8)
    trials = []
    for _ in range(50):
        flops, moved = 10 ** rng.uniform(9, 14), 10 ** rng.uniform(8, 11)
        peak, bandwidth = 10 ** rng.uniform(12, 15), 10 ** rng.uniform(10, 13)
        try:
            got = answer(flops, moved, peak, bandwidth)
        except Exception as error:  # the reader's own code may raise anything
            raise Wrong(f"step_seconds raised {type(error).__name__}: {error}") from None
        if not isinstance(got, int | float):
            raise Wrong(f"step_seconds returned {type(got).__name__}; expected a number of seconds")
        trials.append((got, flops / peak, moved / bandwidth))
    for rule, mistake in _ROOF_RULES:
        if all(math.isclose(got, rule(a, m), rel_tol=1e-9) for got, a, m in trials):
            if mistake:
                raise Wrong(mistake)
            return
    raise Wrong("flops / peak and bytes / bandwidth are two times; which one is waited for?")


_ROOF_RULES = (
    (max, ""),
    (lambda a, m: a + m, "the two run at the same time: the longer hides the shorter"),
    (min, "the slower of the two decides, not the faster"),
    (lambda a, m: a, "you look at the arithmetic only; sometimes the memory takes longer"),
    (lambda a, m: m, "you look at the memory only; sometimes the arithmetic takes longer"),
    (lambda a, m: 1e3 * max(a, m), "that is milliseconds; asked is seconds"),
    (lambda a, m: 1 / max(a, m), "that is a rate; asked is a time"),
)


def _step_seconds(flops: float, bytes_moved: float, peak: float, bandwidth: float) -> float:
    return max(flops / peak, bytes_moved / bandwidth)


register(
    Exercise(
        id="8.3",
        title="The roofline in a line",
        question=(
            "Write step_seconds(flops, bytes_moved, peak, bandwidth): the least time a step can "
            "take, in seconds, when arithmetic and memory work at the same time."
        ),
        check=_check_roof,
        solution=_step_seconds,
        hint="Two times. While the longer runs, the shorter is done.",
    )
)

_UTILISATION, _LEN = 0.9, 8192
_POOL = kv_costs.pool_bytes(_H100.driver_memory_bytes, _UTILISATION, _WEIGHTS)
_FIT = kv_costs.sequences_that_fit(_LLAMA, _POOL, _LEN)
_EACH = _LEN * _RATE_KV


def _fit(budget: float) -> int:
    return int((budget - _WEIGHTS) // _EACH)


register(
    Exercise(
        id="8.4",
        title="Admission",
        question=(
            f"An H100 whose driver reports {_H100.driver_memory_bytes // 2**20:,} MiB holds "
            f"Llama-3-8B (P = {_P:,}, bf16). An engine may use {_UTILISATION:.0%} of the card. How "
            f"many sequences of {_LEN:,} tokens fit at the same time, KV in bf16?"
        ),
        check=number(
            _FIT,
            [
                (
                    _fit(_H100.driver_memory_bytes),
                    "you used the whole card; the engine keeps a share free for activations",
                ),
                (
                    int(_H100.driver_memory_bytes * _UTILISATION // _EACH),
                    "the weights are on the card too",
                ),
                (
                    _fit(80e9 * _UTILISATION),
                    "you took 80 GB; the driver reports MiB, and more of them",
                ),
                (_POOL / _EACH, "a part of a sequence does not fit: round down"),
                (_FIT + 1, "rounding up admits a sequence that does not fit"),
                (_POOL // _RATE_KV, "that is tokens; asked is sequences"),
            ],
            "(share of the memory - weights) / (tokens x bytes per token), rounded down",
        ),
        solution=_FIT,
        hint="Bytes throughout. MiB are 2^20 bytes, and the weights come off first.",
    )
)
