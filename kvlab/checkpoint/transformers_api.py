"""The one place that knows how transformers' interfaces differ between its versions.

Chapters compare kvlab with transformers, and `download` lets it dequantise a file. The names they
meet there have moved: `key_cache` became `layers[i].keys`, `past_key_values` became `cache`,
`torch_dtype` became `dtype`, `rope_theta` became `rope_parameters`. Nothing here imports
transformers, which takes seconds: the caller hands in its classes and objects.
"""

from __future__ import annotations

import inspect
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvlab.checkpoint.download import CheckpointError


def layer_key(cache: Any, layer: int = 0) -> torch.Tensor:
    """The cached K of one layer, [batch, h_kv, seq, d_h], from any transformers cache object.

    Read: `cache.layers[i].keys` (4.56 and later, 5.x), `cache.key_cache[i]` (4.36 to 4.55), and
    the tuple of (K, V) pairs of earlier versions. Raises CheckpointError for any other object.
    """
    layers = getattr(cache, "layers", None)
    if layers is not None:
        return layers[layer].keys
    keys = getattr(cache, "key_cache", None)
    if keys is not None:
        return keys[layer]
    if isinstance(cache, tuple) and cache and isinstance(cache[0], tuple):
        return cache[layer][0]
    raise CheckpointError(
        f"given a {type(cache).__name__}; expected a transformers cache with .layers or "
        ".key_cache, or a tuple of (K, V) pairs. Add its shape to "
        "kvlab/checkpoint/transformers_api.py.")


def cache_of(output: Any) -> Any:
    """The cache that a transformers model or `generate` output carries, whatever it is called.

    Raises CheckpointError if it carries none.
    """
    for name in ("cache", "past_key_values"):
        cache = getattr(output, name, None)
        if cache is not None:
            return cache
    raise CheckpointError(
        f"given a {type(output).__name__} without a cache; call the model with use_cache=True, "
        "and generate with return_dict_in_generate=True.")


def cache_argument(model: torch.nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword with which a transformers model takes a cache: `cache`, or its older name.

        output = model(token, **cache_argument(model, cache))
    """
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache}


def load_with(model_class: Any, folder: Path | str, dtype: torch.dtype = torch.float32,
              **options: Any) -> Any:
    """`model_class.from_pretrained(folder)` in `dtype`, on versions that call it torch_dtype too.

        model = load_with(AutoModelForCausalLM, checkpoint.folder)
    """
    try:
        model = model_class.from_pretrained(folder, dtype=dtype, **options)
    except TypeError:  # before 4.56 the model's own constructor refuses the new name
        model = model_class.from_pretrained(folder, torch_dtype=dtype, **options)
    return model.eval()


def plain_config(config: Any) -> dict:
    """The keys of config.json that a decoder needs, spelt as they were before transformers 5.

    Library versions disagree about where rope_theta lives. Writing one fixed spelling makes the
    converted folder the same, whichever version converted it.
    """
    theta = getattr(config, "rope_theta", None)
    if theta is None:
        theta = config.rope_parameters["rope_theta"]
    # GGUF keeps the epsilon in single precision: give back the decimal number that was meant.
    epsilon = struct.unpack("f", struct.pack("f", config.rms_norm_eps))[0]
    head_dim = getattr(config, "head_dim", None)
    same = ("model_type", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size",
            "intermediate_size", "max_position_embeddings", "num_attention_heads",
            "num_hidden_layers", "num_key_value_heads", "tie_word_embeddings", "vocab_size")
    return dict(sorted({
        **{name: getattr(config, name) for name in same},
        "architectures": ["LlamaForCausalLM"],
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": float(f"{epsilon:.7g}"),
        "rope_theta": theta,
        "torch_dtype": "float32",
    }.items()))


def convert_gguf(path: Path, out: Path, model_class: Any, tokenizer_class: Any) -> None:
    """Write config.json, tokenizer.json and model.safetensors (float32) of a GGUF file to `out`.

    transformers does the dequantising (it needs the packages gguf and accelerate) but refuses to
    save such a model, so the state dict is copied. A tied output head is stored once.
    """
    model = load_with(model_class, path.parent, gguf_file=path.name)
    weights = {name: tensor.contiguous() for name, tensor in sorted(model.state_dict().items())}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    tokenizer = tokenizer_class.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    (out / "config.json").write_text(
        json.dumps(plain_config(model.config), indent=2) + "\n", encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
