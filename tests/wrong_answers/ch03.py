"""Plausible wrong answers of chapter 3, each with a fragment of the hint it must get."""

_QWEN = 64 * 8 * 2 * 128 * 2
_ROW = 16 * 2 * 128 * 2
_N = 32_768
_LATENT = 61 * 576 * 2

WRONG = {
    "3.1": [
        (64 * 8 * 2 * 80 * 2, "head_dim is declared"),
        (64 * 64 * 2 * 128 * 2, "query heads are not cached"),
        (_QWEN // 2, "K and V are both kept"),
        (_QWEN // 64, "one layer"),
        (_QWEN * 2, "two bytes, not four"),
        (5120 * 2 * 64, "layers x KV heads"),
        ("262144", "expected a number"),
    ],
    "3.2": [
        (62 * _ROW * _N, "charged the windows for the whole context"),
        (10 * _ROW * _N, "left the windows out"),
        (52 * _ROW * 1024, "the windows alone"),
        ((10 * _ROW * _N + 52 * _ROW * 1024) // 2, "K and V are both kept"),
        (10 * _ROW * _N + 52 * _ROW, "min(tokens, window)"),
        (None.__class__, "expected a number"),
    ],
    "3.3": [
        (lambda j, h, kv: j % kv, "tiles the KV heads"),
        (lambda j, h, kv: j // kv, "divided by the number of KV heads"),
        (lambda j, h, kv: j, "a KV head of its own"),
        (lambda j, h, kv: j / (h / kv), "use //, not /"),
        (lambda j, h, kv: j // (h // kv) + 1, "does not exist"),
        (lambda j: j // 3, "raised TypeError"),
        (lambda j, h, kv: 0, "expected [0, 0, 0, 1"),
        (2, "define the function"),
    ],
    "3.4": [
        (_LATENT / 8, "every rank needs all of it"),
        (2 * _LATENT, "kept once"),
        (61 * 512 * 2, "64 rotated numbers are kept too"),
        (61 * 2 * 512 * 2, "kept once, and the 64"),
        (61 * 128 * (192 + 128) * 2, "written out for every head"),
        (61 * 128 * (192 + 128) * 2 / 8, "split over the ranks"),
        (8 * _LATENT, "all ranks together"),
        (576 * 2, "61 layers"),
    ],
}
