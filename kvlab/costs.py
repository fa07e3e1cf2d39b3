"""What a decode step computes, moves and keeps: every formula of the book, once.

Plain arithmetic on a ModelSpec. With whole numbers the answers are exact integers; with SymPy
symbols they are formulas, from which `formulas.py` prints the LaTeX of the pages and the
JavaScript of the widgets. Nothing else in the book works a cost out by itself.

Conventions (the running example is Llama-3-8B, p = 2048, n = 512):
- prefill samples the first output; n decode forwards follow; at step t = 1..n the processed
  context is s = p + t, which counts the token fed into this forward and not the one it samples;
- `num_parameters` is the P that the projections cost 2P FLOPs for. Coarse accounting rounds the
  resident parameters as a model card does; exact accounting takes `streamed_params`;
- units stand in the names: _flops, _bytes, _seconds. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from kvlab.errors import KvlabError
from kvlab.specs import LayerSpec, ModelSpec

#: Layer kinds that put K and V of their own into the cache, one row per token.
CACHING_KINDS = ("full", "sliding", "chunked", "latent")


class NotDenseLlama(KvlabError):
    """Parameters of this architecture are not counted here; pass their number instead."""


def _divide(numerator, denominator: int):
    """An exact quotient: an int for ints (the caller knows it divides), symbolic otherwise."""
    if isinstance(numerator, int):
        return numerator // denominator
    return numerator / denominator


# --- parameters -----------------------------------------------------------------------------


def qkv_params_per_layer(spec: ModelSpec):
    """Weights of the query, key and value projections of one layer."""
    return spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


def output_params_per_layer(spec: ModelSpec):
    """Weights of the attention output projection of one layer."""
    return spec.num_heads * spec.head_dim * spec.hidden_size


def mlp_params_per_layer(spec: ModelSpec):
    """Weights of the gate, up and down projections of one layer."""
    return 3 * spec.hidden_size * spec.intermediate_size


def embedding_params(spec: ModelSpec):
    """One vocabulary matrix: the input embedding, or the output head."""
    return spec.vocab_size * spec.hidden_size


def norm_params(spec: ModelSpec):
    """Two RMSNorm vectors a layer and the final one."""
    return (2 * spec.num_layers + 1) * spec.hidden_size


def streamed_params(spec: ModelSpec):
    """Matrix weights that a decode step multiplies by: every layer and the output head.

    The input embedding is gathered, not streamed; a tied matrix is streamed once, as the head.
    """
    if not spec.is_dense_llama:
        raise NotDenseLlama(
            f"{spec.name} ({spec.model_type}): the parameters can be counted from the config of a "
            f"dense Llama-shaped decoder only; give the number that a token uses (--params 8.03e9)"
        )
    per_layer = (
        qkv_params_per_layer(spec) + output_params_per_layer(spec) + mlp_params_per_layer(spec)
    )
    return spec.num_layers * per_layer + embedding_params(spec)


def resident_params(spec: ModelSpec):
    """Every weight that lies in memory, the input embedding and the norms included."""
    untied = 1 - spec.tie_word_embeddings
    return streamed_params(spec) + norm_params(spec) + untied * embedding_params(spec)


# --- contexts and their sums ----------------------------------------------------------------


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


# --- FLOPs ----------------------------------------------------------------------------------


def projection_flops(num_parameters, num_tokens):
    """Two FLOPs a weight and a token: every matrix product of a forward but attention's own."""
    return 2 * num_parameters * num_tokens


def attention_flops_per_pair(key_dim, value_dim):
    """One query-key pair of one head: a dot product of key_dim, a weighted sum of value_dim."""
    return 2 * (key_dim + value_dim)


def attention_flops(spec: ModelSpec, num_pairs):
    """All heads and layers over num_pairs query-key pairs (full attention on every layer)."""
    per_pair = attention_flops_per_pair(spec.head_dim, spec.head_dim)
    return spec.num_layers * spec.num_heads * per_pair * num_pairs


def attention_flops_cached_step(spec: ModelSpec, context):
    """One query against `context` keys."""
    return attention_flops(spec, context)


