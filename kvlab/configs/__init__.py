"""Any config.json -> ModelSpec, and the models and cards of data/ by name.

read_config(source)      a config.json: a dictionary, JSON text, a file or a folder
preset("llama-3-8b")     a model of data/models
find_model(text)         a preset, a Hugging Face id, a file or a folder
hardware("h100-sxm")     a card of data/hardware

Facts in, shapes out; no costs here. Standard library only: the same code reads a config that is
pasted into a page. In the order in which a config passes through: fields (JSON, wrappers, single
values), layers (which layer attends how), shapes (heads, widths, recurrent state), rope; what a
model type means by saying nothing stands in data/model_types.json.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvlab.configs.families import families, family_of, why_not
from kvlab.configs.fields import MOST_LAYERS, ConfigError, Fields, load_config, model_types, show
from kvlab.configs.layers import count_layers, layer_kinds, windows
from kvlab.configs.rope import rope_specs
from kvlab.configs.shapes import layer_shapes, layer_spec, shared_shape
from kvlab.specs import DATA_DIR, HardwareSpec, LayerSpec, ModelSpec

__all__ = ["ConfigError", "families", "find_model", "hardware", "hardware_names", "model_index",
           "model_names", "preset", "preset_named", "read_config"]  # fmt: skip

#: How the note on draft layers ends while they are left out of every sum.
NOT_COUNTED = "not counted"


def read_config(source: Mapping | str | Path, name: str | None = None) -> ModelSpec:
    """Read a config.json (a dictionary, JSON text, a file or a folder) into a ModelSpec.

    Every layer is resolved to one LayerSpec; `notes` says what was decided on the way. What
    cannot be read is a ConfigError that names the field.
    """
    top, file_name = load_config(source)
    fields = Fields(top)
    model_type = fields.model_type
    _refuse(fields)
    if not model_type:
        fields.note("no model_type; read by its ordinary keys")
    elif not fields.data.get("model_type"):
        fields.note(
            f"{fields.where}model_type is not in the file; read as {model_type}, by the outer one"
        )
    elif model_type not in model_types()["known"]:
        fields.note(
            f"model_type {model_type!r} is not one compared here; read by its ordinary keys"
        )

    _note_cache_dtype(fields)
    num_layers = count_layers(fields)
    hidden = fields.count("hidden_size")
    kinds = layer_kinds(fields, num_layers)
    base = shared_shape(fields, hidden, kinds)
    shapes = layer_shapes(fields, base, kinds)
    reach = windows(fields, kinds)
    layers = [layer_spec(fields, kind, shape, reach) for kind, shape in zip(kinds, shapes)]
    layers = _compressed(_shared(fields, layers), fields)
    used = {shape.num_key_value_heads for shape in shapes}
    sliding = next((i for i, kind in enumerate(kinds) if kind.startswith("sliding")), None)
    rope_dim = None if base.kv_lora_rank is None else base.qk_rope_head_dim
    full = next((i for i, kind in enumerate(kinds) if kind.startswith("full")), 0)
    widths = (shapes[full].head_dim or base.head_dim, shapes[sliding or 0].head_dim)
    rope, rope_local = rope_specs(fields, widths, rope_dim, sliding)
    attends = base.num_key_value_heads > 0
    heads = base.num_attention_heads if attends else fields.count("num_attention_heads", 0)
    vocab = fields.count("vocab_size")
    mlp = _intermediate(fields)
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    unknown = [key for key, value in sizes.items() if value is None]
    if unknown:
        fields.note(f"{', '.join(unknown)}: not in the file; costs that need them are not answered")
    dense = (
        model_type in families()
        and None not in (hidden, heads, vocab, mlp)
        and {layer.kind for layer in layers} <= {"full", "sliding"}
    )
    mtp_layers = _mtp(fields, layers)
    if model_type not in model_types()["known"]:
        fields.refuse_unread()
    titles = (name, top.get("_name"), top.get("_name_or_path"), file_name, model_type)
    spec = ModelSpec(
        name=next((x for x in titles if x and isinstance(x, str)), "unnamed"),
        num_layers=num_layers,
        hidden_size=hidden,  # type: ignore[arg-type]  # None where the file is silent; noted
        num_heads=heads,  # type: ignore[arg-type]
        # where no layer has the shared shape's heads, the most that one has
        num_kv_heads=base.num_key_value_heads if base.num_key_value_heads in used else max(used),
        head_dim=base.head_dim,
        intermediate_size=mlp,
        vocab_size=vocab,  # type: ignore[arg-type]
        layers=tuple(layers),
        tie_word_embeddings=_tied(fields),
        rms_norm_eps=_epsilon(fields),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rope=rope,
        rope_local=rope_local,
        model_type=model_type,
        is_dense_llama=dense,
        mtp_layers=mtp_layers,
        **family_of(fields, num_layers),
    )
    return replace(spec, unsupported=why_not(fields, spec), notes=tuple(fields.notes))


def _note_cache_dtype(fields: Fields) -> None:
    """Say what the file says of the cache's own format, and where its dtype gives none."""
    quantised = fields.top.get("quantization_config") or fields.data.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    if isinstance(scheme, Mapping):
        bits, kind = scheme.get("num_bits"), scheme.get("type", "int")
        name = "fp8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"
        fields.note(
            f"the file asks for a cache in {name} (kv_cache_scheme); sizes are in the format asked "
            "for, bf16 where none is: give it as the kv dtype"
        )
        return
    dtype = next((v for c in (fields.data, fields.top) for k in ("dtype", "torch_dtype")
                  if (v := c.get(k)) is not None), None)  # fmt: skip
    if dtype in (None, "auto"):
        fields.note(f"dtype is {'not in the file' if dtype is None else 'auto'}; bf16 is assumed")
    elif dtype in ("float32", "torch.float32"):
        fields.note("dtype is float32: engines cast such a file to 16 bits; bf16 is assumed")


