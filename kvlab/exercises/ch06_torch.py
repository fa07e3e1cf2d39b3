"""Exercises of chapter 6 that take a function: the masked inner step and the merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvlab.exercises import Exercise, Wrong, register
from kvlab.exercises.ch06_folds import FOLD_TRAPS
from kvlab.kernels.lesson import decode_with, merge_with
from kvlab.kernels.reference import merge, paged_decode_reference
from kvlab.kernels.walk import fold_tile, paged_decode_walk


def _paged(seq_lens: list[int], num_blocks: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(6)
    query = 2 * torch.randn(len(seq_lens), 6, 16, generator=generator)
    keys, values = (torch.randn(num_blocks, 8, 2, 16, generator=generator) for _ in range(2))
    tables = torch.randperm(num_blocks, generator=generator)[: len(seq_lens) * 8]
    return query, keys, values, tables.view(len(seq_lens), 8), torch.tensor(seq_lens)


_CASE = _paged([61, 33], 17)
_SCALE = 0.4


def _run(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except Exception as error:  # a reader's function may raise anything
        line = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise Wrong(f"{what} does not run: {line[0]}") from None


def _check_fold(answer: Any) -> None:
    """6.2 asks for fold(top, total, acc, q, k, v, visible, scale), Triton or torch."""
    if not (callable(answer) or hasattr(answer, "fn")):
        raise Wrong("define fold(top, total, acc, q, k, v, visible, scale) and pass the function")
    out = _run(lambda: decode_with(answer, *_CASE, scale=_SCALE, num_splits=1), "your fold")
    want = paged_decode_reference(*_CASE, scale=_SCALE)[0].float()
    if torch.allclose(out, want, atol=1e-4, rtol=1e-4):
        return
    if not out.isfinite().all():
        raise Wrong(
            "the output is not finite: subtract the new largest score before exp, and let the "
            "largest score of nothing be minus infinity only in the first turn"
        )
    for trap, mistake in FOLD_TRAPS:
        wrong = paged_decode_walk(*_CASE, scale=_SCALE, num_splits=1, fold=trap)[0]
        if torch.allclose(out, wrong, atol=1e-3, rtol=1e-3):
            raise Wrong(mistake)
    raise Wrong(
        "the output differs from float64. In order: scores, mask, new largest score, exp, shrink "
        "the old sums, add the new ones"
    )


register(
    Exercise(
        id="6.2",
        title="The masked inner step",
        question=(
            "Write fold(top, total, acc, q, k, v, visible, scale) with tl (or torch): fold one "
            "tile of keys into the running softmax. q [G, D], k [N, D], v [N, DV], visible [N]; "
            "masked rows of k and v are zeros. Return the new top, total and acc."
        ),
        check=_check_fold,
        solution=fold_tile,
        hint="A masked key must have weight 0. Which score does that? And exp of what shrinks acc?",
    )
)

_LSES = torch.tensor([[3.0, -1.0, 2.5], [float("-inf"), 1.0, float("-inf")],
                      [float("-inf")] * 3, [120.0, 118.0, 121.0]])  # fmt: skip
_PARTS = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(7))
_PARTS[_LSES.isneginf()] = 0


def _check_merge(answer: Any) -> None:
    """6.3 asks for merge_two(out_a, lse_a, out_b, lse_b), Triton or torch."""
    if not (callable(answer) or hasattr(answer, "fn")):
        raise Wrong("define merge_two(out_a, lse_a, out_b, lse_b) and pass the function")
    out, lse = _run(lambda: merge_with(answer, _PARTS, _LSES), "your merge_two")
    want, want_lse = merge(_PARTS.transpose(0, 1), _LSES.T)
    if not torch.allclose(lse[0], want_lse[0], atol=1e-3):
        if torch.allclose(lse[0], _LSES[0].max(), atol=1e-3):
            raise Wrong("the lse returned is the larger of the two; the sums behind both add up")
        if torch.allclose(lse[0], _LSES[0].sum(), atol=1e-3):
            raise Wrong("the lse is a logarithm: add exp(lse), then take the logarithm again")
        raise Wrong("the lse of both is log(exp(lse_a) + exp(lse_b)), natural logarithm")
    if torch.allclose(out[0], ((_PARTS[0, 0] + _PARTS[0, 1]) / 2 + _PARTS[0, 2]) / 2, atol=1e-3):
        raise Wrong("that is the average; a part weighs exp(its lse)")
    if not torch.allclose(out[0], want[0], atol=1e-3):
        swapped = merge_with(_swapped, _PARTS, _LSES)[0]
        if torch.allclose(out[0], swapped[0], atol=1e-3):
            raise Wrong("the weights are swapped: out_a weighs exp(lse_a)")
        raise Wrong("divide the weighted sum by the sum of the weights")
    if not (out[2].isfinite().all() and lse[2].isneginf() and out[1].isfinite().all()):
        raise Wrong(
            "two empty parts give something that is not a number: minus infinity less minus "
            "infinity. Nothing merged with nothing is 0, with lse minus infinity"
        )
    if not torch.allclose(out[3], want[3], atol=1e-3):
        raise Wrong("exp(120) overflows: subtract the larger lse from both before exp")
    if not torch.allclose(out, want, atol=1e-3):
        raise Wrong("right for two full parts, wrong when one of them is empty")


def _two(out_a, lse_a, out_b, lse_b):
    out, lse = merge(torch.stack((out_a, out_b)), torch.stack((lse_a[:, 0], lse_b[:, 0])))
    return out, lse[:, None]


def _swapped(out_a, lse_a, out_b, lse_b):
    out, _ = _two(out_b, lse_a, out_a, lse_b)
    return out, _two(out_a, lse_a, out_b, lse_b)[1]


register(
    Exercise(
        id="6.3",
        title="The merge",
        question=(
            "Write merge_two(out_a, lse_a, out_b, lse_b) with tl (or torch): two partial outputs "
            "over different keys, [DV], and their log-sum-exps, [1]. Return the output and the lse "
            "over all of the keys. An empty part is out 0, lse minus infinity; so are two of them."
        ),
        check=_check_merge,
        solution=_two,
        hint="Each part was divided by exp(its lse). Multiply back, add, divide by what both make.",
    )
)
