"""How many KV heads, how wide K and V, how large a state: one LayerSpec for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvlab.configs.fields import Fields, model_types, show
from kvlab.specs import LayerSpec, StateSpec


@dataclass(frozen=True)
class Shape:
    """The attention of one layer, by the names of config.json.

    num_key_value_heads 0: the layer has no attention of its own. The last three are None but in
    a latent (MLA) layer, whose v_head_dim is the width of V once it is expanded.
    """

    num_attention_heads: int | None
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0

    def changed(self, given: Mapping[str, int | None]) -> Shape:
        """The same shape with what is given (not None); a V as wide as K stays as wide as K."""
        news: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if self.kv_lora_rank is None and self.v_head_dim == self.head_dim and "head_dim" in news:
            news.setdefault("v_head_dim", news["head_dim"])
        return replace(self, **news)


#: What a layer may have for itself; a latent layer has the second list beside the first.
WIDTHS = ("num_key_value_heads", "head_dim", "v_head_dim", "num_attention_heads")
LATENT_WIDTHS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def shared_shape(fields: Fields, hidden: int | None, kinds: list[str]) -> Shape:
    """The shape that layers have unless they say otherwise."""
    if set(kinds) <= {"recurrent", "none"}:
        return Shape(None, 0, 0, 0)
    heads = _query_heads(fields)
    latent = _latent(fields, heads)
    if latent is not None:
        return latent
    head_dim = _head_dim(fields, hidden, heads)
    kv_heads = _kv_heads(fields, heads)
    value = fields.count("v_head_dim", 0)
    if value is None and "kv_lora_rank" not in fields.defaults:  # else it is a latent's width
        value = fields.defaults.get("v_head_dim")
    return Shape(heads, kv_heads, head_dim, value or head_dim)


def _query_heads(fields: Fields) -> int | None:
    """Query heads; a list has one entry a layer (OpenELM), and the most of them stands for all."""
    stated = fields.raw("num_attention_heads")
    if not isinstance(stated, list | tuple):
        return fields.default_count("num_attention_heads")
    most = _most(fields, "num_attention_heads", stated)
    fields.note(f"query heads differ from layer to layer; {most}, the most, stands for all")
    return most


def _most(fields: Fields, key: str, stated: list | tuple) -> int:
    counts = [n for n in stated if fields.as_count(key, n)]
    fields.check(key, stated, bool(counts) and len(counts) == len(stated), "counts")
    return max(counts)


def _latent(fields: Fields, heads: int | None) -> Shape | None:
    """The shape of an MLA model, else None."""
    null = "kv_lora_rank" in fields.data and fields.data["kv_lora_rank"] is None
    if null or fields.flag("use_mla") is False:
        return None
    rank = fields.default_count("kv_lora_rank")
    if rank is None:
        return None
    why = "a part of the latent (MLA) row"
    rope = fields.needed("qk_rope_head_dim", why=why, least=0)
    nope = fields.needed("qk_nope_head_dim", why=why, least=0)
    if fields.model_type == "minicpm3" and fields.count("v_head_dim") is None:
        hidden = fields.needed("hidden_size", why=why)
        value = hidden // fields.needed("num_attention_heads", why=why)
    else:
        value = fields.needed("v_head_dim", why="the width of V in an MLA layer")
    heads = heads or fields.needed("num_attention_heads", why="the number of query heads")
    kv_heads = fields.count("num_key_value_heads") or heads
    return Shape(heads, kv_heads, rope, value, rank, rope, nope)


def _head_dim(fields: Fields, hidden: int | None, heads: int | None) -> int:
    """head_dim if declared, else the model type's own, else hidden_size / num_attention_heads."""
    derived = fields.fact("derived_head_dim")
    declared = None if derived else fields.default_count("head_dim")
    if declared is not None:
        return declared
    if hidden is None or heads is None:
        hidden = fields.needed("hidden_size", why="since head_dim is not given")
        heads = fields.needed("num_attention_heads", why="since head_dim is not given")
    if fields.model_type in ("zamba", "zamba2"):
        hidden *= 2  # its attention reads the hidden state and the embedding side by side
    if hidden % heads:
        clash = f"hidden_size {hidden} is not divisible by num_attention_heads {heads}"
        expected = "expected head_dim, or two numbers that divide; add head_dim"
        fields.fail("head_dim", f"missing, and {clash}; {expected}")
    width = hidden // heads
    if not derived:
        fields.note(f"head_dim is not in the file; hidden_size / num_attention_heads is {width}")
    return width


