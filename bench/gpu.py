"""python -m bench.gpu: what the kernel and the engine do on this GPU, in under eight minutes.

    make gpu                        or, in a clone and after pip install '.[checkpoint]',
    python -m bench.gpu
    python -m bench.gpu --only kernel    one part; --minutes 3: no shape is begun after that

Four parts, and after each the record is written, so a run that breaks off leaves what it has:

    kernel    irregular shapes against float64; a kernel that is wrong is not timed
    roofs     a copy, a stream of reads, matrix products: what everything else is held against
    engine    the checkpoint, decoded by the engine with the kernel and with torch, in turns
    shapes    the kernel by CUDA events, the second-level cache flushed before each sample, against
              the copy and torch's own attention on contiguous K and V (and FlashInfer, flash-attn
              where they are installed)

The record (data/measurements/gpu_NAME.json) holds card, versions, date and every sample; the last
lines on the screen hold it against the goals. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from bench import record as records
from kvlab.checkpoint import CheckpointError, load
from kvlab.configs import preset
from kvlab.engine import Engine
from kvlab.fast import products_for
from kvlab.kernels import KernelError, choose_backend
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.paged_decode import kernel_device, paged_decode
from kvlab.kernels.reference import paged_decode_reference
from kvlab.model import Decoder, random_weights
from kvlab.notebook.measure import (
    gpu_seconds,
    gpu_seconds_of_a_copy,
    matrix_flops_per_second,
    streamed_bytes_per_second,
)

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


#: The first three decide; the rest follow while there is time.
SHAPES = [
    *[Shape(1, 8192), Shape(8, 4096), Shape(64, 2048)],
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


# -- the four parts ---------------------------------------------------------------------
# Each takes the record so far and yields its own entry, again and again while it grows.


def kernel_part(record: Mapping[str, Any], device: str = "cuda") -> Iterator[list]:
    yield check_results([torch.float32, dtype_of(record)], device)


def roofs_part(record: Mapping[str, Any], device: str = "cuda") -> Iterator[dict]:
    copied, dtypes = gpu_seconds_of_a_copy(COPIED_BYTES), {torch.float32, dtype_of(record)}
    yield {
        "copy": {
            "bytes_per_second": 2 * COPIED_BYTES / statistics.median(copied), "seconds": copied,
        },
        "streamed_bytes_per_second": streamed_bytes_per_second(device=device),
        "matrix_flops_per_second": {
            str(dtype): matrix_flops_per_second(dtype, device=device) for dtype in dtypes
        },
    }  # fmt: skip


def dtype_of(record: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, record["dtype"])


def the_model(dtype: torch.dtype, device: str) -> tuple[Decoder, str]:
    """The checkpoint, and what it is; random weights of its shape where it cannot be fetched."""
    try:
        checkpoint = load(device=device, dtype=dtype)
        return checkpoint.model, checkpoint.source
    except CheckpointError as error:
        spec = preset("smollm2-135m")
        weights = {k: w.to(device, dtype) for k, w in random_weights(spec).items()}
        model = Decoder(spec, weights, products_for(torch.device(device)))
        return model, f"random weights of {spec.name}'s shape, because: {error}"


def engine_run(model: Decoder, attention: str, prompts: list[list[int]], count: int) -> tuple:
    """(ids of each prompt, seconds of each step in which every request decodes one token)."""
    seconds, last = [], [0.0]

    def on_step(step) -> None:
        now = time.perf_counter()  # a step has read its ids back: the GPU is done
        if len(step.batch.token_ids) == len(prompts):
            seconds.append(now - last[0])
        last[0] = now

    blocks = 1 + sum(-(-(len(prompt) + count) // 16) for prompt in prompts)
    engine = Engine(
        model, num_blocks=blocks, prefix_caching=False, attention=attention, on_step=on_step,
        max_num_seqs=len(prompts), max_num_batched_tokens=2048,
    )  # fmt: skip
    outputs = engine.generate(prompts, max_new_tokens=count, progress=False)
    return [output.token_ids for output in outputs], seconds[1:]


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7919 * (seed + 1) + 31 * i * i) % 40_000 for i in range(length)]


def engine_part(
    record: Mapping[str, Any],
    device: str = "cuda",
    batches: tuple[int, ...] = (1, 16, 64),
    context: int = 1024,
    count: int = 48,
    rounds: int = 2,
) -> Iterator[dict]:
    """The same requests through both ways to attend: same ids in float32, then the pace."""
    model, source = the_model(torch.float32, device)
    ragged = [prompt_of(n, n) for n in (1, 15, 16, 17, 130, 257)]
    runs = {name: engine_run(model, name, ragged, count)[0] for name in ("triton", "torch")}
    pairs = list(zip(runs["triton"], runs["torch"], strict=True))
    entry: dict[str, Any] = {
        "weights": source,
        "same_ids_float32": sum(ours == theirs for ours, theirs in pairs),
        "of_requests": len(pairs),
        "context": context,
        "batches": [],
    }
    yield entry
    model, _ = the_model(dtype_of(record), device)
    for batch in batches:
        prompts = [prompt_of(context, i) for i in range(batch)]
        steps: dict[str, list[float]] = {"triton": [], "torch": []}
        for turn in range(1 + rounds):
            for name, kept in steps.items():
                _, seconds = engine_run(model, name, prompts, count)
                kept += seconds if turn else []  # the first turn compiles and warms up
        entry["batches"].append({
            "batch": batch,
            "step_seconds": steps,
            "tokens_per_second": {k: batch / statistics.median(v) for k, v in steps.items()},
        })  # fmt: skip
        yield entry


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


def shapes_part(
    record: Mapping[str, Any], device: str = "cuda", shapes: list[Shape] | None = None
) -> Iterator[list]:
    """The shapes that decide first; one that the card has no room for is part of the record."""
    rows: list[dict] = []
    for shape in shapes or SHAPES:
        try:
            rows.append(
                time_shape(shape, dtype_of(record), record["roofs"]["copy"]["bytes_per_second"])
            )
        except torch.OutOfMemoryError as error:
            rows.append({**asdict(shape), "failed": {"kvlab": str(error)[:200]}})
        if device == "cuda":
            torch.cuda.empty_cache()
        yield rows


PARTS: dict[str, Callable[..., Iterator]] = {
    "kernel": kernel_part, "roofs": roofs_part, "engine": engine_part, "shapes": shapes_part,
}  # fmt: skip
#: A part says nothing without those: a wrong kernel is not timed, and a time needs its roof.
NEEDS = {"engine": {"kernel", "roofs"}, "shapes": {"kernel", "roofs"}}


# -- what it is held against ------------------------------------------------------------

#: What is compared -> (reach, aim, how to read it off a row of `shapes`). Ratios of one run.
GOALS: dict[str, tuple[float, float, Callable[[dict], float | None]]] = {
    "K and V bytes a second / copy": (0.75, 0.85, lambda row: row["share_of_copy"]),
    "speed / torch's best, contiguous": (
        1.0, 1.1, lambda row: min(
            (v for k, v in row["times_as_fast_as"].items() if k.startswith("torch")), default=None
        ),
    ),
    "speed / FlashInfer": (0.8, 0.95, lambda row: row["times_as_fast_as"].get("flashinfer")),
}  # fmt: skip


def against_goals(record: Mapping[str, Any]) -> list[str]:
    """A line a goal: over shapes of 2,048 tokens or more whose K and V the L2 cannot hold."""
    long = [
        row
        for row in record.get("shapes", [])
        if "kvlab" in row.get("seconds", {}) and row["seq_len"] >= 2048
        and row["num_splits"] is None and row["kv_bytes"] > (record["l2_bytes"] or 0)
    ]  # fmt: skip
    lines = [f"{'':34}{'reach':>7}{'aim':>7}{'median':>8}{'worst':>7}  shapes"]
    for name, (reach, aim, read) in GOALS.items():
        values = [value for row in long if (value := read(row)) is not None]
        if not values:
            lines.append(f"{name:34}{reach:7.2f}{aim:7.2f}       not measured")
            continue
        middle = statistics.median(values)
        verdict = "aim met" if middle >= aim else "reached" if middle >= reach else "MISSED"
        lines.append(
            f"{name:34}{reach:7.2f}{aim:7.2f}{middle:8.2f}{min(values):7.2f}  "
            f"{len(values)}: {verdict}"
        )
    if engine := record.get("engine"):
        same, of = engine["same_ids_float32"], engine["of_requests"]
        lines.append(f"engine, kernel and torch: the same ids for {same} of {of} requests, float32")
        for case in engine["batches"]:
            pace = case["tokens_per_second"]
            lines.append(
                f"engine, batch {case['batch']} at {engine['context']} tokens: "
                f"{pace['triton']:,.0f} tokens/s with the kernel, {pace['torch']:,.0f} with torch, "
                f"{pace['triton'] / pace['torch']:.2f} times"
            )
    return [*lines, *(f"{part} broke off: {why}" for part, why in record["failed"].items())]


# -- the run ----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The card, and all else that is needed to read the numbers later."""
    properties = torch.cuda.get_device_properties(0)
    backend = choose_backend("cuda", "triton")
    return {
        "about": "written by `python -m bench.gpu`; see its docstring",
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
        "date": records.today(),
        "dtype": str(backend.dtype).removeprefix("torch."),
        "dtype_reason": backend.dtype_reason,
        "chosen_by_itself": choose_backend("cuda").reason,
    }


