"""Dequantise a GGUF file into the three files that kvlab loads. Run as a program.

    python -m kvlab.checkpoint.convert MODEL.gguf OUT

It imports transformers, which takes seconds and gigabytes of address space. `download` therefore
runs it once, in a process of its own, and no later load ever imports it.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def plain_config(config) -> dict:
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
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.model_type,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": float(f"{epsilon:.7g}"),
        "rope_theta": theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
    }


def convert_gguf(path: Path, out: Path) -> None:
    """Write config.json, tokenizer.json and model.safetensors (float32) of a GGUF file to `out`.

    transformers does the dequantising (it needs the packages gguf and accelerate) but refuses to
    save such a model, so the state dict is copied. A tied output head is stored once.
    """
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    weights = {name: tensor.contiguous() for name, tensor in sorted(model.state_dict().items())}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    (out / "config.json").write_text(
        json.dumps(plain_config(model.config), indent=2) + "\n", encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
