"""python -m bench.gpu [--quick] [--check] [--out FILE]: time the kernel on this GPU.

Correctness first: a wrong kernel is not timed. Then CUDA events over shapes, with the second-level
cache flushed before each sample, against the copy bandwidth measured in the same run and against
torch's own attention on contiguous K and V (FlashInfer and flash-attn where installed). The record
says hardware, versions, date and every sample; keep it in data/measurements/. Without a GPU it
says so and ends.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from kvlab.kernels import KernelError
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.choose import half_dtype
from kvlab.kernels.paged_decode import kernel_device, paged_decode
from kvlab.kernels.reference import paged_decode_reference
from kvlab.notebook.measure import gpu_seconds, gpu_seconds_of_a_copy

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
COPIED_BYTES = 2**30
Calls = dict[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer; every sequence has the same length. Llama-3-8B's heads."""

    num_seqs: int
    seq_len: int
    block_size: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_splits: int | None = None  # None: the rule decides

    def kv_bytes(self, bytes_per_element: int) -> int:
        """Bytes of K and V the step must read."""
        rows = self.num_seqs * self.seq_len * self.num_kv_heads
        return rows * 2 * self.head_dim * bytes_per_element


QUICK = [Shape(1, 8192), Shape(8, 4096), Shape(64, 2048)]
SHAPES = [
    *[Shape(batch, s) for s in (512, 2048, 8192, 32768) for batch in (1, 4, 16, 64)],
    *[Shape(16, 8192, block_size=size) for size in (1, 8, 32, 64, 256)],
    *[Shape(1, 32768, num_splits=splits) for splits in (1, 2, 4, 8, 16, 32, 64)],
    *[Shape(16, 8192, num_heads=h, num_kv_heads=h_kv) for h, h_kv in ((8, 8), (56, 8), (64, 8))],
    Shape(16, 8192, num_heads=9, num_kv_heads=3, head_dim=64),
]
IRREGULAR = [
    Shape(3, 77, 5, 7, 1, 80),
    Shape(2, 130, 16, 9, 3, 64),
    Shape(2, 200, 16, 8, 2),
    Shape(2, 40, 1, 4, 4, 20),
]


def make_tensors(shape: Shape, dtype: torch.dtype, device: str = "cuda") -> tuple:
    """query, key_cache, value_cache, block_tables (shuffled), seq_lens."""
    generator = torch.Generator(device).manual_seed(0)
    per_seq = -(-shape.seq_len // shape.block_size)
    num_blocks = shape.num_seqs * per_seq
    cache = (num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    like: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    tables = torch.randperm(num_blocks, generator=generator, device=device).int() + 1
    return (
        torch.randn(shape.num_seqs, shape.num_heads, shape.head_dim, **like),
        torch.randn(cache, **like),
        torch.randn(cache, **like),
        tables.view(shape.num_seqs, per_seq),
        torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32, device=device),
    )


def check_results(dtypes: list[torch.dtype], device: str = "cuda") -> list[dict[str, Any]]:
    """Irregular shapes against float64 on the device; raises KernelError on the first miss."""
    rows = []
    for dtype in dtypes:
        for shape in IRREGULAR:
            for num_splits, window in ((1, None), (4, None), (3, 33)):
                query, keys, values, tables, lens = make_tensors(shape, dtype, device)
                lens[-1], lens[0] = shape.seq_len - 13, lens[0] if shape.num_seqs < 3 else 0
                case = (query, keys, values, tables, lens)
                out, _ = paged_decode(*case, num_splits=num_splits, window=window)
                want, _ = paged_decode_reference(*case, window=window)
                error = (out.double() - want).abs().max().item()
                rows.append({**asdict(shape), "dtype": str(dtype), "largest_error": error})
                if not error <= TOLERANCE[dtype]:  # NaN is wrong too
                    raise KernelError(
                        f"{shape} in {dtype} with {num_splits} splits is off by {error:.3g}, "
                        f"expected at most {TOLERANCE[dtype]:.3g}. Nothing was timed."
                    )
    return rows


# -- what the kernel is timed against ---------------------------------------------------
# Name -> a call without arguments, ready to be timed, with a result of [num_seqs, num_heads,
# head_dim]. Preparing (plans, contiguous copies) happens before the clock.


def _installed(name: str) -> ModuleType | None:
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def other_kernels(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor
) -> Calls:
    """Torch's attention, and FlashInfer's and flash-attn's paged decode where they are installed.

    Torch gets K and V gathered beforehand into [num_seqs, num_kv_heads, s, d]. It is spared the
    block table, and all sequences here have one length: the best case for it.
    """
    (num_seqs, num_heads, head_dim), (_, block_size, num_kv_heads, _) = query.shape, key_cache.shape
    keys, values = (
        cache[tables.long()].flatten(1, 2).transpose(1, 2).contiguous()
        for cache in (key_cache, value_cache)
    )
    one = query[:, :, None]  # [num_seqs, num_heads, 1, head_dim]
    folded = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    sdpa = F.scaled_dot_product_attention
    calls: Calls = {
        "torch, enable_gqa": lambda: sdpa(one, keys, values, enable_gqa=True)[:, :, 0],
        "torch, group folded": lambda: sdpa(folded, keys, values).view(query.shape),
    }
    per_seq = tables.shape[1]
    int32: Any = {"dtype": torch.int32, "device": query.device}
    if library := _installed("flashinfer"):
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=query.device)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            torch.arange(num_seqs + 1, **int32) * per_seq,
            tables.reshape(-1).int(),
            torch.full((num_seqs,), block_size, **int32),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            q_data_type=query.dtype,
            kv_data_type=key_cache.dtype,
        )
        calls["flashinfer"] = lambda: wrapper.run(query, (key_cache, value_cache))
    library = _installed("flash_attn")
    if library and block_size % 256 == 0:  # its blocks are multiples of 256
        lens = torch.full((num_seqs,), per_seq * block_size, **int32)
        calls["flash-attn"] = lambda: library.flash_attn_with_kvcache(
            query[:, None], key_cache, value_cache, cache_seqlens=lens, block_table=tables.int()
        )[:, 0]
    return calls


