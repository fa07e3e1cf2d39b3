"""The one place that knows how transformers' interfaces differ between its versions.

Chapters compare kvlab with transformers. The names they meet there have moved: `key_cache` became
`layers[i].keys`, `past_key_values` became `cache`, `torch_dtype` became `dtype`. Nothing here
imports transformers: the caller hands in its classes and objects.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

from kvlab.errors import KvlabError


class UnknownCacheObject(KvlabError):
    """A cache object of a shape that no transformers version known here has."""


def layer_key(cache: object, layer: int = 0) -> torch.Tensor:
    """The cached K of one layer, [batch, h_kv, seq, d_h], from any transformers cache object.

    Read: `cache.layers[i].keys` (4.56 and later, 5.x), `cache.key_cache[i]` (4.36 to 4.55), and
    the tuple of (K, V) pairs of earlier versions.
    """
    layers = getattr(cache, "layers", None)
    if layers is not None:
        return layers[layer].keys
    keys = getattr(cache, "key_cache", None)
    if keys is not None:
        return keys[layer]
    if isinstance(cache, tuple) and cache and isinstance(cache[0], tuple):
        return cache[layer][0]
    raise UnknownCacheObject(
        f"given a {type(cache).__name__}; expected a transformers cache with .layers or "
        ".key_cache, or a tuple of (K, V) pairs. Add its shape to kvlab/hf.py.")


def cache_of(output: object) -> object:
    """The cache that a transformers model or `generate` output carries, whatever it is called."""
    for name in ("cache", "past_key_values"):
        cache = getattr(output, name, None)
        if cache is not None:
            return cache
    raise UnknownCacheObject(
        f"given a {type(output).__name__} without a cache; call the model with use_cache=True, "
        "and generate with return_dict_in_generate=True.")


def cache_argument(model: torch.nn.Module, cache: object) -> dict[str, object]:
    """The keyword with which a transformers model takes a cache: `cache`, or its older name.

        output = model(token, **cache_argument(model, cache))
    """
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache}


def load_with(model_class: type, folder: Path | str, dtype: torch.dtype = torch.float32):
    """`model_class.from_pretrained(folder)` in `dtype`, on versions that call it torch_dtype too.

        model = load_with(AutoModelForCausalLM, checkpoint.folder)
    """
    try:
        model = model_class.from_pretrained(folder, dtype=dtype)
    except TypeError:  # before 4.56 the model's own constructor refuses the new name
        model = model_class.from_pretrained(folder, torch_dtype=dtype)
    return model.eval()
