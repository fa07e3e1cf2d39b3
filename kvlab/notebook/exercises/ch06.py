"""Exercises of chapter 6 that take a number: the running sum, the idle card, the floor in time."""

from __future__ import annotations

import math

from kvlab import costs
from kvlab.configs import hardware, preset
from kvlab.kernels.splits import PROGRAMS_PER_MULTIPROCESSOR
from kvlab.notebook.exercises import number

_TOTAL, _TOP, _NEW = 3.0, 2.0, (4.0, 2.0)
_SHRUNK = _TOTAL * math.exp(-2)
_SUM = _SHRUNK + 1 + math.exp(-2)

_MULTIPROCESSORS = hardware("a100-80gb").num_multiprocessors
assert _MULTIPROCESSORS, "6.4 asks about them"
_SLOTS = _MULTIPROCESSORS * PROGRAMS_PER_MULTIPROCESSOR
_LLAMA = preset("llama-3-8b")
_HKV, _H = _LLAMA.num_kv_heads, _LLAMA.num_heads

_CARD = hardware("l4")
_BATCH, _CONTEXT = 16, 8192
_LAYER_BYTES = costs.kv_bytes_per_token(_LLAMA) // _LLAMA.num_layers * _BATCH * _CONTEXT
_FLOOR = _LAYER_BYTES / _CARD.bandwidth_bytes_per_second * 1e3

EXERCISES = [
    number("6.1", "A sum under a new maximum",
        f"So far the largest score is {_TOP:g} and the sum of exp(score - largest) is {_TOTAL:g}. "
        f"A tile with the scores {_NEW[0]:g} and {_NEW[1]:g} comes in. What is the sum now?",
        _SUM,
        (_TOTAL + 1 + math.exp(-2), "the old sum was taken under the old maximum; under the new "
         "one each of its terms is smaller"),
        (_TOTAL * math.exp(2) + 1 + math.exp(-2), "the old sum shrinks when the maximum grows: "
         "exp(old - new), not exp(new - old)"),
        (_TOTAL + math.exp(2) + 1, "these are the new scores under the old maximum; right in "
         "mathematics, but it is how exp overflows"),
        (1 + math.exp(-2), "that is the new tile alone"),
        (_SHRUNK + 2, "the second score is not the largest: its term is exp(2 - 4)"),
        (_SHRUNK + math.exp(4) + math.exp(2), "the new scores, too, count from the new maximum"),
        otherwise="old sum x exp(old maximum - new maximum) + sum of exp(new score - new maximum)",
        rel_tol=1e-4,
        hint="Which number must every term be divided by now that the largest score is 4, not 2?",
    ),
    number("6.4", "An idle card",
        f"One sequence, {_LLAMA.name} ({_H} query heads, {_HKV} KV heads), an A100 with "
        f"{_MULTIPROCESSORS} multiprocessors and {PROGRAMS_PER_MULTIPROCESSOR} program slots on "
        "each. Without splitting, which share of the slots has work?",
        _HKV / _SLOTS,
        (_H / _SLOTS, "one program serves all query heads of a KV head"),
        (_HKV / _MULTIPROCESSORS, f"each multiprocessor has {PROGRAMS_PER_MULTIPROCESSOR} slots"),
        (_H / _MULTIPROCESSORS, "count KV heads, and slots rather than multiprocessors"),
        (1 / _SLOTS, "one sequence is several programs: one for each KV head"),
        (_HKV, "that is the number of programs; which share of the slots is it?"),
        (100 * _HKV / _SLOTS, "a share between 0 and 1, please, not per cent"),
        otherwise="programs without a split = sequences x KV heads; slots = multiprocessors x 2",
        rel_tol=1e-3,
        hint="How many programs are launched for one sequence, and how many could run at once?",
    ),
    number("6.5", "The floor of one layer",
        f"{_BATCH} sequences of {_CONTEXT} tokens, {_LLAMA.name} in bf16, an L4 with "
        f"{_CARD.bandwidth_bytes_per_second / 1e9:g} GB/s. How many milliseconds must decode "
        "attention take at the least, in one layer?",
        _FLOOR,
        (_FLOOR / 2, "both K and V are read"),
        (_FLOOR * _H / _HKV, "K and V are read once for all query heads of a KV head"),
        (_FLOOR * _LLAMA.num_layers, "that is the whole model; the question is about one layer"),
        (_FLOOR / _BATCH, "every sequence has K and V of its own"),
        (_FLOOR / 1e3, "that is in seconds"),
        (_FLOOR * 2, "a bf16 number has two bytes"),
        (_FLOOR * 1e9 / 2**30, "bandwidth is quoted in powers of ten: GB, not GiB"),
        otherwise="bytes = sequences x tokens x KV heads x 2 x head size x 2; divide by the "
        "bandwidth",
        rel_tol=1e-3,
        hint="Attention can be no faster than its K and V can be read. How many bytes are they?",
    ),
]