def measure(
    record: dict[str, Any], only: list[str], seconds: float, path: Path, device: str = "cuda"
) -> dict[str, Any]:
    """Run the parts, write the record whenever one has grown, and say on stderr how far it is."""
    start = time.perf_counter()
    record["failed"] = {}
    asked = set(only).union(*(NEEDS.get(name, set()) for name in only))
    for name in (part for part in PARTS if part in asked):
        try:
            if missing := NEEDS.get(name, set()) - set(record):
                raise KernelError(f"it says nothing without {' and '.join(sorted(missing))}")
            for entry in PARTS[name](record, device):
                record[name], spent = entry, time.perf_counter() - start
                records.replace_file(path, record)
                size = f", {len(entry)} rows" if isinstance(entry, list) else ""
                print(f"{spent:5.0f} s  {name}{size}", file=sys.stderr, flush=True)
                if spent > seconds:
                    break
        except Exception as error:  # the other parts still say what they can
            record["failed"][name] = f"{type(error).__name__}: {error}"
            records.replace_file(path, record)
            print(f"       {name}: {record['failed'][name]}", file=sys.stderr, flush=True)
    return record


def main(arguments: list[str] | None = None) -> int:
    """Command line. Exit status 1 where a part broke off, a wrong kernel among them."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=6, help="begin no shape after that")
    parser.add_argument("--out", type=Path, help="the record; by default in data/measurements")
    options = parser.parse_args(arguments)
    if kernel_device() != "cuda":
        print("no GPU to measure on (or Triton's interpreter is switched on): nothing was timed.")
        print("`python -m kvlab.kernels.report` says what the kernel compiles to without a GPU.")
        return 0
    record = machine()
    name = re.sub(r"[^a-z0-9]+", "-", record["hardware"].lower())
    path = options.out or records.FOLDER / f"gpu_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{record['hardware']}, {record['dtype']}: {record['dtype_reason']}", file=sys.stderr)
    record = measure(record, options.only, 60 * options.minutes, path)
    print("\n".join(against_goals(record)))
    print(f"written to {path}")
    return int(bool(record["failed"]))


if __name__ == "__main__":
    sys.exit(main())
