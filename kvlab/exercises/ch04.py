"""Exercises of chapter 4: which position, which rotation, what an unrotated cache costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvlab import costs
from kvlab.configs import preset
from kvlab.exercises import Exercise, Wrong, number, register

_SMOL = preset("smollm2-135m")
_P, _N = 2048, 512  # the running example
_CACHED = 2048  # context of 4.5
_KEYS = costs.key_rotation_flops(_SMOL, _CACHED)

register(
    Exercise(
        id="4.1",
        title="The position of the last decode step",
        question=(
            f"A prompt of {_P:,} tokens, then {_N} decode forwards. Which position does the token "
            "have that the last one feeds?"
        ),
        check=number(
            _P + _N - 1,
            [
                (_P + _N, "that is seq_len, which counts the token itself; positions start at 0"),
                (_P + _N + 1, "you added where you should subtract: position = seq_len - 1"),
                (_N, "you count from the start of decoding; positions go on from the prompt"),
                (_N - 1, "you count from the start of decoding; positions go on from the prompt"),
                (_P + _N - 2, "one too few: the first decode step stands at p, right after p - 1"),
                (2 * _P + _N - 1, "the prompt is counted twice"),
            ],
            "write down the positions of the prompt, then of the first decode step, and go on",
        ),
        solution=_P + _N - 1,
        hint="What is seq_len in that step? The position is seq_len - 1.",
    )
)

#: (positions per request, seq_lens, is it right, what a checker that says otherwise overlooks)
_STEPS = (
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
)


def _check_detector(answer: Any) -> None:
    """4.2 asks for a function (positions, seq_lens) -> bool."""
    if not callable(answer):
        raise Wrong("define a function of positions and seq_lens and pass the function itself")
    for positions, seq_lens, right, oversight in _STEPS:
        got = answer([list(row) for row in positions], list(seq_lens))
        if got is None:
            raise Wrong("the function returns None: return True or False")
        if bool(got) != right:
            raise Wrong(f"positions {positions}, seq_lens {seq_lens}: {oversight}")


register(
    Exercise(
        id="4.2",
        title="The detector",
        question=(
            "Write positions_ok(positions, seq_lens). positions is a list with one list per "
            "request, the positions of the tokens it feeds in this step; seq_lens counts cached "
            "and new tokens of each. True if every request's last position is right."
        ),
        check=_check_detector,
        solution=lambda positions, seq_lens: all(
            row[-1] == max(seq_len - 1, 0)
            for row, seq_len in zip(positions, seq_lens, strict=True)
        ),
        hint="One comparison per request: row[-1] against seq_len - 1, but never below 0.",
    )
)


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


def _close(got: Any, right: list[float]) -> bool:
    return len(got) == len(right) and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in zip(got, right, strict=True)
    )


def _check_rotation(answer: Any) -> None:
    """4.3 asks for a function (x, position, theta) -> list."""
    if not callable(answer):
        raise Wrong("define a function of x, position and theta and pass the function itself")
    x, position, theta = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 3, 10_000.0
    given = list(x)
    got = answer(given, position, theta)
    if got is None:
        raise Wrong("the function returns None: return the rotated list")
    got = [float(value) for value in got]
    if _close(got, _turn(x, position, theta)):
        if not _close([float(v) for v in answer(list(x), 0, theta)], x):
            raise Wrong("position 0 must leave x as it is")
        return
    mistakes: tuple[tuple[list[float], str], ...] = (
        (_turn(x, position, theta, interleaved=True), "you paired neighbours (interleaved); "
         "half-split pairs i with i + d/2"),
        (_turn(x, position, theta, sign=-1.0), "you turned the other way: the first of the pair "
         "gets x1 cos - x2 sin"),
        (_turn(x, position, theta, exponent=1.0), "the exponent is -2i/d, and you took -i/d: "
         "the slow pairs turn too fast"),
        (_turn(x, 1, theta), "you forgot to multiply the frequency by the position"),
        (_turn(x, position + 1, theta), "you turned by position + 1"),
        (_turn(x, position, 1.0), "every pair turns at the same speed: use theta ** (-2 * i / d)"),
        (x, "nothing was turned"),
    )  # fmt: skip
    for value, mistake in mistakes:
        if _close(got, value):
            raise Wrong(mistake)
    length = math.sqrt(sum(value * value for value in got))
    right = math.sqrt(sum(value * value for value in x))
    if len(got) != len(x) or not math.isclose(length, right, rel_tol=1e-6):
        raise Wrong(
            f"the result has {len(got)} numbers and length {length:.3f}; a rotation keeps both "
            f"({len(x)} and {right:.3f}). Did you overwrite x1 before you used it for x2?"
        )
    raise Wrong("lengths are right, so it is a rotation, but by other angles or of other pairs")


register(
    Exercise(
        id="4.3",
        title="Rotate a head by hand",
        question=(
            "Write rotate(x, position, theta) for a list x of d numbers: half-split pairing, pair "
            "i turned by position * theta ** (-2 * i / d). Return the new list."
        ),
        check=_check_rotation,
        solution=lambda x, position, theta: _turn(x, position, theta),
        hint="Pair i is (x[i], x[i + d // 2]). Turn it by the angle position * theta ** (-2i/d).",
    )
)


def _check_padded(answer: Any) -> None:
    """4.4 asks for a function mask -> list of positions."""
    if not callable(answer):
        raise Wrong("define a function of the mask and pass the function itself")
    mask = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    got = answer([list(row) for row in mask])
    if got is None:
        raise Wrong("the function returns None: return one position per row")
    got = [int(value) for value in got]
    mistakes: tuple[tuple[Callable[[list[int]], int], str], ...] = (
        (len, "all rows share one counter, the number of columns; count each row's real tokens"),
        (lambda row: len(row) - 1, "all rows share one counter, and it is the last prompt column"),
        (lambda row: sum(row) - 1, "that is the position of the last prompt token; the next one "
         "stands one further"),
        (lambda row: sum(row) + 1, "that is seq_len of the next step; the position is one less"),
        (lambda row: row.count(0), "that is the number of padded columns"),
        (lambda row: 0, "decoding goes on from the prompt, it does not restart"),
    )  # fmt: skip
    if got == [sum(row) for row in mask]:
        return
    for mistake, text in mistakes:
        if got == [mistake(row) for row in mask]:
            raise Wrong(text)
    raise Wrong(f"for the mask {mask} you give {got}; look at one row alone, without its padding")


register(
    Exercise(
        id="4.4",
        title="Left padding",
        question=(
            "Write next_positions(mask): mask has one row per prompt, 0 for padding and 1 for a "
            "token, padding on the left. Return the position of each row's next token."
        ),
        check=_check_padded,
        solution=lambda mask: [sum(row) for row in mask],
        hint="Remove the padding from a row. At which position would its next token stand?",
    )
)

register(
    Exercise(
        id="4.5",
        title="The price of unrotated keys",
        question=(
            f"SmolLM2-135M keeps unrotated K and rotates on read. How many FLOPs does one decode "
            f"step at s = {_CACHED:,} spend on turning the keys of all layers? Two products and a "
            "sum for each number."
        ),
        check=number(
            _KEYS,
            [
                (_KEYS // _CACHED, "that turns the new key only; cached ones are unrotated too"),
                (_KEYS // _SMOL.num_layers, "every layer has keys of its own"),
                (_KEYS * _SMOL.num_heads // _SMOL.num_kv_heads, "K has h_kv heads, not h"),
                (_KEYS // 3, "each number costs two products and a sum: 3 FLOPs"),
                (2 * _KEYS, "V is not rotated"),
                (_KEYS // 2, "a pair costs 6 FLOPs, so a number costs 3"),
            ],
            "multiply the layers, KV heads, head_dim, cached tokens and 3 FLOPs",
        ),
        solution=_KEYS,
        hint="How many numbers does the K cache hold at that step? Each costs 3 FLOPs.",
    )
)
