"""Chapter 6's scaffold: where a reader's own pieces are put into the kernel and held to the result.

`jit` and `tl` come from kernels/paged_decode.py, so that the chapter's cells can be read (and the
torch ones run) where there is no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.launch import next_power_of_2, paged_decode
from kvlab.kernels.paged_decode import jit, tl
from kvlab.kernels.walk import paged_decode_walk


@jit
def merge_one_by_one(
    out_ptr,  # [rows, VALUE_DIM]
    lse_ptr,  # [rows]
    part_ptr,  # [rows, num_parts, VALUE_DIM]
    part_lse_ptr,  # [rows, num_parts]
    num_parts,
    MERGE: tl.constexpr,  # merge_two(out_a, lse_a, out_b, lse_b) -> out, lse
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The merge as a loop: what is merged so far, and one part more."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_V)
    out = tl.zeros([BLOCK_V], tl.float32)
    lse = tl.full([1], -float("inf"), tl.float32)
    for i in range(0, num_parts):
        at = part_ptr + (row * num_parts + i) * VALUE_DIM + dv
        part = tl.load(at, mask=dv < VALUE_DIM, other=0.0)
        part_lse = tl.load(part_lse_ptr + row * num_parts + i + tl.arange(0, 1))
        out, lse = MERGE(out, lse, part, part_lse)
    tl.store(out_ptr + row * VALUE_DIM + dv, out, mask=dv < VALUE_DIM)
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)


def kernel_device() -> str | None:
    """Where this process runs Triton kernels: "cuda", "cpu" (the interpreter), or None."""
    if kernels.triton is None:
        return None
    if kernels.INTERPRETED:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


def is_triton(function: Any) -> bool:
    """Whether a function was decorated with triton.jit (compiled or interpreted)."""
    return kernels.triton is not None and isinstance(function, type(kernels.fold_tile))


def decode_with(fold: Callable, *case: torch.Tensor, **options) -> torch.Tensor:
    """Paged decode with this inner step: the kernel for a Triton function, else the walk."""
    if not is_triton(fold):
        return paged_decode_walk(*case, fold=fold, **options)[0]
    device = kernel_device()
    return paged_decode(*(t.to(device) for t in case), fold=fold, **options)[0].cpu()


def merge_with(
    merge_two: Callable, parts: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge parts [rows, num_parts, dv] and lses [rows, num_parts] one by one, left to right."""
    rows, num_parts, value_dim = parts.shape
    if not is_triton(merge_two):
        out, lse = torch.zeros(rows, value_dim), torch.full((rows, 1), float("-inf"))
        for i in range(num_parts):
            out, lse = merge_two(out, lse, parts[:, i], lses[:, i, None])
        return out, lse[:, 0]
    device = kernel_device()
    out = torch.empty(rows, value_dim, device=device)
    lse = torch.empty(rows, device=device)
    merge_one_by_one[(rows,)](
        out, lse, parts.to(device), lses.to(device), num_parts,
        MERGE=merge_two, VALUE_DIM=value_dim, BLOCK_V=next_power_of_2(value_dim),
    )  # fmt: skip
    return out.cpu(), lse.cpu()