def _of_architecture(fields: Fields) -> str:
    """The model type that the first architecture's name spells: DeepseekV4ForCausalLM."""
    named = fields.top.get("architectures") or fields.data.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    stem = re.sub(r"For[A-Z].*$|Model$", "", first) if isinstance(first, str) else ""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()


def _refuse(fields: Fields) -> None:
    """Refuse a config that has no cache of the kind that is sized here, and say why."""
    model_type, outer = fields.model_type, fields.top.get("model_type")
    types, refused = model_types(), model_types()["facts"]["refused"]
    family = _of_architecture(fields)
    if model_type not in types["known"] and family in refused and family != model_type:
        expected = "expected a decoder whose cache is sized here"
        fields.fail("architectures", f"given {family!r}: {refused[family]}; {expected}")
    if fields.where and isinstance(outer, str) and outer in refused:
        raise ConfigError("model_type", f"given {outer!r}: {refused[outer]}; expected a decoder")
    reason, encoder = refused.get(model_type), refused["bert"]
    if reason is None and model_type not in types["known"]:
        bert = "bert" in model_type and not model_type.endswith("decoder")
        reason = encoder if bert or model_type.endswith(tuple(types["towers"])) else None
    if reason and not (reason == encoder and fields.flag("is_decoder")):
        fields.fail("model_type", f"given {model_type!r}: {reason}; expected a decoder")
    for config in (fields.top, fields.data):
        key, crossed = "is_encoder_decoder", config.get("is_encoder_decoder")
        expected = "a decoder, since cross-attention is not modelled"
        fields.check(key, crossed, not crossed, expected)
    key, both_ways = "use_bidirectional_attention", fields.data.get("use_bidirectional_attention")
    refused = both_ways == "all" or (both_ways is True and model_type == "gemma3_text")
    expected = "a decoder, since a bidirectional model keeps no KV cache"
    fields.check(key, both_ways, not refused, expected)


def _shared(fields: Fields, layers: list[LayerSpec]) -> list[LayerSpec]:
    """The last num_kv_shared_layers read the K and V of an earlier layer of their kind."""
    shared = fields.count("num_kv_shared_layers", 0)
    if fields.flag("use_cla"):
        factor = fields.needed("cla_share_factor", why="the layers that share one K and V")
        return [
            layer if i % factor == 0 else LayerSpec("shared", shares_layer=i - i % factor)
            for i, layer in enumerate(layers)
        ]
    if not shared:
        return layers
    key, result = "num_kv_shared_layers", layers[: max(0, len(layers) - shared)]
    expected = f"fewer than the {len(layers)} layers, since some layer must keep K and V"
    fields.check(key, shared, bool(result), expected)
    owners = {layer.kind: i for i, layer in enumerate(result)}  # the last of each kind
    for i, layer in enumerate(layers[-shared:], len(result)):
        expected = f"fewer, since no earlier layer is {layer.kind} as layer {i} is"
        fields.check(key, shared, layer.kind in owners, expected)
        result.append(LayerSpec("shared", shares_layer=owners[layer.kind]))
    return result


def _compressed(layers: list[LayerSpec], fields: Fields) -> list[LayerSpec]:
    """DeepSeek-V4: one row for K and V in a window, and one more for each so many tokens.

    Source: ggml-org/llama.cpp#22319 and #24162. A ratio of 0 is the window alone; the entries
    beyond num_hidden_layers are the draft layers'. Layers of ratio 4 have an indexer.
    """
    if fields.model_type != "deepseek_v4":
        return layers
    ratios = fields.items("compress_ratios")
    if ratios is None or len(ratios) < len(layers):
        fields.fail("compress_ratios", f"expected a list of {len(layers)} ratios or more; add it")
    index = fields.count("index_head_dim") or 0
    return [
        replace(x, kind="latent", num_kv_heads=1, value_dim=0,
                compress=fields.as_count("compress_ratios", ratio, 0) or 0,
                index_dim=index if ratio == 4 else 0)
        for x, ratio in zip(layers, ratios, strict=False)
    ]  # fmt: skip


