"""Plausible wrong answers of chapter 8, each with a fragment of the hint it must get."""

_P, _RATE = 8.03e9, 131_072
_L4 = 300e9
_MOVED = 2 * _P + 4096 * _RATE
_POOL = 0.9 * 81_559 * 2**20 - 2 * _P
_EACH = 8192 * _RATE


def _added(flops, bytes_moved, peak, bandwidth):
    return flops / peak + bytes_moved / bandwidth


def _faster(flops, bytes_moved, peak, bandwidth):
    return min(flops / peak, bytes_moved / bandwidth)


def _memory_only(flops, bytes_moved, peak, bandwidth):
    return bytes_moved / bandwidth


def _arithmetic_only(flops, bytes_moved, peak, bandwidth):
    return flops / peak


def _milliseconds(flops, bytes_moved, peak, bandwidth):
    return 1e3 * max(flops / peak, bytes_moved / bandwidth)


def _rate(flops, bytes_moved, peak, bandwidth):
    return 1 / max(flops / peak, bytes_moved / bandwidth)


def _nothing(flops, bytes_moved, peak, bandwidth):
    max(flops / peak, bytes_moved / bandwidth)


WRONG = {
    "8.1": [
        (_L4 / (2 * _P), "not only the weights"),
        (_L4 / (_P + 4096 * _RATE), "two bytes"),
        (_MOVED / _L4, "tokens a second"),
        (1e3 * _MOVED / _L4, "milliseconds"),
        (_L4 / (2 * _P + 4 * 4096 * _RATE), "query heads"),
        (121e12 / (2 * _P + 4 * 32 * 128 * 32 * 4096), "roof of the arithmetic"),
        (1.0, "bandwidth /"),
        ("18", "expected a number"),
    ],
    "8.2": [
        (_P / _RATE, "two bytes as well"),
        (2 * _P / (_RATE / 2), "both read"),
        (2 * _P / (_RATE / 32), "one layer"),
        (2 * _P / (4 * _RATE), "query heads"),
        (_RATE / (2 * _P), "upside down"),
        (2 * _P / _RATE / 2048, "number of sequences"),
    ],
    "8.3": [
        (_added, "hides the shorter"),
        (_faster, "slower of the two"),
        (_memory_only, "memory only"),
        (_arithmetic_only, "arithmetic only"),
        (_milliseconds, "milliseconds"),
        (_rate, "a rate"),
        (_nothing, "expected a number of seconds"),
        (0.004, "pass the function itself"),
    ],
    "8.4": [
        (int((81_559 * 2**20 - 2 * _P) // _EACH), "whole card"),
        (int(0.9 * 81_559 * 2**20 // _EACH), "weights are on the card"),
        (int((0.9 * 80e9 - 2 * _P) // _EACH), "80 GB"),
        (_POOL / _EACH, "round down"),
        (int(_POOL // _EACH) + 1, "rounding up"),
        (int(_POOL // _RATE), "that is tokens"),
    ],
}
