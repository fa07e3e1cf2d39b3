"""The exercises that need torch: the write of chapter 2, the inner step and the merge of 6."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvlab.kernels.lesson import decode_with, merge_with
from kvlab.kernels.reference import merge, paged_decode_reference
from kvlab.kernels.walk import fold_tile
from kvlab.notebook.exercises import Exercise, function, in_turn

# 2.3: stored is [h_kv, max_len, d_h], new [t, h_kv, d_h]; a case is (length, t).


def _write(stored: Tensor, length: int, new: Tensor) -> None:
    stored[:, length : length + new.shape[0]] = new.transpose(0, 1)


def _write_last(stored: Tensor, length: int, new: Tensor) -> None:
    stored[:, length] = new[-1]


def _write_reshaped(stored: Tensor, length: int, new: Tensor) -> None:
    stored[:, length : length + new.shape[0]] = new.reshape(2, new.shape[0], 3)


def _written(write: Callable, length: int, num_new: int) -> tuple[Tensor, str]:
    """What `write` leaves in stored, and what comes back."""
    generator = torch.Generator().manual_seed(length)
    stored = torch.randn(2, 8, 3, generator=generator)
    returned = write(stored, length, torch.randn(num_new, 2, 3, generator=generator))
    return stored, "a new tensor" if isinstance(returned, Tensor) else "nothing"


def _spoils_others(got: tuple[Tensor, str], length: int, num_new: int) -> bool:
    new = slice(length, length + num_new)
    return torch.equal(got[0][:, new], _written(_write, length, num_new)[0][:, new])


# 6.2: ways to get the inner step wrong.

_generator = torch.Generator().manual_seed(6)
_CASE = (
    2 * torch.randn(2, 6, 16, generator=_generator),
    torch.randn(17, 8, 2, 16, generator=_generator),
    torch.randn(17, 8, 2, 16, generator=_generator),
    torch.randperm(17, generator=_generator)[:16].view(2, 8),
    torch.tensor([61, 33]),
)
_SCALE = 0.4


def _unmasked(top, total, acc, q, k, v, visible, scale):
    return fold_tile(top, total, acc, q, k, v, torch.ones_like(visible), scale)


def _unscaled(top, total, acc, q, k, v, visible, scale):
    return fold_tile(top, total, acc, q, k, v, visible, 1.0)


def _total_kept(top, total, acc, *tile):
    new_top, new_total, new_acc = fold_tile(top, total, acc, *tile)
    return new_top, new_total + total * (1 - torch.exp(top - new_top)), new_acc


def _acc_kept(top, total, acc, *tile):
    new_top, new_total, new_acc = fold_tile(top, total, acc, *tile)
    return new_top, new_total, new_acc + acc * (1 - torch.exp(top - new_top))[:, None]


def _last_tile(top, total, acc, *tile):
    return fold_tile(torch.full_like(top, float("-inf")), 0 * total, 0 * acc, *tile)


def _divided(top, total, acc, *tile):
    new_top, new_total, new_acc = fold_tile(top, total, acc, *tile)
    return new_top, new_total, new_acc / new_total[:, None]


# 6.3: the rows are full parts, one full among empty ones, empty parts, and large log-sum-exps.

_EMPTY = float("-inf")
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


def _larger(out_a, lse_a, out_b, lse_b):
    return out_a, torch.maximum(lse_a, lse_b)


def _added(out_a, lse_a, out_b, lse_b):
    return out_a, torch.where(lse_a.isneginf(), lse_b, lse_a + lse_b)


def _merged(row: int) -> tuple[Tensor, Tensor]:
    return merge(_PARTS[row : row + 1].transpose(0, 1), _LSES[row : row + 1].T)


def _same_kind(got: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    """A finite output, and minus infinity where it should be."""
    return bool(got[0].isfinite().all()) and torch.equal(got[1].isneginf(), right[1].isneginf())


def _near(got: tuple[Tensor, ...], right: tuple[Tensor, ...], part: int, atol: float) -> bool:
    return torch.allclose(got[part], right[part], atol=atol, rtol=1e-4)


_same_out, _same_lse = partial(_near, part=0, atol=1e-3), partial(_near, part=1, atol=1e-3)
_merging = partial(
    function,
    "merge_two(out_a, lse_a, out_b, lse_b)",
    run=lambda merge_two, row: merge_with(merge_two, _PARTS[row : row + 1], _LSES[row : row + 1]),
    expected=_merged,
    fails="your merge_two does not run: {error}",
)

EXERCISES = [
    Exercise(
        id="2.3",
        title="The write",
        needs_torch=True,
        question="Write write(stored, length, new): put the K (or V) of t new tokens, [t, h_kv, "
        "d_h], behind the `length` tokens that stored, [h_kv, max_len, d_h], already holds. In "
        "place.",
        solution=_write,
        hint="A slice of the second axis of stored, and new with its first two axes swapped.",
        check=function(
            "write(stored, length, new)",
            [(0, 4), (4, 1), (5, 2)],
            [
                (lambda stored, length, new: None, "stored is unchanged and {got[1]} came back; "
                 "write into stored, in place"),
                (lambda stored, length, new: _write(stored, 0, new), "new tokens overwrite the "
                 "first ones; they go after `length`"),
                (_write_last, "only one of the new tokens is stored; a prompt brings many at once"),
                (_write_reshaped, "the numbers are there, in the wrong heads: reshape keeps the "
                 "order in memory, transpose swaps the axes. Shapes agree either way, and nothing "
                 "else tells"),
            ],
            "the {case[1]} rows from {case[0]} on do not hold the new tokens",
            signs=[
                (_spoils_others, "rows of other tokens changed; write only the rows of the new "
                 "ones"),
            ],
            run=_written,
            same=lambda got, right: torch.equal(got[0], right[0]),
            fails="writing {case[1]} tokens after {case[0]} fails: {error}. stored is [h_kv, "
            "max_len, d_h] and new [t, h_kv, d_h]: which axes must change places?",
        ),
    ),
    Exercise(
        id="6.2",
        title="The masked inner step",
        needs_torch=True,
        question="Write fold(top, total, acc, q, k, v, visible, scale) with tl (or torch): fold "
        "one tile of keys into the running softmax. q [G, D], k [N, D], v [N, DV], visible [N]; "
        "masked rows of k and v are zeros. Return the new top, total and acc.",
        solution=fold_tile,
        hint="A masked key must have weight 0. Which score does that? And exp of what shrinks acc?",
        check=function(
            "fold(top, total, acc, q, k, v, visible, scale)",
            [()],
            [
                (_unmasked, "masked keys count: they were loaded as zeros, so their score is 0 and "
                 "their weight exp(0 - largest). Give them minus infinity before anything is "
                 "exponentiated"),
                (_unscaled, "the scores are not multiplied by scale"),
                (_total_kept, "`total` is added to without shrinking what was there before"),
                (_acc_kept, "`acc` is added to without shrinking what was there before"),
                (_last_tile, "only the last tile is left: fold it into the sums, do not replace "
                 "them"),
                (_divided, "acc is divided inside the loop; it is a running sum, divided once at "
                 "the end"),
            ],
            "the output differs from float64. In order: scores, mask, new largest score, exp, "
            "shrink the old sums, add the new ones",
            signs=[
                (lambda got: not got[0].isfinite().all(), "the output is not finite: subtract the "
                 "new largest score before exp, and let the largest score of nothing be minus "
                 "infinity only in the first turn"),
            ],
            run=lambda fold: (decode_with(fold, *_CASE, scale=_SCALE, num_splits=1),),
            same=partial(_near, part=0, atol=1e-4),
            expected=lambda: (paged_decode_reference(*_CASE, scale=_SCALE)[0].float(),),
            fails="your fold does not run: {error}",
        ),
    ),
    Exercise(
        id="6.3",
        title="The merge",
        needs_torch=True,
        question="Write merge_two(out_a, lse_a, out_b, lse_b) with tl (or torch): two partial "
        "outputs over different keys, [DV], and their log-sum-exps, [1]. Return the output and the "
        "lse over all of the keys. An empty part is out 0, lse minus infinity; so are two of them.",
        solution=_two,
        hint="Each part was divided by exp(its lse). Multiply back, add, divide by what both make.",
        check=in_turn(
            _merging(
                [(0,)],
                [
                    (_larger, "the lse returned is the larger of the two; the sums behind both add "
                     "up"),
                    (_added, "the lse is a logarithm: add exp(lse), then take the logarithm again"),
                ],
                "the lse of both is log(exp(lse_a) + exp(lse_b)), natural logarithm",
                same=_same_lse,
            ),
            _merging(
                [(0,)],
                [
                    (_mean, "that is the average; a part weighs exp(its lse)"),
                    (_swapped, "the weights are swapped: out_a weighs exp(lse_a)"),
                ],
                "divide the weighted sum by the sum of the weights",
                same=_same_out,
            ),
            _merging(
                [(2,), (1,)],
                otherwise="two empty parts give something that is not a number: minus infinity "
                "less minus infinity. Nothing merged with nothing is 0, with lse minus infinity",
                same=_same_kind,
            ),
            _merging(
                [(3,)],
                otherwise="exp(120) overflows: subtract the larger lse from both before exp",
                same=_same_out,
            ),
            _merging(
                [(1,), (2,)],
                otherwise="right for two full parts, wrong when one of them is empty",
                same=_same_out,
            ),
        ),
    ),
]
