"""What the paged decode launcher accepts, and the named errors it raises otherwise.

A kernel that is handed a wrong tensor does not complain: it reads someone else's memory. So the
launcher checks shapes, dtypes, devices and strides on every call (no device work), and the
contents of the block tables where the caller has not done so already (one copy to the host).
"""

from __future__ import annotations

import torch

from kvlab.errors import KvlabError

#: dtypes the kernel takes for query, keys and values
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class KernelInputError(KvlabError):
    """Something handed to the kernel does not fit."""


class WrongShape(KernelInputError):
    """Tensors whose shapes do not belong together."""


class WrongDtype(KernelInputError):
    """A dtype the kernel, or this GPU, does not compute in."""


class WrongDevice(KernelInputError):
    """Tensors on different devices, or on one that Triton cannot reach."""


class NotContiguous(KernelInputError):
    """The last dimension of a tensor must have stride 1: the kernel loads it in runs."""


class BlockIdOutOfRange(KernelInputError):
    """A block table names a block that the cache does not have."""


class BlockTableTooShort(KernelInputError):
    """A sequence is longer than its row of the block table can hold."""


class BadSetting(KernelInputError):
    """scale, window, num_splits, tile or layout outside its range."""


class TileTooLarge(KernelInputError):
    """The tile needs more shared memory or registers than this GPU has."""


class TritonMissing(KvlabError):
    """Triton is not installed here, or would need a GPU that is not there."""


def check_shapes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Ranks, matching sizes, dtypes, devices, and stride 1 in the last dimension."""
    ranks = {
        "query [num_seqs, num_heads, head_dim]": (query, 3),
        "key_cache [num_blocks, block_size, num_kv_heads, head_dim]": (key_cache, 4),
        "value_cache [num_blocks, block_size, num_kv_heads, value_dim]": (value_cache, 4),
        "block_tables [num_seqs, max_blocks]": (block_tables, 2),
        "seq_lens [num_seqs]": (seq_lens, 1),
    }
    for name, (tensor, rank) in ranks.items():
        if tensor.dim() != rank:
            raise WrongShape(f"got shape {list(tensor.shape)}; expected {name}. Reshape it.")
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise WrongShape(
            f"key_cache {list(key_cache.shape)} and value_cache {list(value_cache.shape)} must "
            "agree in num_blocks, block_size and num_kv_heads. Is one of them in another layout?"
        )
    if key_cache.shape[3] != head_dim:
        raise WrongShape(
            f"query has head_dim {head_dim}, key_cache has {key_cache.shape[3]}. The cache is "
            "[num_blocks, block_size, num_kv_heads, head_dim]; pass layout='HND' if heads come "
            "before tokens."
        )
    if head_dim == 0 or key_cache.shape[1] == 0:
        raise WrongShape(
            f"key_cache {list(key_cache.shape)}; expected a head_dim and a block_size above 0."
        )
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise WrongShape(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly: num_heads must "
            "be a multiple of num_kv_heads. If the cache is head-major, pass layout='HND'."
        )
    for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        if tensor.shape[0] != num_seqs:
            raise WrongShape(f"{name} has {tensor.shape[0]} rows for {num_seqs} queries.")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise WrongDtype(f"{name} is {tensor.dtype}; expected int32 or int64.")
    if not query.dtype == key_cache.dtype == value_cache.dtype or query.dtype not in DTYPES:
        raise WrongDtype(
            f"query {query.dtype}, keys {key_cache.dtype}, values {value_cache.dtype}; expected "
            "one and the same of float32, float16, bfloat16. Convert the query to the cache's."
        )
    devices = {t.device for t in (query, key_cache, value_cache, block_tables, seq_lens)}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise WrongDevice(f"tensors lie on {names}; move them to one device.")
    named = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    named |= {"block_tables": block_tables, "seq_lens": seq_lens}
    for name, tensor in named.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise NotContiguous(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1. "
                "Call .contiguous(), or transpose another dimension."
            )


def check_block_tables(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    window: int | None = None,
) -> int:
    """Every entry the kernel will look up names a real block; returns the longest seq_len.

    Only entries between the first visible position and the last one count: what stands in the
    rest of a row (padding, -1, blocks a window has left behind) is never read. Copies both
    tensors to the host, so an engine calls it once per step and passes check=False per layer.
    """
    if window is not None and window < 1:
        raise BadSetting(f"window {window}; expected None or at least 1 (the query itself).")
    if seq_lens.numel() == 0:
        return 0
    lens = seq_lens.to("cpu", torch.int64)
    table = block_tables.to("cpu", torch.int64)
    if int(lens.min()) < 0:
        raise WrongShape(f"seq_lens holds {int(lens.min())}; lengths are 0 or more.")
    needed = -(-lens // block_size)  # blocks per row
    if int(needed.max()) > table.shape[1]:
        row = int(needed.argmax())
        raise BlockTableTooShort(
            f"sequence {row} has {int(lens[row])} tokens, {int(needed[row])} blocks of "
            f"{block_size}, but its block table has {table.shape[1]} entries. Grow the table."
        )
    first = (lens - window).clamp(min=0) // block_size if window else torch.zeros_like(lens)
    entry = torch.arange(table.shape[1])[None, :]
    used = (entry >= first[:, None]) & (entry < needed[:, None])
    wrong = used & ((table < 0) | (table >= num_blocks))
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise BlockIdOutOfRange(
            f"block_tables[{row}, {column}] is {int(table[row, column])}; the cache has blocks 0 "
            f"to {num_blocks - 1}. The table is stale, or belongs to another pool."
        )
    return int(lens.max())
