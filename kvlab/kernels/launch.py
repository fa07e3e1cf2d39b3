"""paged_decode(query, key_cache, value_cache, block_tables, seq_lens): the kernel's front door."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.blocks import is_whole
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.checks import (
    BadSetting,
    TileTooLarge,
    TritonMissing,
    WrongDevice,
    WrongDtype,
    check_block_tables,
    check_shapes,
)
from kvlab.kernels.splits import MAX_SPLITS, choose_num_splits

#: Bytes of one tile of K and V. It waits in shared memory, of which a T4 has 64 KiB.
TILE_BYTES = 24 * 1024
#: Stands for "no window": larger than any sequence.
NO_WINDOW = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """The shape of one program's work and how the compiler schedules it."""

    keys: int  # keys per turn of the loop
    block_g: int  # rows of the score tile: the query heads of one KV head, rounded up
    block_d: int  # head_dim rounded up
    block_v: int  # value_dim rounded up
    num_warps: int
    num_stages: int  # tiles in flight: 3 looks up one tile and loads another meanwhile

    def require(self, group: int, head_dim: int, value_dim: int) -> None:
        """Raise BadSetting unless the tile holds the shape: a smaller one would cut it off."""
        sizes = (self.keys, self.block_g, self.block_d, self.block_v)
        least = (1, group, head_dim, value_dim)
        if any(size < max(n, 1) or size & (size - 1) for size, n in zip(sizes, least, strict=True)):
            raise BadSetting(
                f"{self}; expected powers of 2, with block_g at least {group}, block_d at least "
                f"{head_dim} and block_v at least {value_dim}. choose_tile() makes one that fits."
            )


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def choose_tile(
    group: int, head_dim: int, value_dim: int, bytes_per_element: int, capability: int
) -> Tile:
    """The shipped tile for one shape. capability is 75, 80, 90, ...

    Tensor cores multiply 16 rows at a time, so from sm_80 on the group is padded to 16. On sm_75
    Triton uses plain FMA instructions: padding there would be work for nothing, and would push
    the kernel past 128 registers a thread. Three stages keep two loads ahead of the arithmetic:
    the block table's entry, and then the keys and values that it points to.
    """
    block_d = max(16, next_power_of_2(head_dim))
    block_v = max(16, next_power_of_2(value_dim))
    block_g = next_power_of_2(group)
    row_bytes = (block_d + block_v) * bytes_per_element
    keys = 32 if 32 * row_bytes <= TILE_BYTES else 16
    num_stages = 3 if keys * row_bytes <= 2 * TILE_BYTES else 1
    if capability >= 80:
        block_g = max(16, block_g)
    else:
        keys = keys if block_g <= 4 else 16
        num_stages = 1  # no asynchronous copies before sm_80: nothing to keep in flight
    return Tile(keys, block_g, block_d, block_v, 4 if block_d <= 512 else 8, num_stages)


