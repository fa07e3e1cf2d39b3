"""What a decode step computes, moves and keeps: every formula of the book, once.

Plain arithmetic on a ModelSpec, from simple to composed. Whole numbers give exact integers; SymPy
symbols give formulas, from which `formulas.py` prints the LaTeX of the pages and the JavaScript of
the widgets. A formula trusts its caller with numbers, which are checked where a reader types them;
what depends on the model, and would give a wrong number in silence, is a CostError.

Conventions (the running example is Llama-3-8B, p = 2048, n = 512):
- prefill samples the first output; n decode forwards follow; at step t = 1..n the processed
  context is s = p + t, which counts the token fed into this forward and not the one it samples;
- `num_parameters` is the P that the projections cost 2P FLOPs for. Coarse accounting rounds the
  resident parameters as a model card does; exact accounting takes `streamed_params`;
- units stand in the names: _flops, _bytes, _seconds. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from kvlab.errors import KvlabError
from kvlab.specs import LayerSpec, ModelSpec

#: Layer kinds that put K and V of their own into the cache, one row per token.
CACHING_KINDS = ("full", "sliding", "chunked", "latent")


class CostError(KvlabError):
    """A model that the asked cost is not worked out for, or that cannot be split so."""


def _divide(numerator, denominator: int):
    """An exact quotient: an int for ints (the caller knows it divides), symbolic otherwise."""
    return numerator // denominator if isinstance(numerator, int) else numerator / denominator


# --- parameters -------------------------------------------------------------------------------


def qkv_params_per_layer(spec: ModelSpec):
    """Weights of the query, key and value projections of one layer."""
    return spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


def output_params_per_layer(spec: ModelSpec):
    """Weights of the attention output projection of one layer."""
    return spec.num_heads * spec.head_dim * spec.hidden_size


def mlp_params_per_layer(spec: ModelSpec):
    """Weights of the gate, up and down projections of one layer."""
    assert spec.intermediate_size is not None, f"{spec.name}: the width of its MLP is not known"
    return 3 * spec.hidden_size * spec.intermediate_size


def embedding_params(spec: ModelSpec):
    """One vocabulary matrix: the input embedding, or the output head."""
    return spec.vocab_size * spec.hidden_size


def norm_params(spec: ModelSpec):
    """Two RMSNorm vectors a layer and the final one; where Q and K are normed, two more a layer."""
    of_heads = 2 * spec.num_layers * spec.head_dim if spec.qk_norm else 0
    return (2 * spec.num_layers + 1) * spec.hidden_size + of_heads


def bias_params(spec: ModelSpec):
    """The biases of the projections that have one."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    d, d_ff = spec.hidden_size, spec.intermediate_size or 0
    width = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": d, "down_proj": d}
    return spec.num_layers * sum(width.get(name, d_ff) for name in spec.biased)


def streamed_params(spec: ModelSpec):
    """Matrix weights that a decode step multiplies by: every layer and the output head.

    The input embedding is gathered, not streamed; a tied matrix is streamed once, as the head.
    """
    if not spec.is_dense_llama:
        raise CostError(
            f"{spec.name} ({spec.model_type}): the parameters can be counted from the config of a "
            f"dense Llama-shaped decoder only; give the number that a token uses (--params 8.03e9)"
        )
    per_layer = (
        qkv_params_per_layer(spec) + output_params_per_layer(spec) + mlp_params_per_layer(spec)
    )
    return spec.num_layers * per_layer + embedding_params(spec)


def resident_params(spec: ModelSpec):
    """Every weight that lies in memory: the input embedding, norms and biases included."""
    untied = 1 - spec.tie_word_embeddings
    small = norm_params(spec) + bias_params(spec)
    return streamed_params(spec) + small + untied * embedding_params(spec)


# --- contexts and their sums ------------------------------------------------------------------


def sum_of_contexts(prompt, decode):
    """s_1 + ... + s_n with s_t = p + t."""
    return decode * prompt + _divide(decode * (decode + 1), 2)


def sum_of_squared_contexts(prompt, decode):
    """s_1^2 + ... + s_n^2 with s_t = p + t."""
    return (
        decode * prompt**2
        + prompt * decode * (decode + 1)
        + _divide(decode * (decode + 1) * (2 * decode + 1), 6)
    )


