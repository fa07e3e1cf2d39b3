"""Plausible wrong answers of chapter 2, each with a fragment of the hint it must get."""

import torch

_TOKEN = 30 * 2 * 3 * 64 * 4
_SUM = sum(100 + t for t in range(1, 51))


def _returns_cat(stored, length, new):
    return torch.cat((stored[:, :length], new.transpose(0, 1)), dim=1)


def _does_nothing(stored, length, new):
    stored[:, length : length + new.shape[0]]


def _from_the_start(stored, length, new):
    stored[:, : new.shape[0]] = new.transpose(0, 1)


def _one_token(stored, length, new):
    stored[:, length] = new[-1]


def _reshaped(stored, length, new):
    stored[:, length : length + new.shape[0]] = new.reshape(2, new.shape[0], 3)


def _untransposed(stored, length, new):
    stored[:, length : length + new.shape[0]] = new


def _clears(stored, length, new):
    stored.zero_()
    stored[:, length : length + new.shape[0]] = new.transpose(0, 1)


def _one_late(stored, length, new):
    stored[:, length + 1 : length + 1 + new.shape[0]] = new.transpose(0, 1)


ALL = {"causal decoder", "cross-attention", "fixed prefix"}

WRONG = {
    "2.1": [
        (_TOKEN // 2, "K and V are both kept"),
        (_TOKEN // 4, "four bytes"),
        (_TOKEN * 3, "query heads share"),
        (_TOKEN // 30, "one layer"),
        (_TOKEN // 64, "a vector"),
        (30 * 9 * 64 * 4, "query heads are not cached"),
        (1, "layers x 2"),
    ],
    "2.2": [
        (_SUM * _TOKEN, "written, not copied"),
        (50 * 100 * _TOKEN, "the last copy moves more"),
        (150 * _TOKEN, "size at the end"),
        (149 * _TOKEN, "last step alone"),
        (50 * 149 * _TOKEN, "like the last"),
        (0, "preallocated"),
        (5, "p + t - 1"),
    ],
    "2.3": [
        (_returns_cat, "in place"),
        (_does_nothing, "unchanged and nothing came back"),
        (_from_the_start, "overwrite the first"),
        (_one_token, "only one of the new tokens"),
        (_reshaped, "wrong heads"),
        (_untransposed, "change places"),
        (_clears, "other tokens changed"),
        (_one_late, "do not hold the new tokens"),
        (3, "define the function"),
    ],
    "2.4": [
        (ALL | {"growing bidirectional"}, "not final"),
        (ALL | {"query"}, "nobody would read"),
        (ALL | {"encoder output"}, "not the output"),
        (ALL - {"cross-attention"}, "which is final"),
        (ALL - {"fixed prefix"}, "both directions"),
        ({"keys"}, "is none of"),
        ("causal decoder", "expected a set"),
    ],
}
