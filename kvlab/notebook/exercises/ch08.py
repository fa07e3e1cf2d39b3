"""Exercises of chapter 8: bytes, roofs, and what fits."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvlab import costs
from kvlab.configs import hardware, preset
from kvlab.notebook.exercises import function, near, number

_LLAMA = preset("llama-3-8b")
_P = 8_030_000_000  # coarse accounting, as the running example
_L4, _H100 = hardware("l4"), hardware("h100-sxm")
_BANDWIDTH = _L4.bandwidth_bytes_per_second
_CONTEXT = 4096
_WEIGHTS = costs.weight_bytes(_P)
_MOVED = costs.cached_step_bytes(_LLAMA, _P, _CONTEXT)
_RATE = 1 / costs.memory_seconds(_MOVED, _BANDWIDTH)
_RATE_KV = costs.kv_bytes_per_token(_LLAMA)
_WIDE = _RATE_KV * _LLAMA.num_heads // _LLAMA.num_kv_heads
_ARITHMETIC = _L4.peak_flops_per_second["bf16"] / costs.cached_step_flops(_LLAMA, _P, _CONTEXT)
_CROSSING = costs.kv_weight_crossover_tokens(_LLAMA, _P)

_random = random.Random(8)
_TRIALS = [
    (10 ** _random.uniform(9, 14), 10 ** _random.uniform(8, 11),
     10 ** _random.uniform(12, 15), 10 ** _random.uniform(10, 13))
    for _ in range(50)
]  # fmt: skip


def _of_times(rule: Callable[[float, float], float]) -> Callable[..., float]:
    """step_seconds, if `rule` says which of the two times counts: arithmetic, memory."""
    return lambda flops, moved, peak, bandwidth: rule(flops / peak, moved / bandwidth)


def _seconds(step_seconds: Callable) -> list[float]:
    return [float(step_seconds(*trial)) for trial in _TRIALS]


_UTILISATION, _LEN = 0.9, 8192
_DRIVER = _H100.driver_memory_bytes
assert _DRIVER, "8.4 asks about it"
_POOL = costs.pool_bytes(_DRIVER, _UTILISATION, _WEIGHTS)
_FIT = costs.sequences_that_fit(_LLAMA, _POOL, _LEN)
_EACH = _LEN * _RATE_KV

EXERCISES = [
    number("8.1", "The most a card can give",
        f"Llama-3-8B in bf16 (P = {_P:,}) decodes one sequence on an L4, which moves "
        f"{_BANDWIDTH / 1e9:.0f} GB/s. At context {_CONTEXT:,}, how many tokens a second are "
        "possible at most? (to half a percent)",
        _RATE,
        (_BANDWIDTH / _WEIGHTS, "the step reads the cache too, not only the weights"),
        (_BANDWIDTH / (_P + _MOVED - _WEIGHTS), "a bf16 weight has two bytes"),
        (1 / _RATE, "that is seconds a token; asked is tokens a second"),
        (1e3 / _RATE, "that is milliseconds a token; asked is tokens a second"),
        (_BANDWIDTH * 1.024**3 / _MOVED, "a datasheet's GB is a power of ten; you took GiB"),
        (_BANDWIDTH / (_WEIGHTS + _CONTEXT * _WIDE), "the cache holds KV heads; you charged the "
         "query heads"),
        (_ARITHMETIC, "that is the roof of the arithmetic; the bytes take longer"),
        otherwise="bandwidth / (bytes of the weights + bytes of the cache at this context)",
        rel_tol=5e-3,
        hint="What does one step read? Add it up, then divide the bandwidth by it.",
    ),
    number("8.2", "Where KV outweighs the weights",
        f"The same model, weights and KV in bf16 (P = {_P:,}). From how many resident tokens on, "
        "over the whole batch, does a step read more KV than weights? (to half a percent)",
        _CROSSING,
        (_P / _RATE_KV, "a weight has two bytes as well"),
        (_WEIGHTS / (_RATE_KV / 2), "K and V are both read, in two bytes each"),
        (_WEIGHTS / (_RATE_KV / _LLAMA.num_layers), "that is the rate of one layer"),
        (_WEIGHTS / _WIDE, "the cache holds KV heads; you charged the query heads"),
        (_RATE_KV / _WEIGHTS, "that is the quotient upside down"),
        (_CROSSING / 2048, "that is a number of sequences; asked is tokens"),
        otherwise="bytes of the weights / bytes of one token's K and V",
        rel_tol=5e-3,
        hint="Both sides in bytes: the weights once, and a number of tokens times 128 KiB.",
    ),
    function("8.3", "The roofline in a line",
        "Write step_seconds(flops, bytes_moved, peak, bandwidth): the least time a step can take, "
        "in seconds, when arithmetic and memory work at the same time.",
        _of_times(max),
        (_of_times(lambda arithmetic, memory: arithmetic + memory), "the two run at the same time: "
         "the longer hides the shorter"),
        (_of_times(min), "the slower of the two decides, not the faster"),
        (_of_times(lambda arithmetic, memory: arithmetic), "you look at the arithmetic only; "
         "sometimes the memory takes longer"),
        (_of_times(lambda arithmetic, memory: memory), "you look at the memory only; sometimes the "
         "arithmetic takes longer"),
        (_of_times(lambda *times: 1e3 * max(times)), "that is milliseconds; asked is seconds"),
        (_of_times(lambda *times: 1 / max(times)), "that is a rate; asked is a time"),
        cases=[()],
        otherwise="flops / peak and bytes / bandwidth are two times; which one is waited for?",
        run=_seconds,
        same=near,
        fails="it fails or gives no number ({kind}: {error}); expected a number of seconds",
        hint="Two times. While the longer runs, the shorter is done.",
    ),
    number("8.4", "Admission",
        f"An H100 whose driver reports {_DRIVER // 2**20:,} MiB holds Llama-3-8B (P = {_P:,}, "
        f"bf16). An engine may use {_UTILISATION:.0%} of the card. How many sequences of {_LEN:,} "
        "tokens fit at the same time, KV in bf16?",
        _FIT,
        ((_DRIVER - _WEIGHTS) // _EACH, "you used the whole card; the engine keeps a share free "
         "for activations"),
        (_DRIVER * _UTILISATION // _EACH, "the weights are on the card too"),
        ((80e9 * _UTILISATION - _WEIGHTS) // _EACH, "you took 80 GB; the driver reports MiB, and "
         "more of them"),
        (_POOL / _EACH, "a part of a sequence does not fit: round down"),
        (_FIT + 1, "rounding up admits a sequence that does not fit"),
        (_POOL // _RATE_KV, "that is tokens; asked is sequences"),
        otherwise="(share of the memory - weights) / (tokens x bytes per token), rounded down",
        hint="Bytes throughout. MiB are 2^20 bytes, and the weights come off first.",
    ),
]