def causal_pairs(num_queries, num_keys):
    """Query-key pairs a causal mask keeps when the queries are the last of the keys.

    Four queries on four keys: 10. One query on four keys: 4, for a decode step masks nothing.
    """
    return num_queries * num_keys - _divide(num_queries * (num_queries - 1), 2)


# --- FLOPs, and what an uncached step does in vain --------------------------------------------


def projection_flops(num_parameters, num_tokens):
    """Two FLOPs a weight and a token: every matrix product of a forward but attention's own."""
    return 2 * num_parameters * num_tokens


def attention_flops_per_pair(key_dim, value_dim):
    """One query-key pair of one head: a dot product of key_dim, a weighted sum of value_dim."""
    return 2 * (key_dim + value_dim)


def attention_flops(spec: ModelSpec, num_pairs):
    """All heads and layers over num_pairs query-key pairs (full attention on every layer)."""
    return _layer_attention_flops(spec, spec.num_layers * num_pairs)


def _layer_attention_flops(spec: ModelSpec, num_pairs):
    """All heads over the pairs of every layer together."""
    return spec.num_heads * attention_flops_per_pair(spec.head_dim, spec.head_dim) * num_pairs


def attention_flops_cached_step(spec: ModelSpec, context):
    """One query against `context` keys, or those of them that a layer's window leaves."""
    return cached_run_attention_flops(spec, context - 1, 1)


def attention_flops_uncached_step(spec: ModelSpec, context):
    """Every token against all before it, as s^2 / 2 pairs: a causal kernel skips half.

    The exact count, `causal_pairs(s, s)`, has s / 2 pairs more (the diagonal's other half).
    """
    return uncached_run_attention_flops(spec, context - 1, 1)


def key_rotation_flops(spec: ModelSpec, num_tokens):
    """Turning the keys of m tokens on all layers: two products and a sum a number, all dims."""
    return 3 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_tokens


def cached_step_flops(spec: ModelSpec, num_parameters, context):
    """One decode forward with a cache: one token in, `context` keys to attend to."""
    return projection_flops(num_parameters, 1) + attention_flops_cached_step(spec, context)


def uncached_step_flops(spec: ModelSpec, num_parameters, context):
    """One decode forward without a cache: all `context` tokens again."""
    return projection_flops(num_parameters, context) + attention_flops_uncached_step(spec, context)


def cached_run_projection_flops(num_parameters, decode):
    """Projections of n cached decode forwards."""
    return projection_flops(num_parameters, decode)


def uncached_run_projection_flops(num_parameters, prompt, decode):
    """Projections of n decode forwards that recompute every token."""
    return projection_flops(num_parameters, sum_of_contexts(prompt, decode))


def cached_run_attention_flops(spec: ModelSpec, prompt, decode):
    """Attention of n cached decode forwards: s pairs a step and layer, or the layer's window."""
    pairs = sum(
        count * window_pairs(layer, decode, prompt + decode) for count, layer in spec.layer_groups
    )
    return _layer_attention_flops(spec, pairs)


def uncached_run_attention_flops(spec: ModelSpec, prompt, decode):
    """Attention of n decode forwards that recompute every token, s^2 / 2 pairs a step.

    A window of w hides (s - w)^2 / 2 of them.
    """
    pairs = sum(
        count * (sum_of_squared_contexts(prompt, decode) - _squares_hidden(layer, prompt, decode))
        for count, layer in spec.layer_groups
    )
    return _divide(_layer_attention_flops(spec, pairs), 2)


def _squares_hidden(layer: LayerSpec, prompt, decode):
    """The sum of (s - w)^2 over the contexts s of n steps that are longer than the window w."""
    if layer.window is None:
        return 0
    before, last = (max(0, n - layer.window) for n in (prompt, prompt + decode))
    return sum_of_squared_contexts(before, last - before)


def batch_step_flops(spec: ModelSpec, num_parameters, batch, context):
    """One cached step of `batch` sequences, each with `context` keys."""
    return batch * cached_step_flops(spec, num_parameters, context)


def window_pairs(layer: LayerSpec, num_queries, num_keys):
    """The causal pairs that a layer's window leaves: a query at context c sees min(c, window)."""
    pairs = causal_pairs(num_queries, num_keys)
    if layer.window is None:
        return pairs
    last, before = (max(0, n - layer.window) for n in (num_keys, num_keys - num_queries))
    return pairs - (last * (last + 1) - before * (before + 1)) // 2


