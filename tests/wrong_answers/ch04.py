"""Plausible wrong answers of chapter 4, each with a fragment of the hint it must get."""

import math
from itertools import pairwise

_KEYS = 3 * 30 * 3 * 64 * 2048


def _pairs(x, position, theta, pair, sign=1, power=2):
    out, d = list(x), len(x)
    for i in range(d // 2):
        a, b = pair(i, d)
        angle = sign * position * theta ** (-power * i / d)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def _half(i, d):
    return i, i + d // 2


def _neighbours(i, d):
    return 2 * i, 2 * i + 1


def _overwritten(x, position, theta):
    """x1 is replaced before x2 is computed from it."""
    d = len(x)
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        x[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
        x[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
    return x


WRONG = {
    "4.1": [
        (2560, "that is seq_len"),
        (2561, "should subtract"),
        (511, "go on from the prompt"),
        (512, "go on from the prompt"),
        (2558, "one too few"),
        (4607, "counted twice"),
        (7, "write down the positions"),
        ("2559", "expected a number"),
    ],
    "4.2": [
        (lambda p, n: all(r[-1] == s for r, s in zip(p, n)), "from its start is right"),
        (lambda p, n: p[0][-1] == max(n[0] - 1, 0), "only some of the requests"),
        (lambda p, n: p[-1][-1] == max(n[-1] - 1, 0), "only some of the requests"),
        (lambda p, n: True, "off-by-one itself"),
        (lambda p, n: all(r[-1] == s - 1 for r, s in zip(p, n)), "an idle row"),
        (lambda p, n: all(b - a == 1 for r in p for a, b in pairwise(r)), "off-by-one"),
        (lambda p, n: all(r[-1] < s or s == 0 for r, s in zip(p, n)), "restarts at 0"),
        (lambda p, n: all(len(r) == s for r, s in zip(p, n)), "first decode step"),
        (lambda p, n: None, "returns None"),
        (True, "define the function"),
    ],
    "4.3": [
        (lambda x, m, t: _pairs(x, m, t, _neighbours), "half-split pairs"),
        (lambda x, m, t: _pairs(x, m, t, _half, sign=-1), "the other way"),
        (lambda x, m, t: _pairs(x, m, t, _half, power=1), "you took -i/d"),
        (lambda x, m, t: _pairs(x, 1, t, _half), "multiply the frequency"),
        (lambda x, m, t: _pairs(x, m + 1, t, _half), "position + 1"),
        (lambda x, m, t: _pairs(x, m, 1.0, _half), "same speed"),
        (lambda x, m, t: x, "nothing was turned"),
        (_overwritten, "overwrite x1"),
        (lambda x, m, t: x[:4], "keeps both"),
        (lambda x, m, t: _pairs(x, m, 500.0, _half), "other angles"),
        (lambda x, m, t: None, "returns None"),
        ([1.0], "define the function"),
    ],
    "4.4": [
        (lambda mask: [len(row) for row in mask], "one counter"),
        (lambda mask: [len(row) - 1 for row in mask], "last prompt column"),
        (lambda mask: [sum(row) - 1 for row in mask], "one further"),
        (lambda mask: [sum(row) + 1 for row in mask], "seq_len of the next step"),
        (lambda mask: [row.count(0) for row in mask], "padded columns"),
        (lambda mask: [0 for row in mask], "does not restart"),
        (lambda mask: [max(map(sum, mask))] * len(mask), "one counter"),
        (lambda mask: None, "returns None"),
        ([3, 5, 1], "define the function"),
    ],
    "4.5": [
        (_KEYS // 2048, "the new key only"),
        (_KEYS // 30, "every layer"),
        (_KEYS * 3, "K has h_kv heads"),
        (_KEYS // 3, "two products and a sum"),
        (2 * _KEYS, "V is not rotated"),
        (_KEYS // 2, "a pair costs 6"),
        (1, "multiply the layers"),
    ],
}
