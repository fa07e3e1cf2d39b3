"""Plausible wrong answers of chapter 1, each with a fragment of the hint it must get."""

_LAYERS, _P, _N = 30, 100, 50
_SUM = sum(_P + t for t in range(1, _N + 1))

WRONG = {
    "1.1": [
        (150, "every row"),
        (148, "one row too few"),
        (49, "prompt's tokens"),
        (99, "generated tokens"),
        (_SUM - _N, "sum over all forwards"),
        (1, "count the tokens"),
        ("149", "expected a number"),
    ],
    "1.2": [
        (_SUM * _LAYERS, "one new token"),
        (_SUM - _N, "one layer"),
        ((_SUM - _N + _P) * _LAYERS, "prefill"),
        (2 * (_SUM - _N) * _LAYERS, "counted them as two"),
        (_LAYERS * _N * 149, "grows by one"),
        (_LAYERS * _N * _P, "not only the prompt"),
        (7, "sum p + t - 1"),
    ],
    "1.3": [
        (512, "first output already"),
        (513, "never fed back"),
        (510, "n + 1 outputs"),
        (2559, "context length"),
        (2560, "context length"),
        (True, "expected a number"),
    ],
    "1.4": [
        (lambda P, h, d_h, L, s: 2 * P * s + 4 * h * d_h * L * s * s, "skips half"),
        (lambda P, h, d_h, L, s: P * s + 2 * h * d_h * L * s * s, "two FLOPs"),
        (lambda P, h, d_h, L, s: 2 * P + 2 * h * d_h * L * s * s, "every one of the s tokens"),
        (lambda P, h, d_h, L, s: 2 * P * s + h * d_h * L * s * s, "a dot product and"),
        (lambda P, h, d_h, L, s: 2 * P * s + 2 * h * d_h * s * s, "every layer"),
        (lambda P, h, d_h, L, s: 2 * P * s + 2 * d_h * L * s * s, "every query head"),
        (lambda P, h, d_h, L, s: 2 * P * s, "is missing"),
        (lambda P, h, d_h, L, s: None, "returns None"),
        (lambda P, h, d_h, L, s: 2 * P * s + 4 * h * d_h * L * s, "the step costs"),
        (2304, "define the function"),
    ],
}