def _mtp(fields: Fields, layers: list[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Multi-token prediction layers stand outside num_layers and are an explicit extra."""
    for key in model_types()["mtp_keys"]:
        count = fields.count(key, 0, MOST_LAYERS)
        if count:
            like = [layer for layer in layers if layer.kind in ("full", "latent")]
            like = like or [layer for layer in layers if layer.num_kv_heads]
            if not like:
                return ()
            fields.note(
                f"{count} MTP layers ({key}) stand outside the {len(layers)}; {NOT_COUNTED}"
            )
            return (replace(like[-1], state=()),) * count
    return ()


def _intermediate(fields: Fields) -> int | None:
    """Width of the MLP; of those that differ from layer to layer, the widest."""
    value = fields.raw("intermediate_size")
    if isinstance(value, list | tuple):
        sizes = [fields.as_count("intermediate_size", size) for size in value]
        return max((size for size in sizes if size), default=None)
    size = fields.as_count("intermediate_size", value)
    hidden = fields.count("hidden_size")
    if size is None and hidden and fields.fact("mlp_of_four"):
        return 4 * hidden
    return size


def _epsilon(fields: Fields) -> float:
    stated = fields.as_number("rms_norm_eps", fields.raw("rms_norm_eps"))
    if stated is None and "rms_norm_eps" in fields.defaults:
        stated = fields.defaults["rms_norm_eps"]
        fields.note(f"rms_norm_eps is not in the file; {fields.model_type} means {stated} by that")
    return stated or 1e-5


def _tied(fields: Fields) -> bool:
    tied = fields.flag("tie_word_embeddings")
    if tied is None and isinstance(fields.top.get("tie_word_embeddings"), bool):
        return fields.top["tie_word_embeddings"]
    silent = ("gemma", "gpt2", "falcon", "smollm3")
    return fields.model_type.startswith(silent) if tied is None else tied


# --- models and cards by name -------------------------------------------------------------------


def _slug(name: str) -> str:
    return "-".join(str(name).lower().replace("_", " ").replace("-", " ").split())


def model_names() -> list[str]:
    """The presets: stems of data/models/*.json, sorted."""
    return sorted(path.stem for path in (DATA_DIR / "models").glob("*.json"))


@functools.cache
def model_index() -> dict[str, dict]:
    """Preset -> its published name, Hugging Face id, source, and parameters where counted."""
    index = {}
    for stem in model_names():
        facts = json.loads((DATA_DIR / "models" / f"{stem}.json").read_text("utf-8"))
        index[stem] = {key: facts[f"_{key}"] for key in ("name", "hf_id", "source")}
        index[stem]["params"] = facts.get("_params")
    return index


def preset_named(text: str) -> str | None:
    """The preset that a slug, a published name or a Hugging Face id means, if any."""
    wanted = _slug(text)
    for stem, facts in model_index().items():
        if wanted in (stem, _slug(facts["name"]), _slug(facts["hf_id"])):
            return stem
    return None


def preset(name: str) -> ModelSpec:
    """The ModelSpec of data/models/<name>.json, for example preset("llama-3-8b").

    The published name (Llama-3-8B) and the Hugging Face id name the same file.
    """
    stem = preset_named(name)
    if stem is None:
        listed = ", ".join(model_names())
        raise ConfigError("model", f"given {show(name)}; expected one of: {listed}")
    return read_config(DATA_DIR / "models" / f"{stem}.json")


def find_model(name_or_path: str | Path) -> ModelSpec:
    """A preset by name or Hugging Face id, else a config.json or a folder that holds one."""
    text = str(name_or_path)
    path_like = "/" in text or "\\" in text or text.endswith(".json") or _exists(text)
    if preset_named(text) is None and text.strip() and path_like:
        return read_config(Path(text))
    return preset(text)


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long, or a null byte in it
        return False


def hardware_names() -> list[str]:
    """The cards: stems of data/hardware/*.json, sorted."""
    return sorted(path.stem for path in (DATA_DIR / "hardware").glob("*.json"))


def hardware(name: str) -> HardwareSpec:
    """The HardwareSpec of data/hardware/<name>.json, for example hardware("h100-sxm")."""
    path = DATA_DIR / "hardware" / f"{_slug(name)}.json"
    if path.stem not in hardware_names():
        listed = ", ".join(hardware_names()) or "none"
        raise ConfigError("hardware", f"given {show(name)}; expected one of: {listed}")
    facts = {k: v for k, v in json.loads(path.read_text("utf-8")).items() if k[:1] != "_"}
    return HardwareSpec(**facts)
