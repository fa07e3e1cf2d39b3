"""Exercises of chapter 1: what a loop without a cache does again."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.exercises import function, number

_SMOL = preset("smollm2-135m")
_LAYERS = _SMOL.num_layers
_P, _N = 100, 50  # prompt and decode forwards of 1.1 and 1.2
_LAST = _P + _N
_REPEATED = costs.kv_rows_recomputed(_SMOL, _P, _N)
_CONTEXTS = costs.sum_of_contexts(_P, _N)
_OUTPUTS, _CONTEXT = 512, 2048

# 1.4 is asked of SmolLM2, whose h and L differ: a forgotten factor can be told from another.
_PARAMETERS, _S = costs.streamed_params(_SMOL), 2304
_SHAPE = (_SMOL.num_heads, _SMOL.head_dim, _LAYERS)


def _step(projections: float, pairs: float) -> Callable[..., float]:
    """The cost of 1.4 with a factor before each of its two terms."""
    return lambda P, h, d_h, L, s: (  # noqa: N803
        projections * costs.projection_flops(P, s)
        + pairs * costs.attention_flops_uncached_step(_SMOL, s)
    )


EXERCISES = [
    number("1.1", "Rows of logits thrown away",
        f"A prompt of {_P} tokens, then {_N} naive decode forwards. How many rows of logits does "
        "the last forward compute and throw away?",
        costs.logit_rows_discarded(_LAST),
        (_LAST, "you counted every row; one row of the forward is used, to sample from"),
        (_LAST - 2, "one row too few: the last forward processes p + n tokens"),
        (_N - 1, "the prompt's tokens are fed again too, and each has its row"),
        (_P - 1, "the generated tokens are fed again too, and each has its row"),
        (_CONTEXTS - _N, "that is the sum over all forwards; the last one alone is asked"),
        otherwise="count the tokens that the last forward is fed: s = p + n; one row is used",
        hint="How many tokens does the last forward process? How many rows does it sample from?",
    ),
    number("1.2", "K/V rows computed again",
        f"The same run on SmolLM2-135M ({_LAYERS} layers). One K/V row is the K and the V "
        f"of one token in one layer. How many rows do the {_N} decode forwards compute that had "
        "been computed before?",
        _REPEATED,
        (_CONTEXTS * _LAYERS, "each forward also computes one new token; only what was "
         "computed before counts"),
        (_CONTEXTS - _N, "that is one layer: every layer has K and V of its own"),
        (_REPEATED + _P * _LAYERS, "prefill computes the prompt for the first time; it "
         "repeats nothing"),
        (2 * _REPEATED, "K and V together are one row here; you counted them as two"),
        (_LAYERS * _N * (_LAST - 1), "the context grows by one a step; you charged every "
         "step like the last"),
        (_LAYERS * _N * _P, "the tokens generated so far are fed again too, not only the prompt"),
        otherwise="step t is fed p + t tokens, and one of them is new; sum p + t - 1 over the "
        "steps and multiply by the layers",
        hint="Step t is fed p + t tokens. How many of them were fed before? Sum, then the layers.",
    ),
    number("1.3", "Forwards for an exact number of outputs",
        f"You want exactly {_OUTPUTS} output tokens. Prefill is one forward and samples the first "
        "of them. How many decode forwards follow?",
        _OUTPUTS - 1,
        (_OUTPUTS, "prefill has sampled the first output already"),
        (_OUTPUTS + 1, "you added a forward; the last output is sampled and never fed back"),
        (_OUTPUTS - 2, "one too few: n forwards after prefill give n + 1 outputs"),
        (_CONTEXT + _OUTPUTS - 1, "that is a context length; the prompt costs one forward, "
         "prefill"),
        (_CONTEXT + _OUTPUTS, "that is a context length; the prompt costs one forward, prefill"),
        otherwise="n decode forwards after prefill give n + 1 outputs in all",
        hint="Each forward samples one token, prefill included.",
    ),
    function("1.4", "The cost of one uncached step",
        "Write uncached_step(P, h, d_h, L, s): the FLOPs of one forward over all s tokens, with s "
        "* s / 2 query-key pairs a head and layer.",
        lambda P, h, d_h, L, s: 2 * P * s + 4 * h * d_h * L * s * s / 2,
        (_step(1, 2), "a causal mask skips half of the s x s pairs"),
        (_step(1 / 2, 1), "a multiply and an add are two FLOPs: projections cost 2P"),
        (_step(1 / _S, 1), "every one of the s tokens passes through the projections"),
        (_step(1, 1 / 2), "a pair costs 4 d_h FLOPs: a dot product and a weighted sum"),
        (_step(1, 1 / _LAYERS), "attention runs in every layer"),
        (_step(1, 1 / _SMOL.num_heads), "attention runs in every query head"),
        (_step(1, 0), "attention between the s tokens is missing"),
        cases=[(_PARAMETERS, *_SHAPE, s) for s in (_S, 64, 1)],
        otherwise="at s = {case[4]} you give {got:.4g} FLOPs, the step costs {right:.4g}",
        same=math.isclose,
        expected=lambda P, h, d_h, L, s: costs.uncached_step_flops(_SMOL, P, s),
        hint="Two terms: 2P a token for the matrices, and 4 d_h a pair, head and layer.",
    ),
]