def _stated_kv_heads(fields: Fields) -> Any:
    """The KV heads as the file gives them: one number, or a list with one entry a layer."""
    listed = fields.items("num_key_value_heads_per_layer")
    return fields.raw("num_key_value_heads") if listed is None else listed


def _kv_heads(fields: Fields, heads: int | None) -> int:
    """KV heads, with the multi-query switches of older families."""
    key, stated = "num_key_value_heads", _stated_kv_heads(fields)
    if isinstance(stated, list | tuple):  # one entry a layer: see layer_shapes
        return _most(fields, key, stated)
    model_type = fields.model_type
    one = fields.flag("multi_query")
    if one is None:
        switch = fields.flag("multi_query_attention")
        if switch is False and heads is not None:
            return heads
        one = True if switch and stated is None else None
    if one is None and model_type in ("falcon", "gpt_bigcode"):
        one = True
        fields.note(f"multi_query is not in the file; {model_type} means true by that")
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if fields.flag("new_decoder_architecture") or model_type == "RefinedWeb":
            one = None
        elif one and stated not in (None, 1):
            fields.note(f"multi_query: one KV head, whatever num_kv_heads ({show(stated)}) says")
            return 1
        else:
            one = bool(one)
    elif model_type != "gpt_bigcode":
        one = one or None  # false there says no more than silence
    old_switch = fields.raw("attention_head_type") == "multiquery"  # SantaCoder's first form
    if one or old_switch or fields.block("attn_config").get("attn_type") == "multiquery_attention":
        expected = "1, since multi_query is true; correct one of them"
        fields.check(key, stated, stated in (None, 1), expected)
        return 1
    kv_heads = None if one is False else fields.default_count(key)
    if kv_heads is None and one is None and heads and fields.raw("block_configs"):
        return heads  # for blocks that say nothing else: see layer_shapes
    if kv_heads is None:
        why = "no num_key_value_heads" if one is None else "multi_query is false"
        heads = heads or fields.needed("num_attention_heads", why=f"since there is {why}")
        fields.note(f"{why}: every query head has its own K and V ({heads} KV heads)")
        return heads
    expected = (
        f"a divisor of num_attention_heads {heads}, so that each KV head serves the same number "
        f"of query heads; correct one"
    )
    fields.check(key, kv_heads, heads is None or heads % kv_heads == 0, expected)
    return kv_heads


# --- what a file says for single layers ---------------------------------------------------------


