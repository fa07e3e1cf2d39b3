"""A Hugging Face config.json -> ModelSpec. Facts in, shapes out; no costs here.

Standard library only: the same code reads a config that a reader pastes into the rendered page.
The work is shared out: config_files (JSON, wrappers), config_fields (single values),
layer_patterns (which layer attends how), layer_widths (heads and widths), layer_states
(recurrent state), rope_fields (rotary settings). This file puts the layers together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvlab.configs.fields import MOST_LAYERS, ConfigError, Fields, show
from kvlab.configs.files import language_model, load_config, model_types
from kvlab.configs.overrides import per_layer_widths
from kvlab.configs.patterns import layer_kinds
from kvlab.configs.rope import rope_specs
from kvlab.configs.scope import refuse, refuse_unplaced
from kvlab.configs.widths import base_widths, layer_spec
from kvlab.specs import LayerSpec, ModelSpec


def read_config(source: Mapping | str | Path, name: str | None = None) -> ModelSpec:
    """Read a config.json (a dictionary, JSON text, a file or a folder) into a ModelSpec.

    Every layer is resolved to one LayerSpec; `notes` says what was decided on the way. What
    cannot be read is a ConfigError that names the field.
    """
    top, file_name = load_config(source)
    config, where = language_model(top)
    model_type = _model_type(config, where) or _inner_type(top, where)
    defaults = model_types()["defaults"].get(model_type, {})
    fields = Fields(config, model_type, defaults, where)
    refuse(fields, top)
    if model_type and not config.get("model_type"):
        fields.note(f"{where}model_type is not in the file; read as {model_type}, by the outer one")
    if model_type and model_type not in model_types()["known"]:
        fields.note(
            f"model_type {model_type!r} is not one compared here; read by its ordinary keys"
        )
    elif not model_type:
        fields.note("no model_type; read by its ordinary keys")

    num_layers = _num_layers(fields)
    hidden = fields.count("hidden_size")
    kinds = layer_kinds(fields, num_layers)
    refuse_unplaced(fields, kinds)
    kinds = _cross_attention(fields, kinds)
    base = base_widths(fields, hidden, no_attention=set(kinds) <= {"recurrent", "none"})
    widths = per_layer_widths(fields, base, kinds)
    window = _window(fields, kinds)
    chunk = _chunk(fields, kinds)
    layers = [
        layer_spec(fields, kind, width, chunk if kind == "chunked" else window)
        for kind, width in zip(kinds, widths, strict=True)
    ]
    layers = _shared(fields, layers)
    used = {width.kv_heads for width in widths}
    kv_heads = base.kv_heads if base.kv_heads in used else max(used)  # where no layer is the base's
    sliding = next((i for i, kind in enumerate(kinds) if kind.startswith("sliding")), None)
    rope, rope_local = rope_specs(
        fields, base.head_dim, base.latent[1] if base.latent else None, sliding
    )
    heads = base.heads if base.kv_heads else fields.count("num_attention_heads", 0)
    vocab = fields.count("vocab_size")
    mlp = _intermediate(fields, num_layers)
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    unknown = [key for key, value in sizes.items() if value is None]
    if unknown:
        fields.note(f"{', '.join(unknown)}: not in the file; costs that need them are not answered")
    dense = (
        model_type in ("llama", "mistral")
        and None not in (hidden, heads, vocab, mlp)
        and not any(fields.flag(key) for key in ("attention_bias", "mlp_bias"))
        and {layer.kind for layer in layers} <= {"full", "sliding"}
    )
    return ModelSpec(
        name=name or _name(top) or file_name or model_type or "unnamed",
        num_layers=num_layers,
        hidden_size=hidden,  # type: ignore[arg-type]  # None where the file is silent; noted
        num_heads=heads,  # type: ignore[arg-type]
        num_kv_heads=kv_heads,
        head_dim=base.head_dim,
        intermediate_size=mlp,
        vocab_size=vocab,  # type: ignore[arg-type]
        layers=tuple(layers),
        tie_word_embeddings=bool(_tied(fields, top)),
        rms_norm_eps=fields.number("rms_norm_eps", fields.raw("rms_norm_eps")) or 1e-5,
        max_position_embeddings=fields.count("max_position_embeddings"),
        rope=rope,
        rope_local=rope_local,
        model_type=model_type,
        is_dense_llama=dense,
        mtp_layers=_mtp(fields, layers),
        notes=tuple(fields.notes),
    )


def _model_type(config: Mapping, where: str) -> str | None:
    value = config.get("model_type")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}model_type", f"given {show(value)}; expected a name")
    return value


def _inner_type(top: Mapping, where: str) -> str:
    """The type of a text config that does not name its own: gemma3 at the top means gemma3_text."""
    implied = f"{top.get('model_type')}_text"
    return implied if where and implied in model_types()["known"] else ""


def _name(top: Mapping) -> str | None:
    for key in ("_name", "_name_or_path"):
        if isinstance(top.get(key), str) and top[key]:
            return top[key]
    return None


def _num_layers(fields: Fields) -> int:
    if fields.model_type == "longcat_flash":
        fields.note("longcat_flash: two attention layers in each of num_layers blocks")
        blocks = fields.check_count("num_layers", fields.data.get("num_layers"), 1, MOST_LAYERS)
        total = fields.count("num_hidden_layers", 1, MOST_LAYERS)
        if blocks is not None and total not in (None, blocks, 2 * blocks):
            raise fields.fail("num_layers", f"given {blocks}, but num_hidden_layers is {total}")
        if blocks is not None:
            return 2 * blocks
    listed = fields.raw("layer_types") or fields.raw("hybrid_override_pattern")
    count = fields.count("num_hidden_layers", 1, MOST_LAYERS)
    if count is None and isinstance(listed, list | tuple | str) and 0 < len(listed) <= MOST_LAYERS:
        fields.note("num_hidden_layers is not in the file; the layer list's length is taken")
        return len(listed)
    return fields.needed("num_hidden_layers", "the number of layers", 1, MOST_LAYERS)


def _window(fields: Fields, kinds: list[str]) -> int | None:
    if not any(kind.startswith("sliding") for kind in kinds):
        return None
    if fields.model_type == "modernbert-decoder" and fields.raw("sliding_window") is None:
        return fields.needed("local_attention", "the width of the sliding layers", 2) // 2
    if fields.model_type == "mimo_v2_flash":
        reach = fields.check_count("sliding_window_size", fields.data.get("sliding_window_size"))
        if reach is not None:
            fields.note(
                f"sliding_window_size {reach} leaves the current token out: {reach + 1} keys"
            )
            return reach + 1
    return fields.needed("sliding_window", "the width of the sliding layers")


def _chunk(fields: Fields, kinds: list[str]) -> int | None:
    if "chunked" not in kinds:
        return None
    fields.note(
        "chunked layers: an upper bound; when a finished chunk is freed is the engine's choice"
    )
    return fields.needed("attention_chunk_size", "the width of the chunked layers")


def _cross_attention(fields: Fields, kinds: list[str]) -> list[str]:
    """Layers that read only another modality keep nothing per text token (Llama 3.2 Vision)."""
    crossed = fields.items("cross_attention_layers")
    if not crossed:
        return kinds
    last = len(kinds) - 1
    indices = {fields.check_count("cross_attention_layers", i, 0, last) for i in crossed}
    fields.note(
        f"{len(indices)} cross-attention layers keep K and V of the image only; not counted"
    )
    return ["none" if i in indices else kind for i, kind in enumerate(kinds)]


def _shared(fields: Fields, layers: list[LayerSpec]) -> list[LayerSpec]:
    """The last num_kv_shared_layers read the K and V of an earlier layer of their kind."""
    shared = fields.count("num_kv_shared_layers", 0)
    if fields.flag("use_cla"):
        factor = fields.needed("cla_share_factor", "the layers that share one K and V")
        return [
            layer if i % factor == 0 else LayerSpec("shared", shares_layer=i - i % factor)
            for i, layer in enumerate(layers)
        ]
    if not shared:
        return layers
    first = len(layers) - shared
    if first < 1:
        raise fields.fail(
            "num_kv_shared_layers",
            f"given {shared}, but there are {len(layers)} layers; expected fewer, since some layer "
            f"must keep K and V",
        )
    result = layers[:first]
    for i in range(first, len(layers)):
        owner = next((j for j in reversed(range(first)) if layers[j].kind == layers[i].kind), None)
        if owner is None:
            raise fields.fail(
                "num_kv_shared_layers",
                f"given {shared}, but no earlier layer is {layers[i].kind} as layer {i} is",
            )
        result.append(LayerSpec("shared", shares_layer=owner))
    return result


def _mtp(fields: Fields, layers: list[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Multi-token prediction layers stand outside num_layers and are an explicit extra."""
    for key in (
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
    ):
        count = fields.count(key, 0, MOST_LAYERS)
        if count:
            like = next((x for x in reversed(layers) if x.kind in ("full", "latent")), None)
            like = like or next((x for x in reversed(layers) if x.num_kv_heads), None)
            if like is None:
                return ()
            fields.note(f"{count} MTP layers ({key}) stand outside the {len(layers)}; not counted")
            return (replace(like, state=()),) * count
    return ()


def _intermediate(fields: Fields, num_layers: int) -> int | None:
    value = fields.raw("intermediate_size")
    if isinstance(value, list | tuple):
        sizes = [fields.check_count("intermediate_size", size) for size in value]
        return max((size for size in sizes if size), default=None)
    size = fields.check_count("intermediate_size", value)
    if size is None and fields.model_type in ("gpt2", "gptj", "gpt_bigcode", "bloom", "falcon"):
        hidden = fields.count("hidden_size")
        return None if hidden is None else 4 * hidden
    return size


def _tied(fields: Fields, top: Mapping) -> bool | None:
    tied = fields.flag("tie_word_embeddings")
    if tied is None and isinstance(top.get("tie_word_embeddings"), bool):
        return top["tie_word_embeddings"]
    if tied is None and fields.model_type.startswith(("gemma", "gpt2", "falcon")):
        return True
    return tied
