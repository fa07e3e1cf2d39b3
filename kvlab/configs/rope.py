"""Rotary settings of a config.json -> RopeSpec, wherever the file keeps them.

They have moved over the years: rope_theta at the top; rope_scaling beside it; both inside
rope_parameters; one rope_parameters for each kind of layer. A base that stands twice with two
values is an error; a base that stands nowhere is the model type's own, or 10,000, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.configs.fields import Fields, show, words
from kvlab.specs import RopeSpec

#: Model types that rotate nothing: learned or absolute positions, ALiBi, or no positions at all.
UNROTATED = frozenset(
    words(
        "gpt2 gpt-sw3 openai-gpt opt bloom mpt gpt_bigcode gpt_neo xglm biogpt ctrl "
        "cpmant jamba zamba mamba mamba2 falcon_mamba rwkv xlstm nemotron_h trocr "
        "blip_text_model"
    )
)
#: Share of each head that is rotated where the file does not say (transformers 5.24).
PARTIAL = {
    **dict.fromkeys(
        words("phi nemotron persimmon chatglm glm glm4 glm4_moe bamba recurrent_gemma"), 0.5
    ),
    **dict.fromkeys(
        words("qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text gpt_neox stablelm"), 0.25
    ),
}
LAYER_NAMES = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding", "main")
OLD_NAMES = {"su": "longrope", "mrope": "default", "none": "default"}
KNOWN_RULES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
#: Rules that need the model's length limits beside their own settings.
NEED_LENGTHS = ("dynamic", "yarn", "longrope")


def rope_specs(
    fields: Fields, head_dim: int, rope_dim: int | None, first_sliding: int | None
) -> tuple[RopeSpec, RopeSpec | None]:
    """(of most layers, of the sliding layers where it differs).

    rope_dim       rotated width if the architecture fixes it (MLA), else None
    first_sliding  index of the first sliding layer, for bases that are listed layer by layer
    """
    placed = fields.data.get("position_embedding_type")
    if fields.model_type in UNROTATED or fields.flag("alibi") or placed in ("alibi", "nope"):
        return RopeSpec(rotary_dim=0, rope_type="none"), None
    new, old = fields.block("rope_parameters"), fields.block("rope_scaling")
    nested = {name: new[name] for name in LAYER_NAMES if isinstance(new.get(name), Mapping)}
    if nested:
        main = nested.get("full_attention") or nested.get("hybrid") or nested.get("main") or {}
        local = nested.get("sliding_attention") or nested.get("hybrid_sliding")
    else:
        main = {k: v for k, v in new.items() if k not in LAYER_NAMES}
        local = None
    for key in old.keys() & main.keys():
        _one_of(fields, key, old[key], main[key], "in rope_scaling")
    main = {**old, **{k: v for k, v in main.items() if v is not None}}
    top, top_local = _top_theta(fields, first_sliding)
    share = "partial_rotary_factor"
    _one_of(fields, share, fields.data.get(share), main.get(share))
    theta = _one_of(fields, "rope_theta", top, _inner_theta(fields, main))
    if theta is None:
        theta = float(fields.defaults.get("rope_theta", 10_000))
        fields.note(f"rope_theta is not in the file; {theta:,.0f} is assumed")
    rope = _one(fields, main, theta, head_dim, rope_dim)
    local_theta = _one_of(fields, "rope_local_base_freq", top_local, _inner_theta(fields, local))
    if (
        local_theta is None
        and first_sliding is not None
        and "rope_local_base_freq" in fields.defaults
    ):
        local_theta = float(fields.defaults["rope_local_base_freq"])
        fields.note(f"rope_local_base_freq is not in the file; {local_theta:,.0f} is assumed")
    if local_theta is None:
        return rope, None
    return rope, _one(fields, local or {}, local_theta, head_dim, rope_dim)


def _one_of(fields: Fields, key: str, first: Any, second: Any, where: str = "at the top") -> Any:
    """A setting that may stand in two places, if they agree; None where it stands in neither."""
    if first is not None and second is not None and first != second:
        one, other = (f"{x:g}" if isinstance(x, float) else show(x) for x in (first, second))
        raise fields.fail(
            key,
            f"given {one} {where} and {other} in rope_parameters; expected one value; remove "
            f"the wrong one",
        )
    return second if first is None else first


def _top_theta(fields: Fields, first_sliding: int | None) -> tuple[float | None, float | None]:
    """Bases named outside rope_parameters: (most layers, sliding layers)."""
    found: dict[str, float | None] = {}
    for key in ("rope_theta", "rotary_emb_base", "global_rope_theta"):
        value = fields.data.get(key)
        if isinstance(value, list | tuple) and value:  # one base a layer
            local = (
                value[first_sliding]
                if first_sliding is not None and first_sliding < len(value)
                else None
            )
            main = next((v for v in value if v != local), value[0])
            return fields.number(key, main), fields.number(key, local)
        if value is not None:
            found[key] = fields.number(key, value)
    ratio = fields.number("rope_ratio", fields.data.get("rope_ratio"))
    if ratio is not None:  # ChatGLM states the base as a multiple of 10,000
        found["rope_ratio"] = 10_000 * ratio
    attention = fields.block("attn_config").get("rope_theta")
    if attention is not None and not found:
        found["attn_config.rope_theta"] = fields.number("attn_config.rope_theta", attention)
    if len(set(found.values())) > 1:
        raise fields.fail(next(iter(found)), f"the rotary base is given twice: {found}; keep one")
    local = None
    for key in ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta"):
        local = local or fields.number(key, fields.data.get(key))
    return next(iter(found.values()), None), local


def _inner_theta(fields: Fields, block: Mapping | None) -> float | None:
    if not block:
        return None
    return fields.number("rope_parameters.rope_theta", block.get("rope_theta"))


def _one(
    fields: Fields, block: Mapping, theta: float, head_dim: int, rope_dim: int | None
) -> RopeSpec:
    kinds = {block[k] for k in ("rope_type", "type") if isinstance(block.get(k), str)}
    bad = [
        block[k]
        for k in ("rope_type", "type")
        if block.get(k) is not None and not isinstance(block[k], str)
    ]
    if bad or len({OLD_NAMES.get(k, k) for k in kinds}) > 1:
        raise fields.fail(
            "rope_type", f"given {show(bad[0] if bad else sorted(kinds))}; expected one rule's name"
        )
    rule = OLD_NAMES.get(min(kinds), min(kinds)) if kinds else "default"
    if rule not in KNOWN_RULES:
        fields.note(f"rope_type {rule!r} is not one that kvlab can rotate with")
    params = {
        k: _setting(fields, k, v)
        for k, v in block.items()
        if k not in ("rope_type", "type", "rope_theta") and v is not None and isinstance(k, str)
    }
    share = params.get("partial_rotary_factor")
    if rule != "proportional":
        params.pop("partial_rotary_factor", None)
    rotary_dim = _rotary_dim(fields, share, head_dim, rope_dim, rule)
    if rule in NEED_LENGTHS:
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            value = fields.count(key)
            if value is not None:
                params.setdefault(key, value)
    return RopeSpec(theta, rotary_dim, rule, tuple(sorted(params.items())))


def _setting(fields: Fields, key: str, value: object) -> object:
    """A scaling rule's own setting: a number, a switch, a name, or a flat list of numbers."""
    if isinstance(value, list | tuple):
        return tuple(
            _setting(fields, key, v)
            if not isinstance(v, list | tuple | dict)
            else _refuse(fields, key, value)
            for v in value
        )
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and abs(value) < 1e30:
        return value
    return _refuse(fields, key, value)


def _refuse(fields: Fields, key: str, value: object) -> object:
    raise fields.fail(
        f"rope_parameters.{key}", f"given {show(value)}; expected a number or a list of numbers"
    )


def _rotary_dim(
    fields: Fields, share: object, head_dim: int, rope_dim: int | None, rule: str
) -> int:
    if rope_dim is not None:
        return rope_dim
    stated = fields.count("rotary_dim", 0)
    if stated is not None and share is None:
        if stated > head_dim:
            raise fields.fail("rotary_dim", f"given {stated}; expected at most head_dim {head_dim}")
        return stated
    if share is None:
        for key in ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent"):
            if fields.data.get(key) is not None:
                share = fields.number(key, fields.data[key])
                break
        else:
            share = PARTIAL.get(fields.model_type, 1.0)
            if share != 1.0:
                fields.note(f"partial_rotary_factor is not in the file; {share} is assumed")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise fields.fail(
            "partial_rotary_factor", f"given {show(share)}; expected a share in (0, 1]"
        )
    if rule == "proportional":
        return head_dim
    # The small allowance keeps 0.1 * 80 from becoming 7.999... and losing a pair.
    return 2 * int((head_dim * share + 1e-6) // 2)
