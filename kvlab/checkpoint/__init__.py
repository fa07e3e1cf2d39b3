"""A real checkpoint, ready to decode: weights, tokenizer and shape in one object.

    checkpoint = load()
    ids = checkpoint.encode("The cache keeps")

The default is the pinned SmolLM2-135M-Instruct. KVLAB_MODEL names another one: a folder that holds
config.json, tokenizer.json and safetensors weights, or a model id on the Hugging Face hub. A load
from the cache imports neither transformers nor the network: a second or two.

    download.py           get a checkpoint's folder onto this machine, whole or not at all
    transformers_api.py   what differs between versions of transformers, for chapters that compare
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tqdm import tqdm

from kvlab.checkpoint.download import CheckpointError, fetch, read_stamp
from kvlab.checkpoint.transformers_api import cache_argument, cache_of, layer_key, load_with
from kvlab.configs import read_config
from kvlab.fast import products_for
from kvlab.kernels import choose_dtype
from kvlab.model import Decoder, weight_shapes
from kvlab.specs import ModelSpec

__all__ = ["Checkpoint", "CheckpointError", "cache_argument", "cache_of", "fetch", "layer_key",
           "load", "load_with", "read_weights"]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer.

    source is one line that says which weights these are; a page shows it beside its numbers.
    eos_token_ids holds every id that ends a text (some models have several, some none).
    """

    spec: ModelSpec
    model: Decoder
    tokenizer: Tokenizer
    source: str
    folder: Path
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with nothing added in front."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


@contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Say of any failure inside which file of a checkpoint folder cannot be read."""
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more special
        raise CheckpointError(
            f"{what} in {folder} cannot be read ({error}). A checkpoint folder holds config.json, "
            "tokenizer.json and model.safetensors, or parts of it with "
            "model.safetensors.index.json. Fetch that file again; pickled weights become "
            "safetensors by model.save_pretrained(folder).") from error


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, one file or several with an index.

    Raises CheckpointError where a file is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    parts = {"model.safetensors"}
    if index.is_file():
        with reading(index.name, folder):
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    weights: dict[str, torch.Tensor] = {}
    for part in sorted(parts, key=str):
        with reading(part, folder):
            weights.update(load_file(folder / part))
    # Old conversions of Llama store the frequencies of the rotation beside the weights.
    return {k: w for k, w in weights.items() if not k.endswith("rotary_emb.inv_freq")}


def read_eos(folder: Path, config: dict) -> tuple[int, ...]:
    """Every id that ends a text. Chat models name the end of a turn in generation_config.json."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    files = [config]
    if generation.is_file():
        files.append(json.loads(generation.read_text(encoding="utf-8")))
    for file in files:
        eos = file.get("eos_token_id")
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(found))


@contextmanager
def room_for(needed: int, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Say of a GPU that is too small for `needed` bytes of weights what it lacks."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    try:
        if free < needed:
            raise torch.OutOfMemoryError
        yield
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"The weights take {needed / 1e9:.1f} GB in {dtype}, and for a moment up to twice that "
            f"while matrices are joined; {free / 1e9:.1f} GB of {device} were free. Restart other "
            "notebooks that use it, load(dtype=torch.bfloat16 or torch.float16), take a smaller "
            "model, or load(device='cpu').") from error


def load(
    name: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Checkpoint:
    """Load a checkpoint, fetching it first where it is missing.

    name     as for `fetch`
    device   where the model decodes: the GPU if there is one, else the CPU
    dtype    of the weights in memory, whatever the files hold. By default float32 on a CPU, and
             on a GPU the 16-bit one that it computes in (kvlab.kernels.choose.half_dtype)

    Raises CheckpointError (it could not be fetched or read, or does not fit the GPU), and what
    `read_config` and `Decoder` raise about a config or weights that they do not know.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or choose_dtype(where)[0]
    folder = fetch(name)
    with reading("config.json", folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with reading("config.json or generation_config.json", folder):
        eos_token_ids = read_eos(folder, config)
    with reading("tokenizer.json", folder):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spec = read_config(config, name=folder.name)
    weight_shapes(spec)  # refuses a model of another kind before its weights are read
    files, stamp = read_weights(folder), read_stamp(folder)
    needed = sum(tensor.numel() for tensor in files.values()) * dtype.itemsize
    on_cpu = where.type == "cpu"
    with room_for(needed, where, dtype), tqdm(
        total=needed, unit="B", unit_scale=True, desc=f"to {where}", delay=1, disable=on_cpu
    ) as bar:
        weights = {}
        for key, tensor in files.items():
            weights[key] = tensor.to(where, dtype)
            bar.update(weights[key].nbytes)
        model = Decoder(spec, weights, products_for(where))
    return Checkpoint(
        spec=spec,
        model=model,
        tokenizer=tokenizer,
        source=stamp["source"] if stamp else f"the weights in the folder {folder.name}: "
        f"{spec.model_type}, {spec.num_layers} layers. What a text says of SmolLM2 is not of these",
        folder=folder,
        eos_token_ids=eos_token_ids,
    )
