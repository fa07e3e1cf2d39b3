"""How many KV heads, how wide K and V: from a config's fields to one LayerSpec a layer."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.configs.fields import Fields, show
from kvlab.configs.states import layer_state
from kvlab.specs import LayerSpec


@dataclass(frozen=True)
class Widths:
    """The attention shape of one layer. kv_heads 0: the layer has no attention of its own."""

    heads: int | None
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: tuple[int, int, int, int] | None = None  # kv_lora_rank, rope, nope, value


def base_widths(fields: Fields, hidden: int | None, no_attention: bool = False) -> Widths:
    """The shape that layers share unless they say otherwise."""
    if no_attention:
        return Widths(None, 0, 0, 0)
    heads = _query_heads(fields)
    latent = _latent(fields)
    if latent is not None:
        if heads is None:
            heads = fields.needed("num_attention_heads", "the number of query heads")
        kv_heads = fields.count("num_key_value_heads") or heads
        return Widths(heads, kv_heads, latent[1], latent[1], latent)
    head_dim = _head_dim(fields, hidden, heads)
    kv_heads = _kv_heads(fields, heads)
    value_dim = fields.count("v_head_dim", 0)
    if value_dim is None and "kv_lora_rank" not in fields.defaults:  # else it is a latent's width
        value_dim = fields.defaults.get("v_head_dim")
    return Widths(heads, kv_heads, head_dim, value_dim or head_dim)


def _query_heads(fields: Fields) -> int | None:
    """Query heads; a list has one entry a layer (OpenELM), and the most of them stands for all."""
    stated = fields.raw("num_attention_heads")
    if not isinstance(stated, list | tuple):
        return fields.default_count("num_attention_heads")
    counts = [n for n in stated if fields.check_count("num_attention_heads", n)]
    if not counts or len(counts) != len(stated):
        raise fields.fail("num_attention_heads", f"given {show(stated)}; expected counts")
    fields.note(f"query heads differ from layer to layer; {max(counts)}, the most, stands for all")
    return max(counts)


def _latent(fields: Fields) -> tuple[int, int, int, int] | None:
    """(kv_lora_rank, qk_rope, qk_nope, value width) of an MLA model, else None."""
    if fields.flag("use_mla") is False:
        return None
    if "kv_lora_rank" in fields.data and fields.data["kv_lora_rank"] is None:
        return None
    rank = fields.default_count("kv_lora_rank")
    if rank is None:
        return None
    why = "a part of the latent (MLA) row"
    rope = fields.needed("qk_rope_head_dim", why, least=0)
    nope = fields.needed("qk_nope_head_dim", why, least=0)
    if fields.model_type == "minicpm3" and fields.count("v_head_dim") is None:
        hidden = fields.needed("hidden_size", why)
        return rank, rope, nope, hidden // fields.needed("num_attention_heads", why)
    return rank, rope, nope, fields.needed("v_head_dim", "the width of V in an MLA layer")


def _head_dim(fields: Fields, hidden: int | None, heads: int | None) -> int:
    """head_dim if declared, else the model type's own, else hidden_size / num_attention_heads."""
    derived = fields.model_type in ("cohere2", "zamba2", "recurrent_gemma", "falcon")
    declared = None if derived else fields.default_count("head_dim")
    if declared is not None:
        return declared
    if hidden is None or heads is None:
        hidden = fields.needed("hidden_size", "since head_dim is not given")
        heads = fields.needed("num_attention_heads", "since head_dim is not given")
    if fields.model_type in ("zamba", "zamba2"):
        hidden *= 2  # its attention reads the hidden state and the embedding side by side
    if hidden % heads:
        raise fields.fail(
            "head_dim",
            f"missing, and hidden_size {hidden} is not divisible by num_attention_heads {heads}; "
            f"expected head_dim, or two numbers that divide; add head_dim",
        )
    if not derived:
        fields.note(
            f"head_dim is not in the file; hidden_size / num_attention_heads is {hidden // heads}"
        )
    return hidden // heads


