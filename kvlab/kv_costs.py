"""The KV cache as a deployment sees it: layouts, ranks, pages, a pool's capacity.

`costs` says what one more token adds and what a sequence holds. Here a model is first turned into
the one that a rank, a layout or an engine really stores, and then the same formulas apply:

    per_rank(spec, 8)          what one of 8 tensor-parallel ranks holds
    expanded(spec)             MLA with K and V written out for every head
    with_mtp(spec)             the multi-token prediction layers counted in
    padded_to_full(spec)       every window charged as if it were as long as the context

Numbers in, exact integers out; symbols in, formulas out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from kvlab import costs
from kvlab.errors import KvlabError
from kvlab.specs import LayerSpec, ModelSpec


class KvCostError(KvlabError):
    """A question about the cache that has no answer: what was given, and what would have one."""


# --- the model that is really stored ---------------------------------------------------------


def _each(spec: ModelSpec, change) -> ModelSpec:
    return replace(
        spec,
        layers=tuple(change(layer) for layer in spec.layers),
        mtp_layers=tuple(change(layer) for layer in spec.mtp_layers),
    )


def expanded(spec: ModelSpec) -> ModelSpec:
    """The model with each latent (MLA) layer's K and V written out for every query head."""
    return _each(spec, lambda layer: layer.expanded or layer)


def with_mtp(spec: ModelSpec) -> ModelSpec:
    """The model with its multi-token prediction layers among the others."""
    return replace(spec, layers=spec.layers + spec.mtp_layers, mtp_layers=())


def padded_to_full(spec: ModelSpec) -> ModelSpec:
    """What an engine stores that gives every layer pages for the whole context.

    It answers another question than `costs.kv_bytes`: not what the windows need, but what a pool
    without a group of its own for windowed layers hands out.
    """
    return _each(spec, lambda layer: replace(layer, window=None))