def attention_flops_uncached_step(spec: ModelSpec, context):
    """Every token against all before it, as s^2 / 2 pairs: a causal kernel skips half.

    The exact count, `causal_pairs(s, s)`, has s / 2 pairs more (the diagonal's other half).
    """
    return _divide(attention_flops(spec, context**2), 2)


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
    """Attention of n cached decode forwards."""
    return attention_flops(spec, sum_of_contexts(prompt, decode))


def uncached_run_attention_flops(spec: ModelSpec, prompt, decode):
    """Attention of n decode forwards that recompute every token, s^2 / 2 pairs a step."""
    return _divide(attention_flops(spec, sum_of_squared_contexts(prompt, decode)), 2)


# --- what the uncached loop throws away -----------------------------------------------------


def logit_rows_discarded(context):
    """Rows of logits an uncached step computes and does not sample from."""
    return context - 1


def kv_rows_recomputed(spec: ModelSpec, prompt, decode):
    """K/V rows (one K and one V per token and layer) that n uncached decode steps compute again."""
    return spec.num_layers * (sum_of_contexts(prompt, decode) - decode)


# --- bytes ----------------------------------------------------------------------------------


def layer_kv_bytes_per_token(layer: LayerSpec, bytes_per_element=2):
    """What one more token adds to one layer's cache: h_kv rows of K and of V."""
    if layer.kind not in CACHING_KINDS:
        return 0
    return layer.num_kv_heads * (layer.key_dim + layer.value_dim) * bytes_per_element


def kv_bytes_per_token(spec: ModelSpec, bytes_per_element=2):
    """What one more token adds while no window is full, over all layers."""
    return sum(
        count * layer_kv_bytes_per_token(layer, bytes_per_element)
        for count, layer in spec.layer_groups
    )


def kv_bytes(spec: ModelSpec, num_tokens, bytes_per_element=2):
    """The cache of one sequence of num_tokens: a function, not a rate, where windows fill up."""
    return sum(
        count
        * layer_kv_bytes_per_token(layer, bytes_per_element)
        * (num_tokens if layer.window is None else min(num_tokens, layer.window))
        for count, layer in spec.layer_groups
    )


def kv_bytes_read_run(spec: ModelSpec, prompt, decode, bytes_per_element=2):
    """K and V read by n cached decode steps (full attention on every layer)."""
    return kv_bytes_per_token(spec, bytes_per_element) * sum_of_contexts(prompt, decode)


def kv_bytes_copied_by_concatenation(spec: ModelSpec, prompt, decode, bytes_per_element=2):
    """Old K and V copied by n steps that grow the cache with torch.cat. Preallocated: none."""
    return kv_bytes_per_token(spec, bytes_per_element) * (sum_of_contexts(prompt, decode) - decode)


def weight_bytes(num_parameters, bytes_per_element=2):
    """The weights, once: what one forward streams, whatever the batch."""
    return num_parameters * bytes_per_element


def cached_step_bytes(spec: ModelSpec, num_parameters, context, bytes_per_element=2):
    """Bytes one cached step reads: the weights once, every cached K and V once."""
    kv_read = context * kv_bytes_per_token(spec, bytes_per_element)
    return weight_bytes(num_parameters, bytes_per_element) + kv_read


def run_bytes(spec: ModelSpec, num_parameters, prompt, decode, bytes_per_element=2):
    """Bytes n cached steps read."""
    weights_read = decode * weight_bytes(num_parameters, bytes_per_element)
    return weights_read + kv_bytes_read_run(spec, prompt, decode, bytes_per_element)


# --- times ----------------------------------------------------------------------------------


def memory_seconds(num_bytes, bandwidth_bytes_per_second):
    """The least time in which the bytes can move."""
    return num_bytes / bandwidth_bytes_per_second


def compute_seconds(num_flops, peak_flops_per_second):
    """The least time in which the FLOPs can be done."""
    return num_flops / peak_flops_per_second


def intensity(num_flops, num_bytes):
    """FLOPs per byte moved."""
    return num_flops / num_bytes