def device_facts(device: torch.device) -> tuple[int, int]:
    """(capability, number of multiprocessors); the interpreter counts as a card with one."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.major * 10 + properties.minor, properties.multi_processor_count
    return 80, 1


def check_device(query: torch.Tensor) -> None:
    """Triton is here, and can reach this tensor in this process."""
    if kernels.triton is None:
        raise TritonMissing(
            "Triton is not installed (it has wheels for Linux only). Use kvlab.backends, which "
            "falls back to torch."
        )
    if query.device.type == "cpu" and not kernels.INTERPRETED:
        raise TritonMissing(
            "the tensors are on the CPU and this process imported Triton without its interpreter. "
            "Start a new process with TRITON_INTERPRET=1, or use kvlab.backends."
        )
    if query.device.type not in ("cpu", "cuda"):
        raise WrongDevice(f"the kernel runs on CUDA devices; got {query.device}.")
    if query.dtype == torch.bfloat16 and device_facts(query.device)[0] < 80:
        raise WrongDtype("this GPU has no bf16 arithmetic (capability below 8.0); use float16.")


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    layout: str = "NHD",
    num_splits: int | None = None,
    tile: Tile | None = None,
    fold: Any = None,
    max_seq_len: int | None = None,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query per sequence against its paged K and V.

    query          [num_seqs, num_heads, head_dim], any strides but the last
    key_cache      [num_blocks, block_size, num_kv_heads, head_dim], or with layout="HND"
                   [num_blocks, num_kv_heads, block_size, head_dim]; any strides but the last
    value_cache    the same with value_dim
    block_tables   [num_seqs, max_blocks] int32 or int64: block of each run of block_size tokens
    seq_lens       [num_seqs] int: cached tokens, this query's own included; 0 is allowed
    scale          head_dim ** -0.5 unless given
    window         positions the query may look back on, itself included
    num_splits     chosen by `choose_num_splits` unless given
    tile, fold     other tile shapes, another inner step (`fold_tile` unless given)
    max_seq_len    an upper bound that saves reading seq_lens; only the split rule uses it
    check          False skips reading block_tables and seq_lens (see `check_block_tables`); a
                   block id out of range then turns that sequence's output into NaN

    -> out [num_seqs, num_heads, value_dim] in the query's dtype, and lse [num_seqs, num_heads]
    in float32 (natural logarithm). A sequence of length 0 gives exactly 0 and -inf.
    Raises a KernelInputError or TritonMissing.
    """
    if layout not in ("NHD", "HND"):
        raise BadSetting(f"layout {layout!r}; expected 'NHD' (token-major) or 'HND' (head-major).")
    if layout == "HND" and key_cache.dim() == value_cache.dim() == 4:
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    check_shapes(query, key_cache, value_cache, block_tables, seq_lens)
    check_device(query)
    if scale is not None and not math.isfinite(scale):
        raise BadSetting(f"scale {scale}; expected None or a finite number.")
    if window is not None and not is_whole(window, 1):
        raise BadSetting(f"window {window}; expected None or at least 1 (the query itself).")
    if num_splits is not None and not (is_whole(num_splits, 1) and num_splits <= MAX_SPLITS):
        raise BadSetting(f"num_splits {num_splits}; expected None or 1 to {MAX_SPLITS}.")

    num_seqs, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, value_dim = value_cache.shape
    group = num_heads // num_kv_heads
    if check:
        max_seq_len = check_block_tables(block_tables, seq_lens, num_blocks, block_size, window)
    elif max_seq_len is None:
        max_seq_len = block_tables.shape[1] * block_size
    capability, num_multiprocessors = device_facts(query.device)
    if tile is None:
        tile = choose_tile(group, head_dim, value_dim, query.element_size(), capability)
    else:
        tile.require(group, head_dim, value_dim)
    if num_splits is None:
        num_splits = choose_num_splits(
            num_seqs, num_kv_heads, max_seq_len, num_multiprocessors, tile.keys, window
        )

    rows = num_seqs * num_heads
    out = query.new_empty(num_seqs, num_heads, value_dim)
    lse = torch.empty(num_seqs, num_heads, dtype=torch.float32, device=query.device)
    if rows == 0:
        return out, lse
    part, part_lse = out, lse  # one split needs no merge: it writes the answer itself
    if num_splits > 1:
        part = torch.empty(rows, num_splits, value_dim, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(rows, num_splits, dtype=torch.float32, device=query.device)
    arguments = (
        part,
        part_lse,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        head_dim**-0.5 if scale is None else scale,
        NO_WINDOW if window is None else window,
        num_blocks,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
    )
    constants = {
        "FOLD": kernels.fold_tile if fold is None else fold,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_G": tile.block_g,
        "BLOCK_D": tile.block_d,
        "BLOCK_V": tile.block_v,
        "TILE": tile.keys,
        "UPCAST": kernels.INTERPRETED and query.dtype == torch.bfloat16,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    on_device = torch.cuda.device(query.device) if query.is_cuda else nullcontext()
    with on_device:
        try:
            grid = (num_seqs, num_kv_heads, num_splits)
            kernels.decode_split[grid](*arguments, **constants)
        except kernels.triton.OutOfResources as error:
            raise TileTooLarge(
                f"{tile} with head_dim {head_dim} in {query.dtype} does not fit this GPU: {error}. "
                "Pass a tile with fewer keys or num_stages=1, or use 16-bit K and V."
            ) from error
        if num_splits > 1:
            merge_launch(out, lse, part, part_lse, tile.block_v)
    return out, lse


def merge_launch(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    block_v: int,
    merge: Any = None,
) -> None:
    """Merge part [rows, num_splits, dv] and part_lse [rows, num_splits] into out and lse."""
    rows, num_splits, value_dim = part.shape
    block_s = next_power_of_2(num_splits)
    kernel = kernels.merge_splits if merge is None else merge
    kernel[(rows,)](
        out,
        lse,
        part,
        part_lse,
        num_splits,
        VALUE_DIM=value_dim,
        BLOCK_V=block_v,
        BLOCK_S=block_s,
        CHUNK=min(block_s, 16),
        num_warps=4,
    )