def rank_kv_heads(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads on one of T ranks: h_kv / T, or one copy of a head where T is larger."""
    large, small = max(num_kv_heads, tensor_parallel), min(num_kv_heads, tensor_parallel)
    if small < 1 or large % small:
        raise KvCostError(
            f"tensor parallel: given {tensor_parallel} ranks for {num_kv_heads} KV heads; expected "
            f"one to divide the other, so that heads are split evenly or copied whole"
        )
    return max(1, num_kv_heads // tensor_parallel)


def per_rank(spec: ModelSpec, tensor_parallel: int) -> ModelSpec:
    """The model as one tensor-parallel rank stores it.

    KV heads are split, or copied where there are more ranks than heads. A latent (MLA) row belongs
    to every head at once, so each rank keeps all of it. A recurrent state is split by its heads.
    """
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int):
        raise KvCostError(f"tensor parallel: given {tensor_parallel!r}; expected a whole number")
    if tensor_parallel == 1:
        return spec
    if tensor_parallel < 1 or (spec.num_heads and spec.num_heads % tensor_parallel):
        raise KvCostError(
            f"tensor parallel: given {tensor_parallel} ranks; expected a divisor of the "
            f"{spec.num_heads} query heads"
        )

    def change(layer: LayerSpec) -> LayerSpec:
        state = tuple(
            s if s.num_elements is None
            else replace(s, num_elements=-(-s.num_elements // tensor_parallel))
            for s in layer.state
        )  # fmt: skip
        if layer.kind == "latent":
            whole = layer.expanded
            split = None if whole is None else change(whole)
            return replace(layer, state=state, expanded=split)
        if not layer.num_kv_heads:
            return replace(layer, state=state)
        heads = rank_kv_heads(layer.num_kv_heads, tensor_parallel)
        return replace(layer, num_kv_heads=heads, state=state)

    return _each(spec, change)


# --- bytes of one sequence --------------------------------------------------------------------


def growing_bytes_per_token(spec: ModelSpec, bytes_per_element=2):
    """What one more token adds for good: layers without a window."""
    return sum(
        count * costs.layer_kv_bytes_per_token(layer, bytes_per_element)
        for count, layer in spec.layer_groups
        if layer.window is None
    )


def window_cap_bytes(spec: ModelSpec, bytes_per_element=2):
    """What windowed layers hold at most, once every window is full."""
    return sum(
        count * costs.layer_kv_bytes_per_token(layer, bytes_per_element) * layer.window
        for count, layer in spec.layer_groups
        if layer.window is not None
    )


def fixed_bytes_per_sequence(spec: ModelSpec, bytes_per_element=2):
    """Recurrent state, there from the first token on. None where its size is not known."""
    total = 0
    for count, layer in spec.layer_groups:
        for state in layer.state:
            if state.num_elements is None:
                return None
            total += count * state.num_elements * (state.bytes_per_element or bytes_per_element)
    return total


def bytes_per_token_from_query_heads(spec: ModelSpec, bytes_per_element=2):
    """The common mistake: every layer charged for h heads of K and V. None if h is not known."""
    if not spec.num_heads:
        return None
    return spec.num_layers * spec.num_heads * 2 * spec.head_dim * bytes_per_element


def paged_kv_bytes(spec: ModelSpec, num_tokens: int, block_size: int, bytes_per_element=2):
    """One sequence in whole pages of block_size tokens, each windowed layer in its own group."""

    def pages(tokens: int) -> int:
        return -(-tokens // block_size) * block_size

    return sum(
        count
        * costs.layer_kv_bytes_per_token(layer, bytes_per_element)
        * pages(num_tokens if layer.window is None else min(num_tokens, layer.window))
        for count, layer in spec.layer_groups
    )


# --- capacity ---------------------------------------------------------------------------------


def pool_bytes(memory_bytes, utilisation, weight_bytes, reserve_bytes=0):
    """What is left for the cache: memory * utilisation - weights - everything else.

    utilisation is the share of the card that an engine lets itself use (0.9 in vLLM's default);
    as text or a Fraction it is exact. A negative answer means that the weights do not fit.
    """
    share = (
        Fraction(str(utilisation)) if isinstance(utilisation, int | float | str) else utilisation
    )
    left = memory_bytes * share - weight_bytes - reserve_bytes
    return math.floor(left) if isinstance(left, Fraction) else left


def num_blocks(pool, bytes_per_token, block_size):
    """Whole blocks of block_size tokens in a pool, for a model that grows by one rate."""
    if bytes_per_token == 0:
        raise KvCostError(
            "blocks: given a model that keeps nothing per token; expected layers with K and V, "
            "without which a pool has no number of blocks; is it the right config?"
        )
    return pool // (bytes_per_token * block_size)


def pool_tokens(blocks, block_size):
    """Tokens that the blocks hold."""
    return blocks * block_size


def concurrency(tokens, max_model_len):
    """How many sequences of max_model_len a pool of so many tokens holds (uniform models only)."""
    return tokens / max_model_len


def sequence_bytes(spec: ModelSpec, num_tokens, bytes_per_element=2):
    """F + bytes(n): the fixed state and the cache of one sequence."""
    fixed = fixed_bytes_per_sequence(spec, bytes_per_element)
    if fixed is None:
        raise KvCostError(
            f"{spec.name}: its recurrent state has no known size; add its keys to the config"
        )
    return fixed + costs.kv_bytes(spec, num_tokens, bytes_per_element)


def sequences_that_fit(spec: ModelSpec, pool, num_tokens, bytes_per_element=2):
    """Whole sequences of num_tokens in a pool: pool / (F + bytes(n)), not proportional to 1 / n."""
    each = sequence_bytes(spec, num_tokens, bytes_per_element)
    if each == 0:
        raise KvCostError(f"{spec.name}: a sequence of {num_tokens} tokens keeps nothing")
    return pool // each


def longest_context(spec: ModelSpec, pool: int, sequences: int, bytes_per_element=2) -> int | None:
    """The most tokens that each of so many sequences may have. None: no limit (windows only)."""
    share = Fraction(pool, sequences)
    if sequence_bytes(spec, 0, bytes_per_element) > share:
        return 0
    rate = growing_bytes_per_token(spec, bytes_per_element)
    if (
        not rate
        and sequence_bytes(spec, 0, bytes_per_element) + window_cap_bytes(spec, bytes_per_element)
        <= share
    ):
        return None
    low, high = 0, 1
    while sequence_bytes(spec, high, bytes_per_element) <= share:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = sequence_bytes(spec, middle, bytes_per_element) <= share
        low, high = (middle, high) if fits else (low, middle)
    return low