def stated_kv_heads(fields: Fields) -> object:
    """The KV heads as the file gives them: one number, or a list with one entry a layer."""
    listed = fields.items("num_key_value_heads_per_layer")
    return fields.raw("num_key_value_heads") if listed is None else listed


def _kv_heads(fields: Fields, heads: int | None) -> int:
    """KV heads, with the multi-query switches of older families."""
    stated = stated_kv_heads(fields)
    if isinstance(stated, list | tuple):  # one entry a layer: see per_layer_widths
        counts = [n for n in stated if fields.check_count("num_key_value_heads", n)]
        if not counts or len(counts) != len(stated):
            raise fields.fail("num_key_value_heads", f"given {show(stated)}; expected counts")
        return max(counts)
    attention_type = fields.block("attn_config").get("attn_type")
    multi_query = fields.flag("multi_query")
    if multi_query is None:
        multi_query = fields.flag("multi_query_attention")
        if multi_query is False and heads is not None:
            return heads
        multi_query = (multi_query and stated is None) or None
    if multi_query is None and fields.model_type in ("falcon", "gpt_bigcode"):
        multi_query = True
        fields.note(f"multi_query is not in the file; {fields.model_type} means true by that")
    if fields.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if fields.flag("new_decoder_architecture") or fields.model_type == "RefinedWeb":
            multi_query = None
        elif multi_query:
            if stated not in (None, 1):
                fields.note(
                    f"multi_query: one KV head, whatever num_kv_heads ({show(stated)}) says"
                )
            return 1
        else:
            return _all_heads(fields, heads, "multi_query is false")
    old_switch = fields.raw("attention_head_type") == "multiquery"  # SantaCoder's first form
    if multi_query or old_switch or attention_type == "multiquery_attention":
        if stated not in (None, 1):
            raise fields.fail(
                "num_key_value_heads",
                f"given {show(stated)}, but multi_query is true; expected 1; correct one of them",
            )
        return 1
    if fields.model_type == "gpt_bigcode" and multi_query is False:
        return _all_heads(fields, heads, "multi_query is false")
    kv_heads = fields.default_count("num_key_value_heads")
    if kv_heads is None and heads and fields.raw("block_configs"):
        return heads  # for blocks that say nothing else: see per_layer_widths
    if kv_heads is None:
        return _all_heads(fields, heads, "no num_key_value_heads")
    if heads is not None and heads % kv_heads:
        raise fields.fail(
            "num_key_value_heads",
            f"given {kv_heads}, which does not divide num_attention_heads {heads}; expected a "
            f"divisor, so that each KV head serves the same number of query heads; correct one",
        )
    return kv_heads


def _all_heads(fields: Fields, heads: int | None, why: str) -> int:
    if heads is None:
        heads = fields.needed("num_attention_heads", f"since there is {why}")
    fields.note(f"{why}: every query head has its own K and V ({heads} KV heads)")
    return heads


def layer_spec(fields: Fields, kind: str, widths: Widths, window: int | None) -> LayerSpec:
    """One layer of a given kind; "full+" and "sliding+" also carry a recurrent state."""
    hidden = fields.count("hidden_size")
    if kind == "none" or (kind in ("full", "sliding", "chunked") and widths.kv_heads == 0):
        return LayerSpec("none")
    if kind == "recurrent":
        return LayerSpec("recurrent", state=layer_state(fields, hidden))
    state = layer_state(fields, hidden) if kind.endswith("+") else ()
    kind = kind.rstrip("+")
    window = window if kind in ("sliding", "chunked") else None
    if widths.latent is None:
        return LayerSpec(
            kind, widths.kv_heads, widths.head_dim, widths.value_dim, window, state=state
        )
    rank, rope, nope, value = widths.latent
    expanded = LayerSpec(kind, widths.heads or 0, nope + rope, value, window, state=state)
    return LayerSpec("latent", 1, rank + rope, 0, window, state=state, expanded=expanded)
