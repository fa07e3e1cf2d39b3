"""Exercises of chapter 4: which position, which rotation, what an unrotated cache costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.exercises import call, function, near, number

_SMOL = preset("smollm2-135m")
_P, _N = 2048, 512  # the running example
_CACHED = 2048  # context of 4.5
_KEYS = costs.key_rotation_flops(_SMOL, _CACHED)

#: 4.2: positions per request, seq_lens, is it right, what a function overlooks that says otherwise
_STEPS = [
    ([[0, 1, 2, 3, 4]], [5], True, "a prompt from its start is right"),
    ([[5]], [6], True, "the first decode step after 5 tokens stands at position 5"),
    ([[7], [2, 3, 4]], [8, 5], True, "a decode and a chunk in one batch are right"),
    ([[0]], [0], True, "an idle row has seq_len 0 and position 0"),
    ([[6]], [6], False, "position = seq_len is the off-by-one itself, and you accept it"),
    ([[0]], [6], False, "a decode step that restarts at 0 is accepted"),
    ([[5], [5]], [4, 6], False, "only some of the requests are looked at: check every one"),
    ([[5], [5]], [6, 4], False, "only some of the requests are looked at: check every one"),
    ([[5, 6, 7, 8, 9]], [5], False, "a uniform shift is accepted: it ascends, but from 5"),
    ([[4, 5, 6, 7, 8, 9]], [11], False, "the last position must be seq_len - 1, not near it"),
]


def _positions_ok(positions: list[list[int]], seq_lens: list[int]) -> bool:
    return all(row[-1] == max(n - 1, 0) for row, n in zip(positions, seq_lens, strict=True))


def _turn(
    x: list[float], position: int, theta: float, *, interleaved: bool = False,
    sign: float = 1.0, exponent: float = 2.0,
) -> list[float]:  # fmt: skip
    """x with every pair turned; the options are the usual mistakes."""
    out, half = list(x), len(x) // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = sign * position * theta ** (-exponent * i / len(x))
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


_X = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
_MASK = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]


def _changes_length(got: list[float], x: list[float], *rest: float) -> bool:
    return len(got) != len(x) or not math.isclose(math.hypot(*got), math.hypot(*x), rel_tol=1e-6)


def _each_row(position: Callable[[list[int]], int]) -> Callable:
    return lambda mask: [position(row) for row in mask]


EXERCISES = [
    number("4.1", "The position of the last decode step",
        f"A prompt of {_P:,} tokens, then {_N} decode forwards. Which position does the token have "
        "that the last one feeds?",
        _P + _N - 1,
        (_P + _N, "that is seq_len, which counts the token itself; positions start at 0"),
        (_P + _N + 1, "you added where you should subtract: position = seq_len - 1"),
        (_N, "you count from the start of decoding; positions go on from the prompt"),
        (_N - 1, "you count from the start of decoding; positions go on from the prompt"),
        (_P + _N - 2, "one too few: the first decode step stands at p, right after p - 1"),
        (2 * _P + _N - 1, "the prompt is counted twice"),
        otherwise="write down the positions of the prompt, then of the first decode step; go on",
        hint="What is seq_len in that step? The position is seq_len - 1.",
    ),
    function("4.2", "The detector",
        "Write positions_ok(positions, seq_lens). positions is a list with one list per request, "
        "the positions of the tokens it feeds in this step; seq_lens counts cached and new tokens "
        "of each. True if every request's last position is right.",
        _positions_ok,
        cases=_STEPS,
        otherwise="positions {case[0]}, seq_lens {case[1]}: {case[3]}",
        run=lambda positions_ok, *case: call(positions_ok, *case[:2]),
        same=lambda got, right: bool(got) == right,
        expected=lambda *case: case[2],
        hint="One comparison per request: row[-1] against seq_len - 1, but never below 0.",
    ),
    function("4.3", "Rotate a head by hand",
        "Write rotate(x, position, theta) for a list x of d numbers: half-split pairing, pair i "
        "turned by position * theta ** (-2 * i / d). Return the new list.",
        _turn,
        (partial(_turn, interleaved=True), "you paired neighbours (interleaved); half-split pairs "
         "i with i + d/2"),
        (partial(_turn, sign=-1.0), "you turned the other way: the first of the pair gets x1 cos "
         "- x2 sin"),
        (partial(_turn, exponent=1.0), "the exponent is -2i/d, and you took -i/d: the slow pairs "
         "turn too fast"),
        (lambda x, m, theta: _turn(x, 1, theta), "you forgot to multiply the frequency by "
         "the position"),
        (lambda x, m, theta: _turn(x, m + 1, theta), "you turned by position + 1"),
        (lambda x, m, theta: _turn(x, m, 1.0), "every pair turns at the same speed: "
         "use theta ** (-2 * i / d)"),
        (lambda x, m, theta: x, "nothing was turned"),
        cases=[(_X, 3, 10_000.0), (_X, 0, 10_000.0)],
        otherwise="lengths are right, so it is a rotation, but by other angles or of other pairs",
        signs=[
            (lambda got, x, position, theta: position == 0, "position 0 must leave x as it is"),
            (_changes_length, f"your result has not {len(_X)} numbers or not the length "
             f"{math.hypot(*_X):.3f}; a rotation keeps both. Did you overwrite x1 before you used "
             "it for x2?"),
        ],
        same=partial(near, rel_tol=1e-6),
        hint="Pair i is (x[i], x[i + d // 2]). Turn it by the angle position * theta ** (-2i/d).",
    ),
    function("4.4", "Left padding",
        "Write next_positions(mask): mask has one row per prompt, 0 for padding and 1 for a token, "
        "padding on the left. Return the position of each row's next token.",
        _each_row(sum),
        (_each_row(len), "all rows share one counter, the number of columns; count a row's real "
         "tokens"),
        (_each_row(lambda row: len(row) - 1), "all rows share one counter, and it is the last "
         "prompt column"),
        (_each_row(lambda row: sum(row) - 1), "that is the position of the last prompt token; the "
         "next one stands one further"),
        (_each_row(lambda row: sum(row) + 1), "that is seq_len of the next step; the position is "
         "one less"),
        (_each_row(lambda row: row.count(0)), "that is the number of padded columns"),
        (_each_row(lambda row: 0), "decoding goes on from the prompt, it does not restart"),
        cases=[(_MASK,)],
        otherwise="for the mask {case[0]} you give {got}; look at one row alone, without padding",
        same=lambda got, right: list(got) == right,
        hint="Remove the padding from a row. At which position would its next token stand?",
    ),
    number("4.5", "The price of unrotated keys",
        "SmolLM2-135M keeps unrotated K and rotates on read. How many FLOPs does one decode step "
        f"at s = {_CACHED:,} spend on turning the keys of all layers? Two products and a sum for "
        "each number.",
        _KEYS,
        (_KEYS // _CACHED, "that turns the new key only; cached ones are unrotated too"),
        (_KEYS // _SMOL.num_layers, "every layer has keys of its own"),
        (_KEYS * _SMOL.num_heads // _SMOL.num_kv_heads, "K has h_kv heads, not h"),
        (_KEYS // 3, "each number costs two products and a sum: 3 FLOPs"),
        (2 * _KEYS, "V is not rotated"),
        (_KEYS // 2, "a pair costs 6 FLOPs, so a number costs 3"),
        otherwise="multiply the layers, KV heads, head_dim, cached tokens and 3 FLOPs",
        hint="How many numbers does the K cache hold at that step? Each costs 3 FLOPs.",
    ),
]