def forward_flops(spec: ModelSpec, num_queries, num_keys, num_logit_rows):
    """Exact FLOPs of a forward of q tokens on k keys that computes r rows of logits.

    A prefill has q = k; a chunk 1 < q < k; a cached step q = 1; an uncached step q = k again,
    with as many rows of logits. Query-key pairs are those that the causal mask and the layers'
    windows keep.
    """
    layers = streamed_params(spec) - embedding_params(spec)
    pairs = sum(
        count * window_pairs(layer, num_queries, num_keys) for count, layer in spec.layer_groups
    )
    return (
        projection_flops(layers, num_queries)
        + projection_flops(embedding_params(spec), num_logit_rows)
        + _layer_attention_flops(spec, pairs)
    )


def masked_forward_flops(spec: ModelSpec, num_queries, num_keys, num_logit_rows):
    """The same forward by a counter that charges attention for the masked pairs too: q k pairs."""
    masked = sum(
        count * (num_queries * num_keys - window_pairs(layer, num_queries, num_keys))
        for count, layer in spec.layer_groups
        if num_queries != 1  # a single query is masked nowhere: its keys are cut to the window
    )
    kept = forward_flops(spec, num_queries, num_keys, num_logit_rows)
    return kept + _layer_attention_flops(spec, masked)


def logit_rows_discarded(context):
    """Rows of logits an uncached step computes and does not sample from."""
    return context - 1


def kv_rows_recomputed(spec: ModelSpec, prompt, decode):
    """K/V rows (one K and one V per token and layer) that n uncached decode steps compute again."""
    return spec.num_layers * (sum_of_contexts(prompt, decode) - decode)


# --- how numbers are stored -------------------------------------------------------------------


@dataclass(frozen=True)
class StorageFormat:
    """How elements are stored: `block` of them at a time, in `block_bytes` (scales included).

    The bytes of an element are an exact fraction, so that a q8_0 cache is not off by its scales.
    head_scale_bytes lie beside each row of K and of V of one token and head, however wide it is:
    with_scales() counts them.
    Sources: llama.cpp's block_q8_0 and block_q4_0; the OCP Microscaling formats (MX)
    specification; NVIDIA's NVFP4 (16 values and an FP8 scale); vLLM's int8_per_token_head.
    """

    name: str
    block: int
    block_bytes: int
    note: str = ""
    head_scale_bytes: int = 0

    @property
    def bytes_per_element(self) -> int | Fraction:
        """Exact: 2 for bf16, 17/16 for q8_0."""
        share = Fraction(self.block_bytes, self.block)
        return share.numerator if share.denominator == 1 else share


#: Name -> format. Per-tensor scales (a number or two for the whole cache) are not counted.
FORMATS: dict[str, StorageFormat] = {
    f.name: f
    for f in (
        StorageFormat("fp32", 1, 4),
        StorageFormat("bf16", 1, 2),
        StorageFormat("fp16", 1, 2),
        StorageFormat("fp8", 1, 1, "one scale for a whole tensor, not counted"),
        StorageFormat("fp8_ds_mla", 1, 1, "a latent row: 4-byte scales of 128 values, rotated part "
                      "in 2 bytes"),
        StorageFormat("int8", 1, 1, "one scale for a whole tensor, not counted"),
        StorageFormat("int8_per_token_head", 1, 1, "a 4-byte scale per token and head", 4),
        StorageFormat("int8_g32", 32, 34, "32 values of 8 bits and a 2-byte scale"),
        StorageFormat("int8_g128", 128, 130, "128 values of 8 bits and a 2-byte scale"),
        StorageFormat("int4", 32, 18, "32 values of 4 bits and a 2-byte scale"),
        StorageFormat("int4_g64", 64, 36, "64 values of 4 bits, a 2-byte scale and a 2-byte zero"),
        StorageFormat("mxfp8", 32, 33, "32 values of 8 bits and a 1-byte scale"),
        StorageFormat("mxfp4", 32, 17, "32 values of 4 bits and a 1-byte scale"),
        StorageFormat("nvfp4", 16, 9, "16 values of 4 bits and a 1-byte scale"),
        StorageFormat("q8_0", 32, 34, "llama.cpp: 32 values of 8 bits and a 2-byte scale"),
        StorageFormat("q4_0", 32, 18, "llama.cpp: 32 values of 4 bits and a 2-byte scale"),
        StorageFormat("q4_1", 32, 20, "llama.cpp: as q4_0, and a 2-byte minimum"),
        StorageFormat("q5_0", 32, 22, "llama.cpp: 32 values of 5 bits and a 2-byte scale"),
        StorageFormat("q5_1", 32, 24, "llama.cpp: as q5_0, and a 2-byte minimum"),
        StorageFormat("iq4_nl", 32, 18, "llama.cpp: 32 values of 4 bits and a 2-byte scale"),
    )
}


