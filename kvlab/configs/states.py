"""The fixed state that a recurrent layer keeps per sequence, whatever the context.

Every family keeps a short convolution window (the last K - 1 inputs, in the model's dtype) and a
running summary (mostly float32). Engines differ in both dtypes and in K against K - 1; the sizes
here are K - 1 inputs in 2 bytes and the summary in 4, and a note of the config reader says so.

Sources: the cache shapes in transformers' modelling files, and vLLM's mamba state shapes.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlab.configs.fields import Fields
from kvlab.specs import StateSpec

MODEL_BYTES = 2
SUMMARY_BYTES = 4


def _pair(conv: int, summary: int) -> tuple[StateSpec, ...]:
    return (
        StateSpec("convolution window", conv, MODEL_BYTES),
        StateSpec("recurrent state", summary, SUMMARY_BYTES),
    )


def _mamba1(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """Jamba, Zamba, Mamba, Falcon-Mamba: one d_state vector for each inner channel."""
    state = f.default_count("mamba_d_state") or f.needed("state_size", "the Mamba state")
    kernel = f.default_count("mamba_d_conv") or f.needed("conv_kernel", "the Mamba convolution")
    expand = f.default_count("mamba_expand") or f.default_count("expand") or 2
    pure = f.model_type in ("mamba", "falcon_mamba")  # there the MLP's width is the inner width
    inner = (f.count("intermediate_size") if pure else None) or expand * hidden
    return _pair((kernel - 1) * inner, inner * state)


def _mamba2(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """Mamba-2 (SSD): heads of d_head channels, each with a d_state x d_head matrix."""
    why = "the Mamba-2 state"
    state = (
        f.default_count("ssm_state_size")
        or f.default_count("mamba_d_state")
        or f.needed("state_size", why)
    )
    kernel = f.default_count("mamba_d_conv") or f.needed("conv_kernel", why)
    heads = (
        f.default_count("mamba_num_heads")
        or f.default_count("mamba_n_heads")
        or f.default_count("n_mamba_heads")
        or f.needed("num_heads", why)
    )
    expand = f.default_count("mamba_expand") or f.default_count("expand") or 2
    inner = f.default_count("mamba_d_ssm") or expand * hidden
    head = f.count("head_dim") if f.model_type == "mamba2" else None
    head = head or f.default_count("mamba_head_dim") or _head_of(f, inner, heads)
    inner = heads * head
    groups = (
        f.default_count("mamba_n_groups")
        or f.default_count("mamba_ngroups")
        or f.default_count("n_groups")
        or 1
    )
    return _pair((kernel - 1) * (inner + 2 * groups * state), heads * head * state)


def _head_of(f: Fields, inner: int, heads: int) -> int:
    given = f.data.get("mamba_d_head")
    if given is not None and given != "auto":
        return f.check_count("mamba_d_head", given) or 0
    if inner % heads:
        raise f.fail(
            "mamba_n_heads", f"given {heads}; expected a divisor of the inner width {inner}"
        )
    return inner // heads


def _delta_net(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """Gated DeltaNet (Qwen3-Next): a d_k x d_v matrix for each value head."""
    why = "the linear attention state"
    key_dim = f.needed("linear_key_head_dim", why)
    value_dim = f.needed("linear_value_head_dim", why)
    key_heads = f.needed("linear_num_key_heads", why)
    value_heads = f.needed("linear_num_value_heads", why)
    kernel = f.default_count("linear_conv_kernel_dim") or 4
    conv = (kernel - 1) * (2 * key_dim * key_heads + value_dim * value_heads)
    return _pair(conv, value_heads * key_dim * value_dim)


def _olmo_hybrid(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """OLMo hybrid: a Gated DeltaNet whose widths follow from the attention heads if not given."""
    heads = f.needed("num_attention_heads", "the linear attention state")
    key_heads = f.count("linear_num_key_heads") or heads
    value_heads = f.count("linear_num_value_heads") or heads
    key_dim = f.count("linear_key_head_dim") or int(0.75 * hidden / key_heads)
    value_dim = f.count("linear_value_head_dim") or 2 * key_dim
    kernel = f.default_count("linear_conv_kernel_dim") or 4
    conv = (kernel - 1) * (2 * key_dim * key_heads + value_dim * value_heads)
    return _pair(conv, value_heads * key_dim * value_dim)


def _kda(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """Kimi Delta Attention: q, k and v convolutions, one d x d matrix a head."""
    block = f.block("linear_attn_config")
    why = "the linear attention state"
    heads = f.check_count("linear_attn_config.num_heads", block.get("num_heads"))
    head = f.check_count("linear_attn_config.head_dim", block.get("head_dim"))
    kernel = f.check_count(
        "linear_attn_config.short_conv_kernel_size", block.get("short_conv_kernel_size")
    )
    heads = heads or f.default_count("linear_num_heads") or f.needed("num_attention_heads", why)
    head = head or f.default_count("linear_head_dim") or f.needed("head_dim", why)
    kernel = kernel or f.default_count("linear_conv_kernel_dim") or 4
    return _pair((kernel - 1) * 3 * heads * head, heads * head * head)


def _lightning(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """MiniMax lightning attention: one d x d matrix a head, no convolution."""
    heads = f.needed("num_attention_heads", "the linear attention state")
    head = f.count("head_dim") or hidden // heads
    return (StateSpec("recurrent state", heads * head * head, SUMMARY_BYTES),)


def _rg_lru(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """Griffin's recurrent block: one float per channel."""
    width = f.count("lru_width") or hidden
    kernel = f.default_count("conv1d_width") or 4
    return _pair((kernel - 1) * width, width)


