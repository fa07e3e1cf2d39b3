"""Rotary settings of a config.json -> RopeSpec, wherever the file keeps them.

They have moved over the years: rope_theta at the top; rope_scaling beside it; both inside
rope_parameters; one rope_parameters for each kind of layer. A base that stands twice with two
values is an error; a base that stands nowhere is the model type's own, or 10,000, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.configs.fields import Fields, show
from kvlab.specs import RopeSpec

LAYER_NAMES = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding", "main")
OLD_NAMES = {"su": "longrope", "mrope": "default", "none": "default"}
KNOWN_RULES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
#: Rules that need the model's length limits beside their own settings.
NEED_LENGTHS = ("dynamic", "yarn", "longrope")
SHARE = "partial_rotary_factor"


def rope_specs(
    fields: Fields, widths: tuple[int, int], rope_dim: int | None, first_sliding: int | None
) -> tuple[RopeSpec, RopeSpec | None]:
    """(of most layers, of the sliding layers where it differs).

    widths         head_dim of most layers, and of the sliding ones
    rope_dim       rotated width if the architecture fixes it (MLA), else None
    first_sliding  index of the first sliding layer, for bases that are listed layer by layer
    """
    placed = fields.data.get("position_embedding_type")
    unrotated = fields.fact("unrotated") or placed in ("alibi", "nope")
    if unrotated or fields.flag("alibi"):
        return RopeSpec(rotary_dim=0, rope_type="none"), None
    new, old = fields.block("rope_parameters"), fields.block("rope_scaling")
    nested = {name: new[name] for name in LAYER_NAMES if isinstance(new.get(name), Mapping)}
    main = {k: v for k, v in new.items() if k not in LAYER_NAMES and v is not None}
    local: Mapping = {}
    if nested:
        main = nested.get("full_attention") or nested.get("hybrid") or nested.get("main") or {}
        local = nested.get("sliding_attention") or nested.get("hybrid_sliding") or {}
    for key in old.keys() & main.keys():
        _agreed(fields, key, old[key], main[key], "in rope_scaling")
    main = {**old, **{k: v for k, v in main.items() if v is not None}}
    bases, local_bases = _stated_bases(fields, first_sliding)
    _agreed(fields, SHARE, fields.data.get(SHARE), main.get(SHARE))
    theta = _base(fields, "rope_theta", bases, main)
    if theta is None:
        theta = float(fields.defaults.get("rope_theta", 10_000))
        fields.note(f"rope_theta is not in the file; {theta:,.0f} is assumed")
    rope = _one_rope(fields, main, theta, widths[0], rope_dim)
    key = "rope_local_base_freq"
    local_theta = _base(fields, key, local_bases, local)
    if local_theta is None and first_sliding is not None and key in fields.defaults:
        local_theta = float(fields.defaults[key])
        fields.note(f"{key} is not in the file; {local_theta:,.0f} is assumed")
    if local_theta is None:
        return rope, None
    return rope, _one_rope(fields, local, local_theta, widths[1], rope_dim)


def _agreed(fields: Fields, key: str, first: Any, second: Any, where: str = "at the top") -> Any:
    """A setting that may stand in two places, if they agree; None where it stands in neither."""
    if first is not None and second is not None and first != second:
        one, other = (f"{x:g}" if isinstance(x, float) else show(x) for x in (first, second))
        clash = f"given {one} {where} and {other} in rope_parameters"
        fields.fail(key, f"{clash}; expected one value; remove the wrong one")
    return second if first is None else first


def _base(fields: Fields, key: str, stated: float | None, block: Mapping) -> float | None:
    inner = fields.as_number("rope_parameters.rope_theta", block.get("rope_theta"))
    return _agreed(fields, key, stated, inner)


def _stated_bases(fields: Fields, first_sliding: int | None) -> tuple[float | None, float | None]:
    """Bases named outside rope_parameters: (most layers, sliding layers)."""
    found: dict[str, float | None] = {}
    for key in ("rope_theta", "rotary_emb_base", "global_rope_theta"):
        value = fields.data.get(key)
        if isinstance(value, list | tuple) and value:  # one base a layer
            local = None
            if first_sliding is not None and first_sliding < len(value):
                local = value[first_sliding]
            main = next((v for v in value if v != local), value[0])
            return fields.as_number(key, main), fields.as_number(key, local)
        if value is not None:
            found[key] = fields.as_number(key, value)
    ratio = fields.as_number("rope_ratio", fields.data.get("rope_ratio"))
    if ratio is not None:  # ChatGLM states the base as a multiple of 10,000
        found["rope_ratio"] = 10_000 * ratio
    inner = fields.block("attn_config").get("rope_theta")
    if inner is not None and not found:
        found["rope_theta"] = fields.as_number("attn_config.rope_theta", inner)
    if len(set(found.values())) > 1:
        fields.fail(next(iter(found)), f"the rotary base is given twice: {found}; keep one")
    local = None
    for key in ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta"):
        local = local or fields.as_number(key, fields.data.get(key))
    return next(iter(found.values()), None), local


def _one_rope(
    fields: Fields, block: Mapping, theta: float, head_dim: int, rope_dim: int | None
) -> RopeSpec:
    """The rotation that one block of settings describes."""
    names = [block[k] for k in ("rope_type", "type") if block.get(k) is not None]
    for name in names:
        fields.check("rope_type", name, isinstance(name, str), "one rule's name")
    rule, *others = sorted({OLD_NAMES.get(name, name) for name in names}) or ["default"]
    fields.check("rope_type", sorted(names), not others, "one rule's name")
    if rule not in KNOWN_RULES:
        fields.note(f"rope_type {rule!r} is not one that kvlab can rotate with")
    known = ("rope_type", "type", "rope_theta")
    more = {k: v for k, v in block.items() if isinstance(k, str) and k not in known}
    params = {k: _setting(fields, k, v) for k, v in more.items() if v is not None}
    share = params.get(SHARE)
    if rule != "proportional":
        params.pop(SHARE, None)
    rotary_dim = _rotary_dim(fields, share, head_dim, rule) if rope_dim is None else rope_dim
    if rule in NEED_LENGTHS:
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            value = fields.count(key)
            if value is not None:
                params.setdefault(key, value)
    return RopeSpec(theta, rotary_dim, rule, tuple(sorted(params.items())))


def _setting(fields: Fields, key: str, value: Any) -> object:
    """A scaling rule's own setting: a number, a switch, a name, or a flat list of numbers."""
    listed = isinstance(value, list | tuple)
    for one in value if listed else (value,):
        number = isinstance(one, int | float) and abs(one) < 1e30
        known = number or isinstance(one, bool | str)
        fields.check(f"rope_parameters.{key}", value, known, "a number or a list of numbers")
    return tuple(value) if listed else value


def _rotary_dim(fields: Fields, share: Any, head_dim: int, rule: str) -> int:
    stated = fields.count("rotary_dim", 0)
    if stated is not None and share is None:
        fields.check("rotary_dim", stated, stated <= head_dim, f"at most head_dim {head_dim}")
        return stated
    for key in (SHARE, "rotary_pct", "rope_pct", "rope_percent"):
        if share is None:
            share = fields.as_number(key, fields.data.get(key))
    if share is None:
        share = fields.fact("rotated_share") or 1.0
        if share != 1.0:
            fields.note(f"{SHARE} is not in the file; {share} is assumed")
    real = isinstance(share, int | float) and not isinstance(share, bool)
    fields.check(SHARE, share, real and 0 < share <= 1, "a share in (0, 1]")
    if rule == "proportional":
        return head_dim
    # The small allowance keeps 0.1 * 80 from becoming 7.999... and losing a pair.
    return 2 * int((head_dim * share + 1e-6) // 2)
