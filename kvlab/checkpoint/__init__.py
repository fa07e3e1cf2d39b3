"""A real checkpoint, ready to decode: weights, tokenizer and shape in one object.

    checkpoint = load()
    ids = checkpoint.encode("The cache keeps")

The default is the pinned SmolLM2-135M-Instruct. KVLAB_MODEL names another one: a folder that holds
config.json, tokenizer.json and safetensors weights, or a model id on the Hugging Face hub. A load
from the cache imports neither transformers nor the network: a second or two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvlab.checkpoint.download import fetch_hub, fetch_pinned
from kvlab.checkpoint.store import CheckpointError, read_stamp, verify
from kvlab.configs import read_config
from kvlab.model import Decoder
from kvlab.specs import ModelSpec

NEEDED = ("config.json", "tokenizer.json")


class NotACheckpoint(CheckpointError):
    """A folder lacks a file, or one of its files cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer.

    source is one line that says which weights these are; a page shows it beside its numbers.
    eos_token_ids holds every id that ends a text (some models have several).
    """

    spec: ModelSpec
    model: Decoder
    tokenizer: Tokenizer
    source: str
    folder: Path
    eos_token_ids: tuple[int, ...]

    @property
    def eos_token_id(self) -> int | None:
        """The first id that ends a text, or None if the config names none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with nothing added in front."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


def fetch(name: str | None = None) -> Path:
    """The folder of a checkpoint on this machine, fetched first where it is missing.

    name: a folder, a hub id "org/name", or None for $KVLAB_MODEL and, without it, the pinned model.
    Raises a CheckpointError (Offline, HashMismatch, DiskFull, ConversionFailed, NotACheckpoint).
    """
    name = name or os.environ.get("KVLAB_MODEL") or None
    if name is None:
        return fetch_pinned()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise NotACheckpoint(
            f"KVLAB_MODEL or name is {name!r}: neither a folder on this machine nor a hub id of "
            "the form org/name. Unset it to use the pinned SmolLM2-135M-Instruct.")
    return fetch_hub(name)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, one file or several with an index."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            parts = sorted(set(weight_map.values()))
        else:
            parts = ["model.safetensors"]
        weights: dict[str, torch.Tensor] = {}
        for part in parts:
            weights.update(load_file(folder / part))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise NotACheckpoint(
            f"The weights in {folder} could not be read ({error}). Expected model.safetensors, or "
            "parts with model.safetensors.index.json. Convert pickled weights first: "
            "model.save_pretrained(folder).") from error
    return weights


def read_eos(folder: Path, config: dict) -> tuple[int, ...]:
    """Every id that ends a text. Chat models name the end of a turn in generation_config.json."""
    generation = folder / "generation_config.json"
    texts = [generation.read_text(encoding="utf-8")] if generation.is_file() else []
    found: list[int] = []
    for each in (config, *map(json.loads, texts)):
        eos = each.get("eos_token_id")
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(found))


def load(name: str | None = None, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Load a checkpoint, fetching it first where it is missing. `name` is as for `fetch`."""
    folder = fetch(name)
    for needed in NEEDED:
        if not (folder / needed).is_file():
            raise NotACheckpoint(f"{folder} holds no {needed}. A checkpoint folder holds "
                                 "config.json, tokenizer.json and model.safetensors.")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        eos_token_ids = read_eos(folder, config)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing more special
        raise NotACheckpoint(f"config.json, generation_config.json or tokenizer.json in {folder} "
                             f"cannot be read ({error}). Fetch that file again.") from error
    weights = {key: tensor.to(dtype) for key, tensor in read_weights(folder).items()}
    spec = read_config(config, name=folder.name)
    stamp = read_stamp(folder)
    return Checkpoint(
        spec=spec,
        model=Decoder(spec, weights),
        tokenizer=tokenizer,
        source=stamp["source"] if stamp else f"the weights in the folder {folder.name}",
        folder=folder,
        eos_token_ids=eos_token_ids,
    )


def main(arguments: list[str] | None = None) -> int:
    """`python -m kvlab.checkpoint [NAME] [--verify]`: fetch, and print where the files are."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.checkpoint", description=fetch.__doc__)
    parser.add_argument("name", nargs="?", help="a folder or a hub id; the pinned model if absent")
    parser.add_argument("--verify", action="store_true", help="read all files and check hashes")
    options = parser.parse_args(arguments)
    try:
        folder = fetch(options.name)
        if options.verify:
            verify(folder)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: nothing was kept. Run it again to fetch the checkpoint.",
              file=sys.stderr)
        return 130
    print(folder)
    return 0
