"""What the kernel is timed against: torch's own attention, and FlashInfer or flash-attn if here.

Each function returns name -> a call without arguments, ready to be timed, whose result is
[num_seqs, num_heads, head_dim]. Preparing (plans, contiguous copies) happens before the clock.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

Calls = dict[str, Callable[[], torch.Tensor]]


def torch_contiguous(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor
) -> Calls:
    """torch attention on K and V gathered beforehand into [num_seqs, num_kv_heads, s, d].

    It is spared the block table, and all sequences here have one length: the best case for it.
    """
    num_seqs, num_heads, head_dim = query.shape
    keys, values = (
        cache[tables.long()].flatten(1, 2).transpose(1, 2).contiguous()
        for cache in (key_cache, value_cache)
    )
    num_kv_heads = keys.shape[1]
    one = query[:, :, None]  # [num_seqs, num_heads, 1, head_dim]
    folded = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return {
        "torch, enable_gqa": lambda: F.scaled_dot_product_attention(
            one, keys, values, enable_gqa=True
        )[:, :, 0],
        "torch, group folded": lambda: F.scaled_dot_product_attention(folded, keys, values).view(
            query.shape
        ),
    }


def _installed(name: str) -> ModuleType | None:
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def flashinfer(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor
) -> Calls:
    """FlashInfer's paged decode with tensor cores, planned once, where it is installed."""
    library = _installed("flashinfer")
    if library is None:
        return {}
    (num_seqs, num_heads, head_dim), (_, block_size, num_kv_heads, _) = query.shape, key_cache.shape
    device, per_seq = query.device, tables.shape[1]
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * per_seq,
        tables.reshape(-1).int(),
        torch.full((num_seqs,), block_size, dtype=torch.int32, device=device),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        q_data_type=query.dtype,
        kv_data_type=key_cache.dtype,
    )
    return {"flashinfer": lambda: wrapper.run(query, (key_cache, value_cache))}


def flash_attn(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor
) -> Calls:
    """flash-attn's paged decode, where it is installed; its blocks are multiples of 256."""
    library = _installed("flash_attn")
    if library is None or key_cache.shape[1] % 256:
        return {}
    lens = torch.full(
        (query.shape[0],),
        tables.shape[1] * key_cache.shape[1],
        dtype=torch.int32,
        device=query.device,
    )
    return {
        "flash-attn": lambda: library.flash_attn_with_kvcache(
            query[:, None], key_cache, value_cache, cache_seqlens=lens, block_table=tables.int()
        )[:, 0]
    }


def all_rivals(*tensors: torch.Tensor) -> Calls:
    """Every rival that is installed and takes this shape."""
    return torch_contiguous(*tensors) | flashinfer(*tensors) | flash_attn(*tensors)