# --- bytes of weights, K and V ----------------------------------------------------------------


def layer_kv_bytes_per_token(layer: LayerSpec, bytes_per_element=2):
    """What one more token adds to one layer's cache: h_kv rows of K and of V."""
    if layer.kind not in CACHING_KINDS:
        return 0
    return layer.num_kv_heads * (layer.key_dim + layer.value_dim) * bytes_per_element


def compressed_bytes_per_token(layer: LayerSpec, bytes_per_element=2):
    """What one more token adds beside a window: a row of the layer's for each so many tokens."""
    row = layer_kv_bytes_per_token(layer, bytes_per_element)
    return Fraction(row) / layer.compress if layer.compress else 0


def kv_bytes_per_token(spec: ModelSpec, bytes_per_element=2):
    """What one more token adds while no window is full, over all layers."""
    return sum(
        count * layer_kv_bytes_per_token(layer, bytes_per_element)
        + count * compressed_bytes_per_token(layer, bytes_per_element)
        for count, layer in spec.layer_groups
    )


def kept_tokens(layer: LayerSpec, num_tokens):
    """Tokens of a sequence of num_tokens that the layer still has K and V of."""
    return num_tokens if layer.window is None else min(num_tokens, layer.window)


def _rows(layer: LayerSpec, num_tokens):
    """Rows that the layer holds: of the tokens it keeps, and compressed ones."""
    more = num_tokens // layer.compress if layer.compress else 0
    return kept_tokens(layer, num_tokens) + more


def kv_bytes(spec: ModelSpec, num_tokens, bytes_per_element=2):
    """The cache of one sequence of num_tokens: a function, not a rate, where windows fill up."""
    return sum(
        count * layer_kv_bytes_per_token(layer, bytes_per_element) * _rows(layer, num_tokens)
        for count, layer in spec.layer_groups
    )


def kv_bytes_read_run(spec: ModelSpec, prompt, decode, bytes_per_element=2):
    """K and V read by n cached decode steps: every row, or those that a layer's window leaves."""
    return sum(
        count * layer_kv_bytes_per_token(layer, bytes_per_element)
        * window_pairs(layer, decode, prompt + decode)
        for count, layer in spec.layer_groups
    )  # fmt: skip


def kv_bytes_copied_by_concatenation(spec: ModelSpec, prompt, decode, bytes_per_element=2):
    """Old K and V copied by n steps that grow the cache with torch.cat. Preallocated: none."""
    return kv_bytes_per_token(spec, bytes_per_element) * (sum_of_contexts(prompt, decode) - decode)


def weight_bytes(num_parameters, bytes_per_element=2):
    """The weights, once: what one forward streams, whatever the batch."""
    return num_parameters * bytes_per_element


def cached_step_bytes(spec: ModelSpec, num_parameters, context, bytes_per_element=2):
    """Bytes one cached step reads: the weights once, every cached K and V once."""
    return run_bytes(spec, num_parameters, context - 1, 1, bytes_per_element)


def batch_step_bytes(spec: ModelSpec, num_parameters, batch, context, bytes_per_element=2):
    """Bytes a step of a batch reads: the weights once for all, every sequence's K and V."""
    kv_read = batch * kv_bytes_read_run(spec, context - 1, 1, bytes_per_element)
    return weight_bytes(num_parameters, bytes_per_element) + kv_read


def kv_weight_crossover_tokens(spec: ModelSpec, num_parameters):
    """Resident tokens, over the whole batch, at which a step reads as much KV as weights.

    The number of bytes an element has cancels out while both are kept in the same one.
    """
    return num_parameters / kv_bytes_per_token(spec, 1)


