"""Plausible wrong answers of chapter 5, each with a fragment of the hint it must get."""

from math import ceil

RIGHT_SHARING = {
    "same tokens, other outputs",
    "same first 8 tokens, then others",
    "same tokens, sampled at another temperature",
}

WRONG = {
    "5.1": [
        (37, "that is the position"),
        (12, "that is the block"),
        (3 * 16 + 5, "counted from 0"),
        (12 * 16 + 37, "only the offset"),
        (7 * 16 + 37, "not neighbours"),
        (11 * 16 + 5, "nothing is subtracted"),
        (12 + 5, "multiply it"),
        (198, "offsets are counted from 0"),
        (1, "entry = position"),
        ("197", "expected a number"),
    ],
    "5.2": [
        (54, "last block is full"),
        (5 + 0 + 1 + 4, "tokens in the last blocks"),
        (208, "most of them hold tokens"),
        (4 * 112 - 170, "those of the longest"),
        (176 - 170, "round up each one"),
        (60, "worst case"),
        (30, "average over all lengths"),
        (0, "round each length up"),
    ],
    "5.3": [
        (lambda c, n, held, b: (c + n) // b - held, "negative"),
        (lambda c, n, held, b: max(0, (c + n) // b - held), "one short"),
        (lambda c, n, held, b: max(0, (c + n) // b + 1 - held), "exactly full"),
        (lambda c, n, held, b: ceil((c + n) / b), "held already"),
        (lambda c, n, held, b: ceil((c + n) / b) - ceil(c / b), "does not use the blocks"),
        (lambda c, n, held, b: ceil((c + n) / b) - held, "negative"),
        (lambda c, n, held, b: max(0, (c + n) / b - held), "not whole"),
        (lambda c, n, held, b: n, "does not use"),
        (lambda c, n, held, b: None, "returns None"),
        (lambda c, n, held, b: "two", "no number"),
        (lambda c, n: 0, "TypeError"),
        (3, "define the function"),
    ],
    "5.4": [
        (RIGHT_SHARING | {"same tokens, another adapter"}, "projections"),
        (RIGHT_SHARING | {"same tokens, another salt"}, "tenants"),
        (RIGHT_SHARING | {"block 1 equal, block 0 different"}, "every token before"),
        (RIGHT_SHARING | {"same 8 tokens after 4 others"}, "positions differ"),
        (RIGHT_SHARING | {"same 8 image tokens, another image"}, "placeholder"),
        (RIGHT_SHARING - {"same tokens, other outputs"}, "1 more"),
        ({"same tokens, other outputs"}, "2 more"),
        (set(), "3 more"),
        ({"same"}, "none of the situations"),
        (7, "give a set"),
    ],
    "5.5": [
        ([1, 2, 3, 4, 5], "head first"),
        ([5, 4, 3, 2, 1], "A goes first"),
        ([4, 5, 1, 2, 3], "A goes first"),
        ([3, 5, 2, 4, 1], "finish with the chain"),
        ([2, 3, 1, 5, 4], "the tail goes first"),
        ([3, 2, 1, 4, 5], "the same holds inside B"),
        ([3, 2, 1], "handed out once"),
        (5, "list of five"),
    ],
}
