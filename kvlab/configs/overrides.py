"""What a config says for single layers: other widths for windows, lists, overrides, blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvlab.configs.fields import Fields, show
from kvlab.configs.widths import Widths, stated_kv_heads

#: Keys that a per-layer override may change.
WIDTH_KEYS = ("num_key_value_heads", "head_dim", "v_head_dim", "num_attention_heads")


def per_layer_widths(fields: Fields, base: Widths, kinds: list[str]) -> list[Widths]:
    """The shape of each layer, after everything that a file says for single layers."""
    widths = [base] * len(kinds)
    for i, kind in enumerate(kinds):
        if kind.startswith("sliding"):
            widths[i] = _renamed(fields, base, "swa_{}")
            if fields.model_type == "mimo_v2_flash" and not fields.declared(
                "swa_num_key_value_heads"
            ):
                widths[i] = replace(base, kv_heads=2 * base.kv_heads)
                fields.note("mimo_v2_flash: sliding layers have twice the KV heads")
        elif kind.startswith("full") and "global_head_dim" in GLOBAL.get(fields.model_type, ()):
            widths[i] = _global(fields, base)
    queries, stated = fields.raw("num_attention_heads"), stated_kv_heads(fields)
    for key, counts in (("num_attention_heads", queries), ("num_key_value_heads", stated)):
        if isinstance(counts, list | tuple) and len(counts) != len(kinds):
            raise fields.fail(
                key, f"has {len(counts)} entries; expected {len(kinds)}, one a layer; correct one"
            )
    if isinstance(stated, list | tuple):
        for i, count in enumerate(stated):
            kv_heads = fields.check_count("num_key_value_heads", count) or 0
            heads = queries[i] if isinstance(queries, list | tuple) else widths[i].heads
            if heads and kv_heads and heads % kv_heads:
                raise fields.fail(
                    "num_key_value_heads",
                    f"layer {i} is given {kv_heads}; expected a divisor of its {heads} query heads",
                )
            widths[i] = replace(widths[i], heads=heads, kv_heads=kv_heads)
    _overrides(fields, widths)
    return _blocks(fields, base, widths)


GLOBAL = dict.fromkeys(
    ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"), ("global_head_dim",)
)


def _global(fields: Fields, base: Widths) -> Widths:
    """Gemma 4: wider heads, and fewer of them, where a layer attends in full."""
    if fields.data.get("per_layer_config") is not None:
        return base
    head_dim = fields.count("global_head_dim")
    if head_dim is None:
        head_dim = 512
        fields.note("global_head_dim is not in the file; gemma4 means 512 by that")
    kv_heads = base.kv_heads
    if fields.flag("attention_k_eq_v"):
        kv_heads = fields.count("num_global_key_value_heads") or kv_heads
    return replace(base, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim)


def _renamed(fields: Fields, base: Widths, pattern: str) -> Widths:
    """The base shape with the fields that have a name of their own for one kind of layer."""
    if base.latent is not None:
        return _sliding_latent(fields, base)
    kv_heads = fields.default_count(pattern.format("num_key_value_heads"))
    head_dim = fields.default_count(pattern.format("head_dim"))
    value = fields.count(pattern.format("v_head_dim"))
    return replace(
        base,
        heads=fields.count(pattern.format("num_attention_heads")) or base.heads,
        kv_heads=kv_heads or base.kv_heads,
        head_dim=head_dim or base.head_dim,
        value_dim=value
        or (head_dim if head_dim and base.value_dim == base.head_dim else base.value_dim),
    )


def _sliding_latent(fields: Fields, base: Widths) -> Widths:
    assert base.latent is not None
    names = ("swa_kv_lora_rank", "swa_qk_rope_head_dim", "swa_qk_nope_head_dim", "swa_v_head_dim")
    found = [fields.default_count(name) for name in names]
    pairs = zip(found, base.latent, strict=True)
    rank, rope, nope, value = (new or old for new, old in pairs)
    heads = fields.default_count("swa_num_attention_heads") or base.heads
    return replace(base, heads=heads, latent=(rank, rope, nope, value))


def _overrides(fields: Fields, widths: list[Widths]) -> None:
    """per_layer_config: {"5": {"head_dim": 512}}."""
    for index, changes in fields.block("per_layer_config").items():
        name = f"per_layer_config.{index}"
        i = int(index) if isinstance(index, str) and index.isdecimal() and len(index) < 7 else index
        fields.check_count(name, i, 0, len(widths) - 1)
        if not isinstance(changes, Mapping):
            raise fields.fail(name, f"given {show(changes)}; expected an object")
        found = {k: fields.check_count(f"{name}.{k}", changes.get(k)) for k in WIDTH_KEYS}
        old = widths[i]
        head_dim = found["head_dim"] or old.head_dim
        value = found["v_head_dim"] or (
            head_dim if old.value_dim == old.head_dim else old.value_dim
        )
        widths[i] = replace(
            old,
            heads=found["num_attention_heads"] or old.heads,
            kv_heads=found["num_key_value_heads"] or old.kv_heads,
            head_dim=head_dim,
            value_dim=value,
        )
        if old.latent is not None:
            keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            new = [fields.check_count(f"{name}.{k}", changes.get(k), 0) for k in keys]
            pairs = zip(new, old.latent, strict=True)
            rank, rope, nope, wide = (o if n is None else n for n, o in pairs)
            widths[i] = replace(widths[i], latent=(rank, rope, nope, wide))


def _blocks(fields: Fields, base: Widths, widths: list[Widths]) -> list[Widths]:
    """block_configs (Nemotron-NAS): each layer's own attention, or none at all."""
    blocks = fields.items("block_configs", len(widths))
    if blocks is None:
        return widths
    result = []
    for i, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise fields.fail(
                f"block_configs.{i}", f"given {show(block)}; expected an attention block"
            )
        if attention.get("no_op") is True or attention.get("replace_with_linear") is True:
            result.append(replace(base, kv_heads=0))
            continue
        if attention.get("window_length") is not None:
            raise fields.fail(
                f"block_configs.{i}.attention.window_length",
                f"given {show(attention['window_length'])}; expected null, since windows of single "
                f"blocks are not modelled",
            )
        name = f"block_configs.{i}.attention.n_heads_in_group"
        share = fields.check_count(name, attention.get("n_heads_in_group"))
        if share is None or base.heads is None or base.heads % share:
            raise fields.fail(
                name, f"given {show(share)}; expected a divisor of {base.heads} heads"
            )
        result.append(replace(base, kv_heads=base.heads // share))
    return result
