"""Ways to get exercise 6.2 wrong: what each computes, and the mistake it betrays."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvlab.kernels.walk import fold_tile


def _unmasked(top, total, acc, q, k, v, visible, scale):
    return fold_tile(top, total, acc, q, k, v, torch.ones_like(visible), scale)


def _unscaled(top, total, acc, q, k, v, visible, scale):
    return fold_tile(top, total, acc, q, k, v, visible, 1.0)


def _total_kept(top, total, acc, q, k, v, visible, scale):
    new_top, new_total, new_acc = fold_tile(top, total, acc, q, k, v, visible, scale)
    return new_top, new_total + total * (1 - torch.exp(top - new_top)), new_acc


def _acc_kept(top, total, acc, q, k, v, visible, scale):
    new_top, new_total, new_acc = fold_tile(top, total, acc, q, k, v, visible, scale)
    return new_top, new_total, new_acc + acc * (1 - torch.exp(top - new_top))[:, None]


def _last_tile(top, total, acc, q, k, v, visible, scale):
    nothing = torch.full_like(top, float("-inf"))
    return fold_tile(nothing, 0 * total, 0 * acc, q, k, v, visible, scale)


def _divided(top, total, acc, q, k, v, visible, scale):
    new_top, new_total, new_acc = fold_tile(top, total, acc, q, k, v, visible, scale)
    return new_top, new_total, new_acc / new_total[:, None]


FOLD_TRAPS: list[tuple[Callable, str]] = [
    (_unmasked, "masked keys count: they were loaded as zeros, so their score is 0 and their "
     "weight exp(0 - largest). Give them minus infinity before anything is exponentiated"),
    (_unscaled, "the scores are not multiplied by scale"),
    (_total_kept, "`total` is added to without shrinking what was there before"),
    (_acc_kept, "`acc` is added to without shrinking what was there before"),
    (_last_tile, "only the last tile is left: fold it into the sums, do not replace them"),
    (_divided, "acc is divided inside the loop; it is a running sum, divided once at the end"),
]  # fmt: skip