def layer_shapes(fields: Fields, base: Shape, kinds: list[str]) -> list[Shape]:
    """The shape of each layer: another one for windows, lists, overrides, blocks."""
    shapes = [base] * len(kinds)
    for i, kind in enumerate(kinds):
        if kind.startswith("sliding"):
            shapes[i] = _in_a_window(fields, base)
        elif kind.startswith("full") and base.kv_lora_rank is None:
            shapes[i] = _in_full(fields, base)
    queries, stated = fields.raw("num_attention_heads"), _stated_kv_heads(fields)
    for key, counts in (("num_attention_heads", queries), ("num_key_value_heads", stated)):
        if isinstance(counts, list | tuple):
            fields.one_a_layer(key, counts, len(kinds))
    for i, count in enumerate(stated if isinstance(stated, list | tuple) else ()):
        kv_heads = fields.as_count("num_key_value_heads", count) or 0
        heads = shapes[i].num_attention_heads
        if isinstance(queries, list | tuple):
            heads = fields.as_count("num_attention_heads", queries[i])
        divides = not heads or not kv_heads or heads % kv_heads == 0
        expected = f"a divisor of the {heads} query heads of layer {i}"
        fields.check("num_key_value_heads", kv_heads, divides, expected)
        shapes[i] = replace(shapes[i], num_attention_heads=heads, num_key_value_heads=kv_heads)
    for index, changes in fields.block("per_layer_config").items():  # {"5": {"head_dim": 512}}
        name = f"per_layer_config.{index}"
        i = int(index) if isinstance(index, str) and index.isdecimal() and len(index) < 7 else index
        fields.as_count(name, i, 0, len(shapes) - 1)
        fields.check(name, changes, isinstance(changes, Mapping), "an object")
        found = {k: fields.as_count(f"{name}.{k}", changes.get(k)) for k in WIDTHS}
        if base.kv_lora_rank is not None:
            for key in LATENT_WIDTHS:
                found[key] = fields.as_count(f"{name}.{key}", changes.get(key), 0)
        shapes[i] = shapes[i].changed(found)
    blocks = fields.items("block_configs", len(shapes))
    return shapes if blocks is None else [_of_block(fields, base, *b) for b in enumerate(blocks)]


def _in_a_window(fields: Fields, base: Shape) -> Shape:
    """Sliding layers: fields that begin with swa_."""
    keys = WIDTHS if base.kv_lora_rank is None else (*LATENT_WIDTHS, "num_attention_heads")
    found = {key: fields.default_count(f"swa_{key}") for key in keys}
    if fields.model_type == "mimo_v2_flash" and not fields.declared("swa_num_key_value_heads"):
        fields.note("mimo_v2_flash: sliding layers have twice the KV heads")
        return replace(base, num_key_value_heads=2 * base.num_key_value_heads)
    return base.changed(found)


def _in_full(fields: Fields, base: Shape) -> Shape:
    """Gemma 4: wider heads, and fewer of them, where a layer attends in full."""
    given = fields.data.get("per_layer_config") is not None
    if given or not fields.fact("wider_in_full"):
        return base
    head_dim = fields.count("global_head_dim")
    if head_dim is None:
        head_dim = 512
        fields.note("global_head_dim is not in the file; gemma4 means 512 by that")
    found: dict[str, int | None] = {"head_dim": head_dim, "v_head_dim": head_dim}
    if fields.flag("attention_k_eq_v"):
        found["num_key_value_heads"] = fields.count("num_global_key_value_heads")
    return base.changed(found)


