"""python -m kvlab.kernels.report [--json] [--record FILE]: compile for GPUs that are not here.

Needs Triton (Linux) and no GPU. Each row: arch, dtype, kernel, registers per thread, shared_bytes,
spills (bytes), tensor_core and async_copy instructions, loop_instructions, seconds to compile.
The compiler runs in worker processes with a clean environment, because Triton's interpreter, if
this process was told to use it, would leave nothing to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError

#: Architectures, one card of each kind for the reader, and the dtypes that it computes in.
ARCHITECTURES = {
    75: ("T4", ("fp16", "fp32")),
    80: ("A100", ("bf16", "fp16", "fp32")),
    86: ("A10, RTX 30", ("bf16", "fp16")),
    89: ("L4, RTX 40", ("bf16", "fp16")),
    90: ("H100, H200", ("bf16", "fp16", "fp32")),
    100: ("B200", ("bf16",)),
}
#: Triton's maintainers test compute capability 8.0 and up. Older rows are reported as they are.
SUPPORTED_FROM = 80
COLUMNS = (
    "arch",
    "cards",
    "supported",
    "dtype",
    "kernel",
    "registers",
    "shared_bytes",
    "spills",
    "tensor_core",
    "async_copy",
    "loop_instructions",
    "seconds",
)


class CompileFailed(KvlabError):
    """The compiling worker ended without a row for every variant."""


def shipped_variants() -> list[dict[str, Any]]:
    """The split kernel for every architecture and dtype, and the merge on three generations."""
    variants: list[dict[str, Any]] = []
    for arch, (_, dtypes) in ARCHITECTURES.items():
        variants += [{"arch": arch, "dtype": dtype} for dtype in dtypes]
        if arch in (75, 80, 90):
            variants.append({"arch": arch, "dtype": dtypes[0], "kernel": "merge_splits"})
    return variants


def compile_variants(
    variants: list[dict[str, Any]], workers: int | None = None
) -> list[dict[str, Any]]:
    """Compile each variant (fields of `compiling.Variant`); rows in the same order.

    A fresh cache folder, so that `seconds` is what a first launch would cost.
    """
    workers = min(workers or os.cpu_count() or 1, len(variants), 4)
    shares = [variants[i::workers] for i in range(workers)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}

        def work(share: list[dict[str, Any]]) -> list[dict[str, Any]]:
            done = subprocess.run(
                [sys.executable, "-m", "kvlab.kernels.compiling"],
                input=json.dumps(share),
                capture_output=True,
                text=True,
                env=environment,
                check=False,
            )
            rows = [json.loads(line) for line in done.stdout.splitlines()]
            if len(rows) != len(share):
                raise CompileFailed(
                    f"{len(share)} variants given, {len(rows)} rows came back; expected one each. "
                    f"The worker said: {done.stderr[-500:]}"
                )
            return rows

        with ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(work, shares))
    rows = [parts[i % workers][i // workers] for i in range(len(variants))]
    for row, variant in zip(rows, variants, strict=True):
        row["cards"] = ARCHITECTURES.get(variant["arch"], ("",))[0]
        row["supported"] = variant["arch"] >= SUPPORTED_FROM
    return rows


def report() -> list[dict[str, Any]]:
    """Rows for everything kvlab ships."""
    return compile_variants(shipped_variants())


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
    options = parser.parse_args(arguments)
    try:
        rows = report()
    except KvlabError as error:
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
