"""Compile one variant of a kernel for a GPU that is not in this machine, and count what came out.

Triton's wheel carries the assembler and the disassemblers, so registers, shared memory, spills and
the instructions of the inner loop can be read anywhere. The interpreter and the compiler cannot
share a process: `python -m kvlab.kernels.compiling` is the worker that `report` starts with a
clean environment; it reads variants as JSON on its input and writes one JSON row a line.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.checks import TritonMissing
from kvlab.kernels.launch import Tile, choose_tile
from kvlab.kernels.machine_code import instructions, resources

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Variant:
    """One kernel for one architecture, dtype and shape. Defaults: Llama-3-8B in blocks of 16."""

    arch: int  # 75, 80, 86, 89, 90, 100
    dtype: str  # fp32, fp16, bf16
    kernel: str = "decode_split"  # or merge_splits
    group: int = 4
    head_dim: int = 128
    value_dim: int = 128
    block_size: int = 16
    num_splits: int = 16
    keep_text: bool = False  # put the TTIR and PTX into the row as well

    @property
    def tile(self) -> Tile:
        """What the launcher would choose."""
        return choose_tile(self.group, self.head_dim, self.value_dim, BYTES[self.dtype], self.arch)


def signature(variant: Variant) -> tuple[Any, dict[str, str], dict[str, Any], list[str]]:
    """The kernel, its argument types, its constants, and the arguments divisible by 16."""
    tile, pointer = variant.tile, "*" + variant.dtype
    if variant.kernel == "merge_splits":
        kernel = kernels.merge_splits
        types = {"out_ptr": pointer, "lse_ptr": "*fp32", "part_ptr": "*fp32"}
        types |= {"part_lse_ptr": "*fp32", "num_splits": "i32"}
        block_s = 1 << (variant.num_splits - 1).bit_length()
        constants = {"VALUE_DIM": variant.value_dim, "BLOCK_V": tile.block_v}
        constants |= {"BLOCK_S": block_s, "CHUNK": min(block_s, 16)}
        aligned = [name for name in types if name != "num_splits"]
    else:
        kernel = kernels.decode_split
        types = {"out_ptr": "*fp32", "lse_ptr": "*fp32"}
        types |= {name: pointer for name in ("query_ptr", "key_ptr", "value_ptr")}
        types |= {"table_ptr": "*i32", "seq_lens_ptr": "*i32", "scale": "fp32"}
        types |= {"window": "i32", "num_blocks": "i32"}
        strides = [name for name in kernel.arg_names if "_stride_" in name]
        types |= {name: "i32" for name in strides}
        constants = {
            "FOLD": kernels.fold_tile,
            "GROUP": variant.group,
            "HEAD_DIM": variant.head_dim,
            "VALUE_DIM": variant.value_dim,
            "BLOCK_SIZE": variant.block_size,
            "BLOCK_G": tile.block_g,
            "BLOCK_D": tile.block_d,
            "BLOCK_V": tile.block_v,
            "TILE": tile.keys,
            "UPCAST": False,
        }
        # What the launcher finds at run time. A table's row length may be any number.
        step = min(variant.head_dim & -variant.head_dim, variant.value_dim & -variant.value_dim)
        aligned = [name for name in types if name.endswith("_ptr")]
        if step % 16 == 0:
            aligned += [name for name in strides if name != "table_stride_seq"]
    types |= {name: "constexpr" for name in constants}
    return kernel, {name: types[name] for name in kernel.arg_names}, constants, aligned


def build(variant: Variant) -> tuple[Any, float]:
    """Compile; returns Triton's compiled kernel (its `.asm` holds ttir, ptx, cubin) and seconds."""
    if kernels.triton is None:
        raise TritonMissing("Triton is not installed here: nothing to compile with.")
    kernel, types, constants, aligned = signature(variant)
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiler, backend = kernels.triton.compiler, kernels.triton.backends.compiler
    source = compiler.ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.tile.num_warps, "num_stages": variant.tile.num_stages}
    start = time.perf_counter()
    target = backend.GPUTarget("cuda", variant.arch, 32)
    compiled = kernels.triton.compile(source, target=target, options=options)
    return compiled, time.perf_counter() - start


def compile_row(variant: Variant) -> dict[str, Any]:
    """The variant, what it compiled to, or the error that stopped it."""
    row: dict[str, Any] = {
        "arch": f"sm_{variant.arch}",
        "dtype": variant.dtype,
        "kernel": variant.kernel,
    }
    row |= {"head_dim": variant.head_dim, "group": variant.group, "tile": asdict(variant.tile)}
    try:
        compiled, seconds = build(variant)
    except Exception as error:  # whatever the compiler raises is the finding
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    row |= {
        "triton": kernels.triton.__version__,
        "shared_bytes": compiled.metadata.shared,
        "seconds": round(seconds, 2),
    }
    row |= resources(compiled) | instructions(compiled)
    if variant.keep_text:
        row |= {"ttir": compiled.asm["ttir"], "ptx": compiled.asm["ptx"]}
    return row


if __name__ == "__main__":
    for given in json.load(sys.stdin):
        print(json.dumps(compile_row(Variant(**given))), flush=True)
