"""Plausible wrong answers of chapter 6, each with a fragment of the hint it must get."""

import math

import torch

from kvlab.kernels.paged_decode import jit, tl

INF = float("inf")


@jit
def _unmasked(top, total, acc, q, k, v, visible, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, 1), acc


@jit
def _unscaled(top, total, acc, q, k, v, visible, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, 1), acc


@jit
def _total_kept(top, total, acc, q, k, v, visible, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return new_top, total + tl.sum(p, 1), acc


@jit
def _acc_kept(top, total, acc, q, k, v, visible, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    return new_top, total * shrink + tl.sum(p, 1), acc + tl.dot(p, v, input_precision="ieee")


@jit
def _divided(top, total, acc, q, k, v, visible, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return new_top, total, acc / total[:, None]


@jit
def _last_tile(top, total, acc, q, k, v, visible, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.max(scores, 1)
    p = tl.exp(scores - new_top[:, None])
    return new_top, tl.sum(p, 1), tl.dot(p, v, input_precision="ieee")


@jit
def _wrong_axis(top, total, acc, q, k, v, visible, scale):
    return top, total, acc + tl.dot(k, q)


def _in_torch_unscaled(top, total, acc, q, k, v, visible, scale):
    scores = torch.where(visible[None, :], q @ k.T, -INF)
    new_top = torch.maximum(top, scores.max(1).values)
    p, shrink = torch.exp(scores - new_top[:, None]), torch.exp(top - new_top)
    return new_top, total * shrink + p.sum(1), acc * shrink[:, None] + p @ v


def _mean(out_a, lse_a, out_b, lse_b):
    first = lse_a.isneginf()
    return torch.where(first, out_b, (out_a + out_b) / 2), torch.logaddexp(lse_a, lse_b)


@jit
def _unguarded(out_a, lse_a, out_b, lse_b):
    top = tl.maximum(lse_a, lse_b)
    a, b = tl.exp(lse_a - top), tl.exp(lse_b - top)
    return (out_a * a + out_b * b) / (a + b), top + tl.log(a + b)


@jit
def _overflowing(out_a, lse_a, out_b, lse_b):
    a, b = tl.exp(lse_a), tl.exp(lse_b)
    total = tl.where(a + b == 0.0, 1.0, a + b)
    lse = tl.where(a + b == 0.0, -float("inf"), tl.log(total))
    return (out_a * a + out_b * b) / total, lse


@jit
def _larger(out_a, lse_a, out_b, lse_b):
    return out_a, tl.maximum(lse_a, lse_b)


def _added(out_a, lse_a, out_b, lse_b):
    return out_a, torch.where(lse_a.isneginf(), lse_b, lse_a + lse_b)


@jit
def _undivided(out_a, lse_a, out_b, lse_b):
    top = tl.maximum(lse_a, lse_b)
    a, b = tl.exp(lse_a - top), tl.exp(lse_b - top)
    return out_a * a + out_b * b, top + tl.log(a + b)


def _swapped(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = torch.exp(lse_b - lse), torch.exp(lse_a - lse)
    return out_a * a + out_b * b, lse


def _base_two(out_a, lse_a, out_b, lse_b):
    return out_a, torch.log2(torch.exp2(lse_a) + torch.exp2(lse_b))


E2 = math.exp(-2)
FLOOR = 16 * 8192 * 8 * 2 * 128 * 2 / 300e9 * 1e3

WRONG = {
    "6.1": [
        (3 + 1 + E2, "under the old maximum"),
        (3 / E2 + 1 + E2, "shrinks when the maximum"),
        (3 + 1 / E2 + 1, "how exp overflows"),
        (1 + E2, "the new tile alone"),
        (3 * E2 + 2, "not the largest"),
        (3 * E2 + math.exp(4) + math.exp(2), "count from the new maximum"),
        (0.0, "old sum x exp"),
    ],
    "6.2": [
        (_unmasked, "masked keys count"),
        (_unscaled, "not multiplied by scale"),
        (_in_torch_unscaled, "not multiplied by scale"),
        (_total_kept, "`total` is added to without shrinking"),
        (_acc_kept, "`acc` is added to without shrinking"),
        (_divided, "divided once at the end"),
        (_last_tile, "only the last tile"),
        (_wrong_axis, "does not run"),
        (3, "pass the function"),
    ],
    "6.3": [
        (_mean, "that is the average"),
        (_unguarded, "not a number"),
        (_overflowing, "exp(120) overflows"),
        (_larger, "the larger of the two"),
        (_added, "take the logarithm again"),
        (_undivided, "sum of the weights"),
        (_swapped, "weights are swapped"),
        (_base_two, "natural logarithm"),
        (3, "pass the function"),
    ],
    "6.4": [
        (32 / 216, "all query heads of a KV head"),
        (8 / 108, "slots"),
        (32 / 108, "count KV heads, and slots"),
        (1 / 216, "one for each KV head"),
        (8, "that is the number of programs"),
        (800 / 216, "not per cent"),
        (1.0, "sequences x KV heads"),
    ],
    "6.5": [
        (FLOOR / 2, "both K and V"),
        (FLOOR * 4, "once for all query heads"),
        (FLOOR * 32, "the question is about one layer"),
        (FLOOR / 16, "of its own"),
        (FLOOR / 1e3, "in seconds"),
        (FLOOR * 2, "two bytes"),
        (FLOOR * 1e9 / 2**30, "powers of ten"),
        (1.0, "divide by the bandwidth"),
    ],
}
