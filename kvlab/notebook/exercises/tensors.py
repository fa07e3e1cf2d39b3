"""The exercises that need torch: the write of chapter 2, the inner step and the merge of 6."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvlab.kernels.reference import (
    decode_with,
    fold_tile,
    merge,
    merge_with,
    paged_decode_reference,
)
from kvlab.notebook.exercises import function

# 2.3: stored is [h_kv, max_len, d_h], new [t, h_kv, d_h]; a case is (length, t).


def _write(stored: Tensor, length: int, new: Tensor) -> None:
    stored[:, length : length + new.shape[0]] = new.transpose(0, 1)


def _written(write: Callable, length: int, num_new: int) -> tuple[Tensor, str]:
    """What `write` leaves in stored, and what comes back."""
    generator = torch.Generator().manual_seed(length)
    stored = torch.randn(2, 8, 3, generator=generator)
    returned = write(stored, length, torch.randn(num_new, 2, 3, generator=generator))
    return stored, "a new tensor" if isinstance(returned, Tensor) else "nothing"


def _spoils_others(got: tuple[Tensor, str], length: int, num_new: int) -> bool:
    new = slice(length, length + num_new)
    return torch.equal(got[0][:, new], _written(_write, length, num_new)[0][:, new])


_generator = torch.Generator().manual_seed(6)
_CASE = (
    2 * torch.randn(2, 6, 16, generator=_generator),
    torch.randn(17, 8, 2, 16, generator=_generator),
    torch.randn(17, 8, 2, 16, generator=_generator),
    torch.randperm(17, generator=_generator)[:16].view(2, 8),
    torch.tensor([61, 33]),
)
_SCALE, _EMPTY = 0.4, float("-inf")


def _fold(mistake: str) -> Callable:
    """fold_tile with one of the usual mistakes, for 6.2."""

    def fold(top, total, acc, q, k, v, visible, scale):
        if mistake == "unmasked":
            visible = torch.ones_like(visible)
        if mistake == "unscaled":
            scale = 1.0
        if mistake == "last tile":
            top, total, acc = torch.full_like(top, _EMPTY), 0 * total, 0 * acc
        new_top, new_total, new_acc = fold_tile(top, total, acc, q, k, v, visible, scale)
        unshrunk = 1 - torch.exp(top - new_top)
        if mistake == "total kept":
            new_total = new_total + total * unshrunk
        if mistake == "acc kept":
            new_acc = new_acc + acc * unshrunk[:, None]
        if mistake == "divided":
            new_acc = new_acc / new_total[:, None]
        return new_top, new_total, new_acc

    return fold


# 6.3: the rows are full parts, one full among empty ones, empty parts, and large log-sum-exps.

_LSES = torch.tensor([[3.0, -1.0, 2.5], [_EMPTY, 1.0, _EMPTY], [_EMPTY] * 3, [120.0, 118.0, 121.0]])
_PARTS = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(7))
_PARTS[_LSES.isneginf()] = 0


def _two(out_a, lse_a, out_b, lse_b):
    out, lse = merge(torch.stack((out_a, out_b)), torch.stack((lse_a[:, 0], lse_b[:, 0])))
    return out, lse[:, None]


def _mean(out_a, lse_a, out_b, lse_b):
    out = torch.where(lse_a.isneginf(), out_b, (out_a + out_b) / 2)
    return out, torch.logaddexp(lse_a, lse_b)


def _swapped(out_a, lse_a, out_b, lse_b):
    return _two(out_b, lse_a, out_a, lse_b)[0], torch.logaddexp(lse_a, lse_b)


def _merged(row: int) -> tuple[Tensor, Tensor]:
    return merge(_PARTS[row : row + 1].transpose(0, 1), _LSES[row : row + 1].T)


def _close(got: Tensor, right: Tensor) -> bool:
    return torch.allclose(got, right, atol=1e-3, rtol=1e-4)


def _no_number(got: tuple[Tensor, Tensor], row: int) -> bool:
    """Where parts are empty: an output that is not finite, or another lse at minus infinity."""
    empty = _merged(row)[1].isneginf()
    return row in (1, 2) and not (got[0].isfinite().all() and torch.equal(got[1].isneginf(), empty))


EXERCISES = [
    function("2.3", "The write",
        "Write write(stored, length, new): put the K (or V) of t new tokens, [t, h_kv, d_h], "
        "behind the `length` tokens that stored, [h_kv, max_len, d_h], already holds. In place.",
        _write,
        (lambda *_: None, "stored is unchanged and {got[1]} came back; write into "
         "stored, in place"),
        (lambda stored, length, new: _write(stored, 0, new), "new tokens overwrite the first ones; "
         "they go after `length`"),
        (lambda stored, length, new: _write(stored, length, new[-1:]), "only one of the new tokens "
         "is stored; a prompt brings many at once"),
        (lambda stored, length, new: _write(stored, length, new.reshape(2, -1, 3).transpose(0, 1)),
         "the numbers are there, in the wrong heads: reshape keeps the order in memory, transpose "
         "swaps the axes. Shapes agree either way, and nothing else tells"),
        cases=[(0, 4), (4, 1), (5, 2)],
        otherwise="the {case[1]} rows from row {case[0]} on do not hold the new tokens",
        signs=[
            (_spoils_others, "rows of other tokens changed; write only the rows of the new ones"),
        ],
        run=_written,
        same=lambda got, right: torch.equal(got[0], right[0]),
        fails="writing {case[1]} tokens after {case[0]} fails: {error}. stored is [h_kv, max_len, "
        "d_h] and new [t, h_kv, d_h]: which axes must change places?",
        hint="A slice of the second axis of stored, and new with its first two axes swapped.",
        needs_torch=True,
    ),
    function("6.2", "The masked inner step",
        "Write fold(top, total, acc, q, k, v, visible, scale) with tl (or torch): fold one tile of "
        "keys into the running softmax. q [G, D], k [N, D], v [N, DV], visible [N]; masked rows of "
        "k and v are zeros. Return the new top, total and acc.",
        fold_tile,
        (_fold("unmasked"), "masked keys count: they were loaded as zeros, so their score is 0 and "
         "their weight exp(0 - largest). Give them minus infinity before anything is "
         "exponentiated"),
        (_fold("unscaled"), "the scores are not multiplied by scale"),
        (_fold("total kept"), "`total` is added to without shrinking what was there before"),
        (_fold("acc kept"), "`acc` is added to without shrinking what was there before"),
        (_fold("last tile"), "only the last tile is left: fold it into the sums instead"),
        (_fold("divided"), "acc is divided in the loop; it is a running sum, divided once at "
         "the end"),
        cases=[_CASE],
        otherwise="the output differs from float64. In order: scores, mask, new largest score, "
        "exp, shrink the old sums, add the new ones",
        signs=[
            (lambda got, *case: not got.isfinite().all(), "the output is not finite: subtract the "
             "new largest score before exp, and let the largest score of nothing be minus infinity "
             "only in the first turn"),
        ],
        run=partial(decode_with, scale=_SCALE, num_splits=1),
        same=partial(torch.allclose, atol=1e-4, rtol=1e-4),
        expected=lambda *case: paged_decode_reference(*case, scale=_SCALE)[0].float(),
        fails="your fold does not run: {error}",
        hint="A masked key must have weight 0. Which score does that? And exp of what shrinks acc?",
        needs_torch=True,
    ),
    function("6.3", "The merge",
        "Write merge_two(out_a, lse_a, out_b, lse_b) with tl (or torch): two partial outputs over "
        "different keys, [DV], and their log-sum-exps, [1]. Return the output and the lse over all "
        "of the keys. An empty part is out 0, lse minus infinity; so are two of them.",
        _two,
        (_mean, "that is the average; a part weighs exp(its lse)"),
        (_swapped, "the weights are swapped: out_a weighs exp(lse_a)"),
        otherwise="divide the weighted sum by the sum of the weights",
        cases=[(0,), (2,), (1,), (3,)],
        signs=[
            (lambda got, row: row == 0 and _close(got[1], _LSES[0].max()), "the lse returned is "
             "the larger of the two; the sums behind both add up"),
            (lambda got, row: row == 0 and _close(got[1], _LSES[0].sum()), "the lse is a "
             "logarithm: add exp(lse), then take the logarithm again"),
            (lambda got, row: row == 0 and not _close(got[1], _merged(0)[1]), "the lse of both is "
             "log(exp(lse_a) + exp(lse_b)), natural logarithm"),
            (_no_number, "two empty parts give something that is not a number: minus infinity less "
             "minus infinity. Nothing merged with nothing is 0, with lse minus infinity"),
            (lambda got, row: row == 3, "exp(120) overflows: subtract the larger lse before exp"),
            (lambda got, row: row in (1, 2), "right for two full parts, wrong when one is empty"),
        ],
        run=lambda merge_two, row: merge_with(merge_two, _PARTS[row:][:1], _LSES[row:][:1]),
        same=lambda got, right: _close(got[0], right[0]) and _close(got[1], right[1]),
        expected=_merged,
        fails="your merge_two does not run: {error}",
        hint="Each part was divided by exp(its lse). Multiply back, add, divide by what both make.",
        needs_torch=True,
    ),
]