def _short_conv(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """LFM2: a gated short convolution and nothing else."""
    kernel = f.default_count("conv_L_cache") or f.needed("conv_L_cache", "the convolution window")
    return (StateSpec("convolution window", (kernel - 1) * hidden, MODEL_BYTES),)


def _rwkv(f: Fields, hidden: int) -> tuple[StateSpec, ...]:
    """RWKV-4: two shifted inputs, and numerator, denominator and maximum of the running sum."""
    width = f.count("attention_hidden_size") or hidden
    return (
        StateSpec("shifted inputs", 2 * hidden, MODEL_BYTES),
        StateSpec("recurrent state", 3 * width, SUMMARY_BYTES),
    )


FAMILIES: dict[str, Callable[[Fields, int], tuple[StateSpec, ...]]] = {
    **dict.fromkeys(("jamba", "zamba", "mamba", "falcon_mamba"), _mamba1),
    **dict.fromkeys(
        ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"), _mamba2
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "lara_mini"),
        _delta_net,
    ),
    "olmo_hybrid": _olmo_hybrid,
    **dict.fromkeys(("kimi_linear", "bailing_hybrid", "glm5_next_text"), _kda),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), _lightning),
    "recurrent_gemma": _rg_lru,
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_conv),
    "rwkv": _rwkv,
}

#: Where the model type is unknown: the first of these keys in the file names the family.
TELLTALES = (
    ("linear_key_head_dim", _delta_net),
    ("mamba_n_heads", _mamba2),
    ("mamba_num_heads", _mamba2),
    ("n_mamba_heads", _mamba2),
    ("mamba_d_state", _mamba1),
    ("conv_L_cache", _short_conv),
    ("linear_attn_config", _kda),
    ("attn_type_list", _lightning),
)

UNKNOWN = (StateSpec("recurrent state", None, None),)


def layer_state(fields: Fields, hidden: int | None) -> tuple[StateSpec, ...]:
    """State of one recurrent layer. Unknown (elements None) where no key tells its size."""
    family = FAMILIES.get(fields.model_type)
    if family is None:
        family = next((f for key, f in TELLTALES if fields.data.get(key) is not None), None)
    if family is None or hidden is None:
        fields.note("the recurrent layers' fixed state is not counted: no key tells its size")
        return UNKNOWN
    fields.note("fixed state: convolution windows of K - 1 inputs in 2 bytes, summaries in float32")
    return family(fields, hidden)
