"""llama.cpp as a rival, where llama-cpp-python is installed: the same weights as a GGUF file.

It is compiled from source (about 7 minutes) and not needed for the book. Its q and k rows are
stored in another order (interleaved pairs), so they are permuted on export.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import torch

from kvlab.checkpoint import Checkpoint, read_weights

try:
    import llama_cpp

    AVAILABLE, VERSION = True, llama_cpp.__version__
except ImportError:
    AVAILABLE, VERSION = False, None

_FILE_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of half-split pairs [heads, 2, half] -> interleaved pairs [heads, half, 2]."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def export(checkpoint: Checkpoint, dtype: torch.dtype, path: Path) -> Path:
    """Write the checkpoint's weights as a GGUF without a tokenizer. Matrices in dtype."""
    spec = checkpoint.spec
    quantisation, file_type = _FILE_TYPES[dtype]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    for name, weight in read_weights(checkpoint.folder).items():
        part = name.split(".")[-2]
        weight = weight.float()
        if part in heads:
            weight = _interleave(weight, heads[part])
        kind = quantisation if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight.contiguous().numpy(), kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def generator(
    checkpoint: Checkpoint, dtype: torch.dtype, folder: Path, threads: int
) -> Callable[[Sequence[int], int], list[int]]:
    """A greedy loop over llama.cpp's own evaluation."""
    path = folder / f"weights-{str(dtype).split('.')[-1]}.gguf"
    if not path.is_file():
        export(checkpoint, dtype, path)
    model = llama_cpp.Llama(
        str(path),
        n_ctx=1024,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        logits_all=False,
        use_mmap=False,
    )
    vocab = checkpoint.spec.vocab_size

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        model.reset()
        outputs: list[int] = []
        fed = list(prompt)
        while True:
            model.eval(fed)
            pointer = llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1)
            row = (ctypes.c_float * vocab).from_address(ctypes.addressof(pointer.contents))
            outputs.append(int(torch.frombuffer(row, dtype=torch.float32).argmax()))
            if len(outputs) == count:
                return outputs
            fed = outputs[-1:]

    return generate