def _of_block(fields: Fields, base: Shape, i: int, block: object) -> Shape:
    """block_configs (Nemotron-NAS): each layer's own attention, or none at all."""
    name = f"block_configs.{i}"
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        fields.fail(name, f"given {show(block)}; expected an attention block")
    if attention.get("no_op") is True or attention.get("replace_with_linear") is True:
        return replace(base, num_key_value_heads=0)
    key, window = f"{name}.attention.window_length", attention.get("window_length")
    expected = "null, since windows of single blocks are not modelled"
    fields.check(key, window, window is None, expected)
    key, heads = f"{name}.attention.n_heads_in_group", base.num_attention_heads
    share = fields.as_count(key, attention.get("n_heads_in_group"))
    if share is None or heads is None or heads % share:
        fields.fail(key, f"given {show(share)}; expected a divisor of {heads} heads")
    return replace(base, num_key_value_heads=heads // share)


def layer_spec(fields: Fields, kind: str, shape: Shape, windows: Mapping[str, int]) -> LayerSpec:
    """One layer of a given kind; "full+" and "sliding+" also carry a recurrent state."""
    attends = kind in ("full", "sliding", "chunked")
    if kind == "none" or (attends and shape.num_key_value_heads == 0):
        return LayerSpec("none")
    state = _state(fields) if kind == "recurrent" or kind.endswith("+") else ()
    if kind == "recurrent":
        return LayerSpec("recurrent", state=state)
    kind = kind.rstrip("+")
    window = windows.get(kind)
    kv_heads, key_dim = shape.num_key_value_heads, shape.head_dim
    if shape.kv_lora_rank is not None:
        kv_heads = shape.num_attention_heads or 0
        key_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    pooled = (fields.count("index_kpool") or 1) > 1  # one key for several tokens
    index = 0 if pooled or not fields.count("index_topk") else fields.count("index_head_dim") or 0
    layer = LayerSpec(kind, kv_heads, key_dim, shape.v_head_dim, window, state=state)
    if shape.kv_lora_rank is None:
        return replace(layer, index_dim=index)
    width = shape.kv_lora_rank + shape.qk_rope_head_dim
    return LayerSpec("latent", 1, width, 0, window, state=state, expanded=layer, index_dim=index)


# --- recurrent state: fixed per sequence, whatever the context -----------------------------------
#
# Every family keeps a short convolution window (the last K - 1 inputs, in the model's dtype) and a
# running summary (mostly float32). Engines differ in both dtypes and in K against K - 1; the sizes
# here are K - 1 inputs in 2 bytes and the summary in 4, and a note says so. Sources: the cache
# shapes in transformers' modelling files, and vLLM's mamba state shapes.


def _state(fields: Fields) -> tuple[StateSpec, ...]:
    """State of one recurrent layer. Unknown (elements None) where no key tells its size."""
    of_key = model_types()["facts"]["recurrence_of_key"]
    telling = (of_key[key] for key in of_key if fields.data.get(key) is not None)
    recurrence = fields.fact("recurrence") or next(telling, None)
    hidden = fields.count("hidden_size")
    if recurrence is None or hidden is None:
        fields.note("the recurrent layers' fixed state is not counted: no key tells its size")
        return (StateSpec("recurrent state", None, None),)
    width, named = _state_width(fields)
    kept = f"convolution windows of K - 1 inputs in 2 bytes, summaries in {named}"
    fields.note(f"fixed state: {kept}")
    inputs, summary = RECURRENCES[recurrence](fields, hidden)
    name = "shifted inputs" if recurrence == "rwkv" else "convolution window"
    sizes = (StateSpec(name, inputs, 2), StateSpec("recurrent state", summary, width))
    return tuple(size for size in sizes if size.num_elements is not None)


def _state_width(fields: Fields) -> tuple[int, str]:
    """Bytes of one number of the summary: float32, unless mamba_ssm_dtype names another."""
    key = "mamba_ssm_dtype"
    stated = fields.data.get(key) or fields.data.get("mamba_ssm_cache_dtype")
    name = "float32" if stated in (None, "auto") else str(stated).removeprefix("torch.")
    widths = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
    fields.check(key, stated, name in widths, "float32, bfloat16 or float16")
    return widths[name], name


# Each of these gives (elements of the window, elements of the summary), None where it keeps none.
Sizes = tuple[int | None, int | None]


def _mamba1(f: Fields, hidden: int) -> Sizes:
    """Jamba, Zamba, Mamba, Falcon-Mamba: one d_state vector for each inner channel."""
    state = f.needed("mamba_d_state", "state_size", why="the Mamba state")
    kernel = f.needed("mamba_d_conv", "conv_kernel", why="the Mamba convolution")
    inner = (f.default_count("mamba_expand", "expand") or 2) * hidden
    if f.model_type in ("mamba", "falcon_mamba"):  # there the MLP's width is the inner width
        inner = f.count("intermediate_size") or inner
    return (kernel - 1) * inner, inner * state


def _mamba2(f: Fields, hidden: int) -> Sizes:
    """Mamba-2 (SSD): heads of d_head channels, each with a d_state x d_head matrix."""
    why = "the Mamba-2 state"
    state = f.needed("ssm_state_size", "mamba_d_state", "state_size", why=why)
    kernel = f.needed("mamba_d_conv", "conv_kernel", why=why)
    heads = f.needed("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", why=why)
    expand = f.default_count("mamba_expand", "expand") or 2
    inner = f.default_count("mamba_d_ssm") or expand * hidden
    head = f.count("head_dim") if f.model_type == "mamba2" else None
    head = head or f.default_count("mamba_head_dim")
    if head is None and f.data.get("mamba_d_head") != "auto":
        head = f.as_count("mamba_d_head", f.data.get("mamba_d_head"))
    if head is None:
        f.check("mamba_n_heads", heads, inner % heads == 0, f"a divisor of the inner width {inner}")
        head = inner // heads
    groups = f.default_count("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    return (kernel - 1) * (heads * head + 2 * groups * state), heads * head * state


def _delta(f: Fields, hidden: int) -> Sizes:
    """Gated DeltaNet (Qwen3-Next, OLMo hybrid): a d_k x d_v matrix for each value head."""
    why = "the linear attention state"
    if f.model_type == "olmo_hybrid":  # there the widths follow from the attention heads
        heads = f.needed("num_attention_heads", why=why)
        key_heads = f.count("linear_num_key_heads") or heads
        value_heads = f.count("linear_num_value_heads") or heads
        key_dim = f.count("linear_key_head_dim") or int(0.75 * hidden / key_heads)
        value_dim = f.count("linear_value_head_dim") or 2 * key_dim
    else:
        dims = ("linear_key_head_dim", "linear_value_head_dim")
        key_dim, value_dim = (f.needed(key, why=why) for key in dims)
        counts = ("linear_num_key_heads", "linear_num_value_heads")
        key_heads, value_heads = (f.needed(key, why=why) for key in counts)
    kernel = f.default_count("linear_conv_kernel_dim") or 4
    window = (kernel - 1) * (2 * key_dim * key_heads + value_dim * value_heads)
    return window, value_heads * key_dim * value_dim


def _kimi_delta(f: Fields, hidden: int) -> Sizes:
    """Kimi Delta Attention: q, k and v convolutions, one d x d matrix a head."""
    why, block = "the linear attention state", f.block("linear_attn_config")
    heads, head, kernel = (
        f.as_count(f"linear_attn_config.{key}", block.get(key))
        for key in ("num_heads", "head_dim", "short_conv_kernel_size")
    )
    heads = heads or f.needed("linear_num_heads", "num_attention_heads", why=why)
    head = head or f.needed("linear_head_dim", "head_dim", why=why)
    kernel = kernel or f.default_count("linear_conv_kernel_dim") or 4
    return (kernel - 1) * 3 * heads * head, heads * head * head


def _lightning(f: Fields, hidden: int) -> Sizes:
    """MiniMax lightning attention: one d x d matrix a head, no convolution."""
    heads = f.needed("num_attention_heads", why="the linear attention state")
    head = f.count("head_dim") or hidden // heads
    return None, heads * head * head


def _rg_lru(f: Fields, hidden: int) -> Sizes:
    """Griffin's recurrent block: one float per channel."""
    width = f.count("lru_width") or hidden
    return ((f.default_count("conv1d_width") or 4) - 1) * width, width


def _short_conv(f: Fields, hidden: int) -> Sizes:
    """LFM2: a gated short convolution and nothing else."""
    return (f.needed("conv_L_cache", why="the convolution window") - 1) * hidden, None


def _rwkv(f: Fields, hidden: int) -> Sizes:
    """RWKV-4: two shifted inputs, and numerator, denominator and maximum of the running sum."""
    return 2 * hidden, 3 * (f.count("attention_hidden_size") or hidden)


#: The names that data/model_types.json gives them, by model type and by telling key.
RECURRENCES: dict[str, Callable[[Fields, int], Sizes]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "delta": _delta,
    "kimi_delta": _kimi_delta,
    "lightning": _lightning,
    "rg_lru": _rg_lru,
    "short_conv": _short_conv,
    "rwkv": _rwkv,
}