# -- one shape, and the whole record ----------------------------------------------------


def time_shape(shape: Shape, dtype: torch.dtype, copied_per_second: float) -> dict[str, Any]:
    """The kernel and the others on one shape."""
    case = make_tensors(shape, dtype)
    options: dict[str, Any] = {"check": False, "max_seq_len": shape.seq_len}
    options["num_splits"] = shape.num_splits
    calls: Calls = {"kvlab": lambda: paged_decode(*case, **options)[0]}
    if shape.seq_len % shape.block_size == 0:
        calls |= other_kernels(*case[:4])
    want = calls["kvlab"]()
    row: dict[str, Any] = {**asdict(shape), "kv_bytes": shape.kv_bytes(want.element_size())}
    row["seconds"] = {}
    for name, run in calls.items():
        try:
            torch.testing.assert_close(run(), want, atol=3e-2, rtol=3e-2)
            row["seconds"][name] = gpu_seconds(run)
        except Exception as error:  # one that cannot take this shape is part of the record
            row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:200]
    medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
    median = medians.pop("kvlab")
    row["kv_bytes_per_second"] = row["kv_bytes"] / median
    row["share_of_copy"] = row["kv_bytes_per_second"] / copied_per_second
    row["times_as_fast_as"] = {name: other / median for name, other in medians.items()}
    return row


def record(shapes: list[Shape]) -> dict[str, Any]:
    """Check, then time every shape; all that is needed to read the numbers later."""
    properties = torch.cuda.get_device_properties(0)
    dtype, why = half_dtype(torch.cuda.get_device_capability(0))
    checked = check_results([torch.float32, dtype])
    copied = gpu_seconds_of_a_copy(COPIED_BYTES)
    copied_per_second = 2 * COPIED_BYTES / statistics.median(copied)
    return {
        "hardware": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": kernels.triton.__version__,
            "cuda": torch.version.cuda,
        },
        "date": datetime.now(UTC).date().isoformat(),
        "dtype": str(dtype).removeprefix("torch."),
        "dtype_reason": why,
        "checked": checked,
        "copy": {"bytes_per_second": copied_per_second, "seconds": copied},
        "rows": [time_shape(shape, dtype, copied_per_second) for shape in shapes],
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line. Exit status 1 only when the kernel is wrong on this GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three shapes instead of all")
    parser.add_argument("--check", action="store_true", help="only compare with float64")
    parser.add_argument("--out", type=Path, help="write the JSON record here, not to the screen")
    options = parser.parse_args(arguments)
    if kernel_device() != "cuda":
        print("no GPU to measure on (or Triton's interpreter is switched on): nothing was timed.")
        print("`python -m kvlab.kernels.report` says what the kernel compiles to without a GPU.")
        return 0
    try:
        if options.check:
            dtype, _ = half_dtype(torch.cuda.get_device_capability(0))
            rows = check_results([torch.float32, dtype])
            print(f"{len(rows)} cases agree with float64; see `tests/test_kernels.py` for more")
            return 0
        text = json.dumps(record(QUICK if options.quick else SHAPES), indent=1)
    except KernelError as error:
        print(error, file=sys.stderr)
        return 1
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print(f"written to {options.out}" if options.out else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
