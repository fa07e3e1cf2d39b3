"""The exercises that need torch: the write of chapter 2, the inner step and the merge of 6."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.paged_decode import jit, kernel_device, paged_decode, tl
from kvlab.kernels.reference import (
    fold_tile,
    merge,
    paged_decode_reference,
    paged_decode_torch,
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
    torch.randperm(16, generator=_generator).view(2, 8) + 1,
    torch.tensor([61, 33]),
)
_SCALE, _EMPTY = 0.4, float("-inf")


def _is_triton(answer: Callable) -> bool:
    """Whether an answer was decorated with @jit where there is Triton: it goes into a kernel."""
    return kernels.triton is not None and isinstance(answer, type(kernels.fold_tile))


def _decode_with(fold: Callable, *case: Tensor) -> Tensor:
    """Paged decode with this inner step."""
    decode = paged_decode if _is_triton(fold) else paged_decode_torch
    device = kernel_device() if _is_triton(fold) else "cpu"
    on_device = [tensor.to(device) for tensor in case]
    return decode(*on_device, fold=fold, scale=_SCALE, num_splits=1)[0].cpu()


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


@jit
def _merge_in_a_loop(out_ptr, lse_ptr, parts_ptr, lses_ptr, MERGE: tl.constexpr):
    """One program: three parts of eight values, [3, 8], into what is merged so far."""
    dv, one = tl.arange(0, 8), tl.arange(0, 1)
    out, lse = tl.zeros([8], tl.float32), tl.full([1], -float("inf"), tl.float32)
    for i in range(0, 3):
        part, part_lse = tl.load(parts_ptr + 8 * i + dv), tl.load(lses_ptr + i + one)
        out, lse = MERGE(out, lse, part, part_lse)
    tl.store(out_ptr + dv, out)
    tl.store(lse_ptr + one, lse)


def _merge_with(merge_two: Callable, row: int) -> tuple[Tensor, Tensor]:
    """Merge the parts of a row one by one, left to right -> out [1, 8], lse [1]."""
    out, lse = torch.zeros(1, 8), torch.full((1, 1), _EMPTY)
    if not _is_triton(merge_two):
        for i in range(3):
            out, lse = merge_two(out, lse, _PARTS[row : row + 1, i], _LSES[row, i].view(1, 1))
        return out, lse[:, 0]
    out, lse, parts, lses = (t.to(kernel_device()) for t in (out, lse, _PARTS[row], _LSES[row]))
    _merge_in_a_loop[(1,)](out, lse, parts, lses, MERGE=merge_two)
    return out.cpu(), lse[:, 0].cpu()


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
        run=_decode_with,
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
        run=_merge_with,
        same=lambda got, right: _close(got[0], right[0]) and _close(got[1], right[1]),
        expected=_merged,
        fails="your merge_two does not run: {error}",
        hint="Each part was divided by exp(its lse). Multiply back, add, divide by what both make.",
        needs_torch=True,
    ),
]
