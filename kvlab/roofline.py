"""How fast a step can be: whichever takes longer, the arithmetic or the bytes.

    Llama-3-8B, bf16, s = 2304, one sequence on an H100:
    17 GFLOP at 989 TFLOP/s take 0.02 ms, 16 GB at 3.35 TB/s take 4.9 ms: the bytes decide

Plain arithmetic, as in costs.py: numbers give numbers, symbols give formulas (the two functions
that take a maximum or a minimum need numbers). `num_parameters` is P, as everywhere.

Source of the model: Williams, Waterman and Patterson 2009, "Roofline".
"""

from __future__ import annotations

from kvlab import costs
from kvlab.specs import ModelSpec

# --- one forward, to the unit -----------------------------------------------------------------


def forward_flops(spec: ModelSpec, num_queries, num_keys, num_logit_rows):
    """Exact FLOPs of a forward of q tokens on k keys that computes r rows of logits.

    A prefill has q = k; a chunk 1 < q < k; a cached step q = 1; an uncached step q = k again,
    with as many rows of logits. Query-key pairs are those that the causal mask keeps.
    """
    layers = costs.streamed_params(spec) - costs.embedding_params(spec)
    return (
        costs.projection_flops(layers, num_queries)
        + costs.projection_flops(costs.embedding_params(spec), num_logit_rows)
        + costs.attention_flops(spec, costs.causal_pairs(num_queries, num_keys))
    )


def masked_forward_flops(spec: ModelSpec, num_queries, num_keys, num_logit_rows):
    """The same forward by a counter that charges attention for the masked pairs too: q k pairs."""
    masked = num_queries * num_keys - costs.causal_pairs(num_queries, num_keys)
    kept = forward_flops(spec, num_queries, num_keys, num_logit_rows)
    return kept + costs.attention_flops(spec, masked)


# --- a batch ----------------------------------------------------------------------------------


def batch_step_flops(spec: ModelSpec, num_parameters, batch, context):
    """One cached step of `batch` sequences, each with `context` keys."""
    return batch * costs.cached_step_flops(spec, num_parameters, context)


def batch_step_bytes(spec: ModelSpec, num_parameters, batch, context, bytes_per_element=2):
    """Bytes it reads: the weights once for all, every sequence's K and V."""
    kv_read = batch * context * costs.kv_bytes_per_token(spec, bytes_per_element)
    return costs.weight_bytes(num_parameters, bytes_per_element) + kv_read


def kv_weight_crossover_tokens(spec: ModelSpec, num_parameters):
    """Resident tokens, over the whole batch, at which a step reads as much KV as weights.

    The number of bytes an element has cancels out while both are kept in the same one.
    """
    return num_parameters / costs.kv_bytes_per_token(spec, 1)


def intensity_limit(spec: ModelSpec, num_parameters, context):
    """FLOPs per byte of a batch without end: weights cost nothing, every KV byte is read once."""
    flops = costs.cached_step_flops(spec, num_parameters, context)
    return flops / (context * costs.kv_bytes_per_token(spec, 2))


# --- roofs ------------------------------------------------------------------------------------


def ridge_intensity(peak_flops_per_second, bandwidth_bytes_per_second):
    """FLOPs per byte at which arithmetic and bytes take equally long."""
    return peak_flops_per_second / bandwidth_bytes_per_second


def attainable_flops_per_second(
    intensity: float, peak_flops_per_second: float, bandwidth_bytes_per_second: float
) -> float:
    """The roofline itself: bandwidth times intensity, until the peak cuts it off."""
    return min(peak_flops_per_second, intensity * bandwidth_bytes_per_second)


def roofline_seconds(
    num_flops: float,
    num_bytes: float,
    peak_flops_per_second: float,
    bandwidth_bytes_per_second: float,
) -> float:
    """The least time of a step: the longer of its two parts, the other hidden behind it."""
    return max(
        costs.compute_seconds(num_flops, peak_flops_per_second),
        costs.memory_seconds(num_bytes, bandwidth_bytes_per_second),
    )


# --- what later techniques buy ----------------------------------------------------------------


def tokens_per_verified_step(acceptance, num_drafts):
    """Tokens one verifying forward yields, each of g drafts being accepted with probability a.

    1 + a + a^2 + ... + a^g: drafts count up to the first rejection, and one more token is free.
    Source: Leviathan et al. 2023, arXiv 2211.17192.
    """
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def step_seconds_with_overhead(num_calls, seconds_per_call, floor_seconds):
    """A step whose operator calls each cost some fixed time that nothing hides."""
    return floor_seconds + num_calls * seconds_per_call


#: The functions above that are formulas in one symbol each, for the formula sheet.
LISTED = (
    forward_flops,
    masked_forward_flops,
    batch_step_flops,
    batch_step_bytes,
    kv_weight_crossover_tokens,
    intensity_limit,
    ridge_intensity,
    tokens_per_verified_step,
    step_seconds_with_overhead,
)