def run_bytes(spec: ModelSpec, num_parameters, prompt, decode, bytes_per_element=2):
    """Bytes n cached steps read."""
    weights_read = decode * weight_bytes(num_parameters, bytes_per_element)
    return weights_read + kv_bytes_read_run(spec, prompt, decode, bytes_per_element)


# --- the model that is really stored ----------------------------------------------------------


def _each(spec: ModelSpec, change: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
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


def with_scales(spec: ModelSpec, storage: StorageFormat) -> ModelSpec:
    """The model with the scale of each head's row stored as more elements of that row.

    A 4-byte scale beside 8-bit values takes the room of four of them: head_dim 128 becomes 132.
    """
    if storage.name == "fp8_ds_mla":  # 512 + 4 * 4 + 64 * 2 = 656 bytes a row
        turned = spec.rope.rotary_dim

        def row(layer: LayerSpec) -> LayerSpec:
            if layer.kind != "latent":
                return layer
            latent = layer.key_dim - turned
            return replace(layer, key_dim=latent + latent // 128 * 4 + 2 * turned)

        return _each(spec, row)
    extra = Fraction(storage.head_scale_bytes) / storage.bytes_per_element
    assert extra.denominator == 1, f"{storage.name}: a scale takes the room of {extra} elements"
    scale = int(extra)
    if not scale:
        return spec

    def widened(layer: LayerSpec) -> LayerSpec:
        key, value = (width and width + scale for width in (layer.key_dim, layer.value_dim))
        whole = layer.expanded and widened(layer.expanded)
        return replace(layer, key_dim=key, value_dim=value, expanded=whole)

    return replace(_each(spec, widened), head_dim=spec.head_dim and spec.head_dim + scale)


def index_bytes_per_token(spec: ModelSpec, bytes_per_element=2):
    """Keys that the indexers of sparse attention keep: below 16 bits with a 4-byte scale each.

    Source: sgl-project/sglang#11309, 128 + 4 bytes a token and layer for DeepSeek-V3.2.
    """
    scale = 4 if bytes_per_element < 2 else 0
    return sum(
        Fraction(layer.index_dim * bytes_per_element + scale) / (layer.compress or 1)
        for layer in spec.layers
        if layer.index_dim
    )


def with_indexer(spec: ModelSpec, bytes_per_element=2) -> ModelSpec:
    """The model with its indexers' 8-bit keys as rows of their own, as engines store them."""
    rows = [layer.index_dim + 4 for layer in spec.layers if layer.index_dim]
    if not rows or bytes_per_element not in (1, 2):
        return spec
    added = tuple(LayerSpec("latent", 1, row // bytes_per_element) for row in rows)
    return replace(spec, layers=spec.layers + added)


def padded_to_full(spec: ModelSpec) -> ModelSpec:
    """What an engine stores whose pool has no group of its own for windowed layers.

    Every layer then gets pages for the whole context, whatever its window needs.
    """
    return _each(spec, lambda layer: replace(layer, window=None))


def per_rank(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The model as one of so many tensor-parallel ranks stores it, or a CostError.

    KV heads are split, or copied where there are more ranks than heads. A latent (MLA) row belongs
    to every head at once, so each rank keeps all of it. A recurrent state is split by its heads.
    """
    if ranks == 1:
        return spec
    if ranks < 1 or (spec.num_heads and spec.num_heads % ranks):
        expected = f"a divisor of the {spec.num_heads} query heads"
        raise CostError(f"tensor parallel: given {ranks} ranks; expected {expected}")

    def share(layer: LayerSpec) -> LayerSpec:
        state = tuple(
            replace(s, num_elements=s.num_elements and -(-s.num_elements // ranks))
            for s in layer.state
        )
        if layer.kind == "latent":
            return replace(layer, state=state, expanded=layer.expanded and share(layer.expanded))
        heads = layer.num_kv_heads
        if heads and max(heads, ranks) % min(heads, ranks):
            raise CostError(
                f"tensor parallel: given {ranks} ranks for {heads} KV heads; expected one to "
                "divide the other, so that heads are split evenly or copied whole"
            )
        heads = heads and max(1, heads // ranks)
        return replace(layer, num_kv_heads=heads, state=state)

    return _each(spec, share)


# --- bytes of one sequence --------------------------------------------------------------------


def growing_bytes_per_token(spec: ModelSpec, bytes_per_element=2):
    """What one more token adds for good: layers without a window."""
    lasting = [layer for layer in spec.layers if layer.window is None]
    growing = sum(layer_kv_bytes_per_token(layer, bytes_per_element) for layer in lasting)
    return growing + sum(compressed_bytes_per_token(x, bytes_per_element) for x in spec.layers)


def window_cap_bytes(spec: ModelSpec, bytes_per_element=2):
    """What windowed layers hold at most, once every window is full."""
    return sum(
        layer_kv_bytes_per_token(layer, bytes_per_element) * layer.window
        for layer in spec.layers
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
    """The common mistake: every layer charged for h heads of K and V."""
    return spec.num_layers * spec.num_heads * 2 * spec.head_dim * bytes_per_element


def paged_kv_bytes(spec: ModelSpec, num_tokens: int, block_size: int, bytes_per_element=2):
    """One sequence in whole pages of block_size tokens, each windowed layer in its own group."""
    total = 0
    for count, layer in spec.layer_groups:
        pages = -(-_rows(layer, num_tokens) // block_size)
        total += count * pages * block_size * layer_kv_bytes_per_token(layer, bytes_per_element)
    return total


def sequence_bytes(spec: ModelSpec, num_tokens, bytes_per_element=2):
    """F + bytes(n): the fixed state and the cache of one sequence."""
    fixed = fixed_bytes_per_sequence(spec, bytes_per_element)
    if fixed is None:
        raise CostError(
            f"{spec.name}: its recurrent state has no known size; add its keys to the config"
        )
    return fixed + kv_bytes(spec, num_tokens, bytes_per_element)


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
    return pool // (bytes_per_token * block_size)


def pool_tokens(blocks, block_size):
    """Tokens that the blocks hold."""
    return blocks * block_size


def concurrency(tokens, max_model_len):
    """How many sequences of max_model_len a pool of so many tokens holds (uniform models only)."""
    return tokens / max_model_len


def sequences_that_fit(spec: ModelSpec, pool, num_tokens, bytes_per_element=2):
    """Whole sequences of num_tokens in a pool: pool / (F + bytes(n)), not proportional to 1 / n."""
    return pool // sequence_bytes(spec, num_tokens, bytes_per_element)


def longest_context(spec: ModelSpec, pool: int, sequences: int, bytes_per_element=2) -> int | None:
    """The most tokens that each of so many sequences may have. None: no limit (windows only)."""

    def fits(tokens: int) -> bool:
        return sequences * sequence_bytes(spec, tokens, bytes_per_element) <= pool

    if not fits(0):
        return 0
    widest = max((layer.window or 0 for layer in spec.layers), default=0)
    if not growing_bytes_per_token(spec, bytes_per_element) and fits(widest):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- times and roofs --------------------------------------------------------------------------


def memory_seconds(num_bytes, bandwidth_bytes_per_second):
    """The least time in which the bytes can move."""
    return num_bytes / bandwidth_bytes_per_second


def compute_seconds(num_flops, peak_flops_per_second):
    """The least time in which the FLOPs can be done."""
    return num_flops / peak_flops_per_second


def intensity(num_flops, num_bytes):
    """FLOPs per byte moved."""
    return num_flops / num_bytes


def intensity_limit(spec: ModelSpec, num_parameters, context):
    """FLOPs per byte of a batch without end: weights cost nothing, every KV byte is read once."""
    flops = cached_step_flops(spec, num_parameters, context)
    return flops / (context * kv_bytes_per_token(spec, 2))


def ridge_intensity(peak_flops_per_second, bandwidth_bytes_per_second):
    """FLOPs per byte at which arithmetic and bytes take equally long."""
    return peak_flops_per_second / bandwidth_bytes_per_second


def roofline_seconds(num_flops, num_bytes, peak_flops_per_second, bandwidth_bytes_per_second):
    """The least time of a step: the longer of its two parts, the other hidden behind it.

    Source of the model: Williams, Waterman and Patterson 2009, "Roofline".
    """
    arithmetic = compute_seconds(num_flops, peak_flops_per_second)
    return max(arithmetic, memory_seconds(num_bytes, bandwidth_bytes_per_second))


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
