"""Which models the decoder of kvlab/model.py computes, and why another one is refused.

An allow-list: a config is run only if its model type is one of those here and every key of the
file is known, as one that is read, one with the value at which it changes nothing, or one that
never changes a decode step. Any other model can still be sized. The lists, with the class of
transformers that each type is held to, stand in data/model_types.json under "runnable".
"""

from __future__ import annotations

from typing import Any

from kvlab.configs.fields import Fields, model_types, show
from kvlab.specs import ModelSpec


def families() -> dict[str, dict[str, Any]]:
    """Model type -> what its decoder does otherwise than Llama, and the keys it reads."""
    return model_types()["runnable"]["types"]


def family_of(fields: Fields, num_layers: int) -> dict[str, Any]:
    """The fields of a ModelSpec in which a runnable family differs from Llama."""
    family = families().get(fields.model_type)
    if family is None:
        return {}
    biased = list(family.get("biased", ()))
    if "attention_bias" in family["keys"] and fields.flag("attention_bias"):
        biased += ["q_proj", "k_proj", "v_proj", "o_proj"]
    if "mlp_bias" in family["keys"] and fields.flag("mlp_bias"):
        biased += ["gate_proj", "up_proj", "down_proj"]
    unrotated: tuple[int, ...] = ()
    if "no_rope_layers" in family["keys"]:
        every = fields.count("no_rope_layer_interval") or 4
        rotates = fields.items("no_rope_layers", num_layers)
        rotates = rotates or [int((i + 1) % every != 0) for i in range(num_layers)]
        for flag in rotates:
            known = type(flag) is int and flag in (0, 1)
            fields.check("no_rope_layers", flag, known, "0 (no rotation) or 1 for each layer")
        unrotated = tuple(i for i, flag in enumerate(rotates) if not flag)
    return {
        "biased": tuple(biased),
        "unrotated_layers": unrotated,
        "qk_norm": family.get("qk_norm", False),
        "fused_projections": family.get("fused_projections", False),
    }


def why_not(fields: Fields, spec: ModelSpec) -> str:
    """Why the decoder cannot run this model, in a sentence; empty if it can."""
    known, model_type = model_types()["runnable"], fields.model_type
    family, data = families().get(model_type), fields.data
    if family is None or fields.where or data.get("model_type") != model_type:
        place = f" in {fields.where[:-1]}" if fields.where else ""
        listed = ", ".join(families())
        return f"model_type is {model_type!r}{place}; expected at the top one of {listed}"
    if not spec.is_dense_llama:
        return "its sizes or its layers are not all those of a dense decoder"
    stated, named = data.get("architectures"), [family["architecture"]]
    if stated not in (None, []) and str(stated).lower() != str(named).lower():
        return f"architectures is {show(stated)}; expected {named}"
    for key, value in data.items():
        allowed = (known["read"], family["keys"], known["harmless"])
        if value is None or str(key).startswith("_") or any(key in keys for keys in allowed):
            continue
        neutral = known["neutral"].get(key)
        if neutral is None:
            return (
                f"{key} is {show(value)}, and it is not known here whether that changes what "
                f"{model_type} computes; remove it from config.json if it does not"
            )
        if not any(type(value) is type(other) and value == other for other in neutral):
            return f"{key} is {show(value)}; expected {show(neutral[0])}: no other is computed here"
    windowed = any(layer.window is not None for layer in spec.layers)
    if windowed and "use_sliding_window" in family["keys"] and not data.get("use_sliding_window"):
        return "layers slide, but use_sliding_window is not in the file; expected true: add it"
    if model_type == "mistral" and "sliding_window" not in data:
        return "sliding_window is not in the file: 4096 to some readers, none to others; add it"
    return _why_not_rotated(spec, family)


def _why_not_rotated(spec: ModelSpec, family: dict[str, Any]) -> str:
    rope, rules = spec.rope, model_types()["runnable"]["rope_settings"]
    expected = family.get("rope_types", list(rules))
    if spec.rope_local is not None or rope.rope_type not in expected:
        return f"rope_type is {rope.rope_type!r}; expected one of {', '.join(expected)}"
    unknown = sorted(dict(rope.params).keys() - rules[rope.rope_type])
    if unknown:
        return f"{unknown[0]} is no setting of the rotation {rope.rope_type!r} here; remove it"
    if rope.rotary_dim != spec.head_dim and "partial_rotary_factor" not in family["keys"]:
        return f"{rope.rotary_dim} of {spec.head_dim} dimensions rotate; expected all of them"
    return ""
