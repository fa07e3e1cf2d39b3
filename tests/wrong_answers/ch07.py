"""Plausible wrong answers of chapter 7, and a piece of the hint that each must get."""

from __future__ import annotations


def _new(tokens, drafts, computed):
    return tokens + drafts - computed


def no_drafts(t, d, c, threshold, budget, chunked):
    new = max(t - c, 0)
    if not chunked:
        return new if new <= budget else 0
    return min(new, threshold or new, budget)


def negative(t, d, c, threshold, budget, chunked):
    new = _new(t, d, c)
    if not chunked:
        return new if new <= budget else 0
    return min(new, threshold or new, budget)


def threshold_always(t, d, c, threshold, budget, chunked):
    new = max(_new(t, d, c), 0)
    new = min(new, threshold or new)
    if not chunked:
        return new if new <= budget else 0
    return min(new, budget)


def chunk_always(t, d, c, threshold, budget, chunked):
    new = max(_new(t, d, c), 0)
    return min(new, (threshold or new) if chunked else new, budget)


def zero_threshold(t, d, c, threshold, budget, chunked):
    new = max(_new(t, d, c), 0)
    if not chunked:
        return new if new <= budget else 0
    return min(new, threshold, budget)


def no_budget(t, d, c, threshold, budget, chunked):
    new = max(_new(t, d, c), 0)
    if not chunked:
        return new if new <= budget else 0
    return min(new, threshold or new)


def no_threshold(t, d, c, threshold, budget, chunked):
    new = max(_new(t, d, c), 0)
    if not chunked:
        return new if new <= budget else 0
    return min(new, budget)


def one_too_few(t, d, c, threshold, budget, chunked):
    new = max(_new(t, d, c) - 1, 0)
    if not chunked:
        return new if new <= budget else 0
    return min(new, threshold or new, budget)


_RIGHT = {
    "req_indices": [0, 1, 1, 1, 1, 2, 2],
    "positions": [9, 0, 1, 2, 3, 6, 7],
    "query_start_loc": [0, 1, 5, 7],
    "seq_lens": [10, 4, 8],
}

WRONG = {
    "7.1": [
        (8, "pass the function itself"),
        (no_drafts, "drafts are known tokens"),
        (negative, "never fewer"),
        (threshold_always, "whole or not at all"),
        (chunk_always, "waits"),
        (zero_threshold, "switched off"),
        (no_budget, "more than the budget"),
        (no_threshold, "before the budget"),
        (one_too_few, "expected"),
    ],
    "7.2": [
        ([0, 1], "a dict with the keys"),
        ({k: v for k, v in _RIGHT.items() if k != "seq_lens"}, "seq_lens is missing"),
        ({**_RIGHT, "req_indices": [0, 1, 2]}, "one entry a token"),
        ({**_RIGHT, "positions": [0, 0, 1, 2, 3, 0, 1]}, "those are query_pos"),
        ({**_RIGHT, "positions": [10, 1, 2, 3, 4, 7, 8]}, "one too far"),
        ({**_RIGHT, "query_start_loc": [1, 5, 7]}, "begins with 0"),
        ({**_RIGHT, "query_start_loc": [0, 10, 14, 22]}, "not context"),
        ({**_RIGHT, "seq_lens": [1, 4, 2]}, "those are query lengths"),
        ({**_RIGHT, "seq_lens": [9, 0, 6]}, "written first"),
        ({**_RIGHT, "seq_lens": [1, 2, 3]}, "under each other"),
    ],
    "7.3": [
        (12, "expected a pair"),
        ((14, 13), "taken back"),
        ((13, 13), "no K and V yet"),
        ((11, 13), "in this very step"),
        ((11, 12), "two new tokens"),
        ((14, 15), "not kept"),
        ((9, 13), "count which fed tokens"),
    ],
    "7.4": [
        (42, "expected a pair"),
        ((30, 30), "outputs are known tokens"),
        ((1, 0), "a decode step"),
        ((42, 42), "never been computed"),
        ((41, 41), "nothing can be sampled"),
        ((42, 0), "blocks went back"),
        ((42, 12), "one less"),
    ],
}
