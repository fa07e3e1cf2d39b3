"""python -m kvlab.kernels.report [--json] [--record FILE]: compile for GPUs that are not here.

Needs Triton (Linux) and no GPU. Each row: arch, dtype, kernel, registers per thread, shared_bytes,
spills (bytes), tensor_core and async_copy instructions, loop_instructions, seconds to compile.
Triton's wheel carries the assembler and the disassemblers that say so. The compiler runs in worker
processes in a clean environment, because Triton's interpreter, if this process was told to use
it, would leave nothing to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlab.kernels import KernelError
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.splits import SUPPORTED_FROM, Tile, choose_tile
from kvlab.specs import DATA_DIR

#: Architectures, one card of each kind for the reader, and the dtypes that it computes in.
#: Rows older than Triton's maintainers test are reported as they are.
ARCHITECTURES = {
    75: ("T4", ("fp16", "fp32")),
    80: ("A100", ("bf16", "fp16", "fp32")),
    86: ("A10, RTX 30", ("bf16", "fp16")),
    89: ("L4, RTX 40", ("bf16", "fp16")),
    90: ("H100, H200", ("bf16", "fp16", "fp32")),
    100: ("B200", ("bf16",)),
}
COLUMNS = (
    "arch", "cards", "supported", "dtype", "kernel", "registers", "shared_bytes", "spills",
    "tensor_core", "async_copy", "loop_instructions", "seconds",
)  # fmt: skip
RECORD = DATA_DIR / "kernel_report.json"
#: One layer of Llama-3-8B in blocks of 16, its context cut into 16 splits.
GROUP, HEAD_DIM, BLOCK_SIZE, NUM_SPLITS = 4, 128, 16, 16


def shipped_variants() -> list[dict[str, Any]]:
    """The split kernel for every architecture and dtype, and the merge on three generations.

    Each is what `compile_row` takes: one kernel for one architecture and dtype.
    """
    variants: list[dict[str, Any]] = []
    for arch, (_, dtypes) in ARCHITECTURES.items():
        variants += [{"arch": arch, "dtype": dtype} for dtype in dtypes]
        if arch in (75, 80, 90):
            variants.append({"arch": arch, "dtype": dtypes[0], "kernel": "merge_splits"})
    return variants


# -- in a worker: compile one variant and count what came out ---------------------------


def build(arch: int, dtype: str, kernel_name: str, tile: Tile) -> Any:
    """Triton's compiled kernel; its `.asm` holds ttir, ptx and cubin."""
    if kernels.triton is None:
        raise KernelError("Triton is not installed here: nothing to compile with.")
    pointers = {"table_ptr": "*i32", "seq_lens_ptr": "*i32"}  # the others hold fp32
    if kernel_name == "merge_splits":
        kernel = kernels.merge_splits
        constants = tile.merge_constants(HEAD_DIM, NUM_SPLITS)
        pointers["out_ptr"] = "*" + dtype
    else:
        kernel = kernels.decode_split
        constants = tile.constants(GROUP, HEAD_DIM, HEAD_DIM, BLOCK_SIZE)
        constants |= {"FOLD": kernels.fold_tile, "UPCAST": False}
        pointers |= dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), "*" + dtype)
    types, aligned = {}, []
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = pointers.get(name, "*fp32")
            aligned.append(name)
        else:
            types[name] = "fp32" if name == "scale" else "i32"
            # The launcher finds this at run time. A table's row length may be any number.
            if "_stride_" in name and name != "table_stride_seq":
                aligned.append(name)
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiler, backend = kernels.triton.compiler, kernels.triton.backends.compiler
    return kernels.triton.compile(
        compiler.ASTSource(kernel, types, constexprs=constants, attrs=attributes),
        target=backend.GPUTarget("cuda", arch, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def _output(tool: str, *arguments: str) -> str:
    """What one of Triton's own tools (ptxas, cuobjdump, nvdisasm) prints."""
    path = Path(kernels.triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    result = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def _number(pattern: str, text: str) -> int:
    """The first number that a tool printed where the pattern has its group."""
    found = re.search(pattern, text)
    if found is None:
        raise KernelError(f"a tool printed no {pattern!r}, which was expected: {text[:300]}")
    return int(found[1])


def machine_code(compiled: Any) -> dict[str, int]:
    """registers per thread, stack_bytes, spills (bytes stored and loaded, together), and counts
    of instructions: tensor_core and async_copy in the PTX, all and the longest loop's in the code.
    """
    text = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(text)
        usage = _output("cuobjdump", "-res-usage", str(cubin))
        # Triton ships a second assembler for the newest PTX version; spills are its words.
        assembler = "ptxas-blackwell" if _number(r"\.version (\d+)\.", text) >= 9 else "ptxas"
        gpu = re.findall(r"\.target (sm_\w+)", text)[0]
        words = _output(assembler, "-v", f"--gpu-name={gpu}", str(ptx), "-o", f"{folder}/out")
        listing = _output("nvdisasm", str(cubin))
    count, labels, loop = 0, {}, 0
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", code[1])
            if jump and jump[1] in labels:
                loop = max(loop, count - labels[jump[1]])
    stored = _number(r"(\d+) bytes spill stores", words)
    return {
        "registers": _number(r"REG:(\d+)", usage),
        "stack_bytes": _number(r"STACK:(\d+)", usage),
        "spills": stored + _number(r"(\d+) bytes spill loads", words),
        "tensor_core": len(re.findall(r"\bmma\.sync|\bwgmma\.mma|\btcgen05\.mma", text)),
        "async_copy": len(re.findall(r"\bcp\.async\.c[ag]", text)),
        "instructions": count,
        "loop_instructions": loop,
    }


def compile_row(
    arch: int, dtype: str, kernel: str = "decode_split", keep_text: bool = False
) -> dict[str, Any]:
    """The variant, what it compiled to, or the error that stopped it.

    arch   75, 80, 86, 89, 90 or 100; dtype "fp32", "fp16" or "bf16"; kernel may be "merge_splits"
    keep_text   put the TTIR and PTX into the row as well
    """
    tile = choose_tile(GROUP, HEAD_DIM, HEAD_DIM, 4 if dtype == "fp32" else 2, arch)
    row: dict[str, Any] = {"arch": f"sm_{arch}", "dtype": dtype, "kernel": kernel}
    row |= {"head_dim": HEAD_DIM, "group": GROUP, "tile": asdict(tile)}
    start = time.perf_counter()
    try:
        compiled = build(arch, dtype, kernel, tile)
    except Exception as error:  # whatever the compiler raises is the finding
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    seconds = round(time.perf_counter() - start, 2)
    row |= {"triton": kernels.triton.__version__, "shared_bytes": compiled.metadata.shared}
    row |= {"seconds": seconds} | machine_code(compiled)
    if keep_text:
        row |= {"ttir": compiled.asm["ttir"], "ptx": compiled.asm["ptx"]}
    return row


# -- in the caller's process -------------------------------------------------------------


def compile_variants(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compile each variant (arguments of `compile_row`); rows in that order. Raises KernelError.

    A fresh cache folder, so that `seconds` is what a first launch would cost.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        paths = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "kvlab.kernels.report", "--worker"], input=json.dumps(variants),
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
    if done.returncode:
        raise KernelError(
            f"{len(variants)} variants given, no rows came back; expected one each. "
            f"The worker said: {done.stderr[-500:]}"
        )
    rows = json.loads(done.stdout)
    for row, variant in zip(rows, variants, strict=True):
        row["cards"] = ARCHITECTURES.get(variant["arch"], ("",))[0]
        row["supported"] = variant["arch"] >= SUPPORTED_FROM
    return rows


def compile_record() -> list[dict[str, Any]]:
    """Rows of the recorded report, with the Triton version that made them."""
    return json.loads(RECORD.read_text("utf-8"))


def as_text(rows: list[dict[str, Any]]) -> str:
    """The rows as an aligned table."""
    cells = [COLUMNS] + [
        tuple(str(row.get(c, row.get("error", "") if c == "registers" else "")) for c in COLUMNS)
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line. Exit status 1 if a supported architecture spills or does not compile."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.kernels.report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--record", type=Path, help="write the rows, without seconds, to a file")
    parser.add_argument("--worker", action="store_true", help="compile the variants on the input")
    options = parser.parse_args(arguments)
    if options.worker:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
            jobs = [pool.submit(compile_row, **given) for given in json.load(sys.stdin)]
        print(json.dumps([job.result() for job in jobs]))
        return 0
    try:
        rows = compile_variants(shipped_variants())
    except KernelError as error:
        print(error, file=sys.stderr)
        return 1
    if options.record:
        kept = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        options.record.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(rows, indent=1) if options.json else as_text(rows))
    bad = [row for row in rows if row["supported"] and ("error" in row or row["spills"])]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
