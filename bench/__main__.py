"""`python -m bench`: measure, and write data/measurements/NAME.json.

python -m bench                    everything, about ten minutes on an idle machine
python -m bench --only decode      one case
python -m bench --name cpu-laptop  another record, which the page sets beside the one named "cpu"
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from bench import cases, llamacpp, pages, record
from bench.rivals import Rivals
from kvlab import checkpoint
from kvlab.notebook.measure import measured_hardware

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = ("decode", "overhead", "means", "context", "engine", "pages")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="cpu", help="name of the record")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decoded by each loop in a round")
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    path = None
    for name, value in _cases(options):
        about = record.machine() | {
            "transformers": transformers.__version__,
            "llama_cpp_python": llamacpp.VERSION,
            "weights": checkpoint.load().source,
        }
        path = record.write(options.name, {name: value}, about)
        print(f"{name}: {_brief(value)}", file=sys.stderr, flush=True)
    if path is None:
        return 1
    print(f"written: {path.name} in data/measurements", file=sys.stderr)
    return 0


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """(name, case) of every case asked for, with the load it left behind."""
    with tempfile.TemporaryDirectory() as scratch:
        for dtype_name in options.dtypes if set(options.only) - {"pages"} else ():
            dtype = DTYPES[dtype_name]
            rivals = Rivals.load(checkpoint.load(dtype=dtype), dtype, Path(scratch))
            for threads in options.threads:
                torch.set_num_threads(threads)
                for name, value in _measure(rivals, dtype_name, threads, options):
                    yield name, {"load_average_after": os.getloadavg()[0], **value}
    if "decode" in options.only:
        torch.set_num_threads(max(options.threads))
        record.write_hardware(options.name, measured_hardware(dtypes=DTYPES))
    if "pages" in options.only:
        yield "pages", pages.pages()


def _measure(
    rivals: Rivals, dtype: str, threads: int, options: argparse.Namespace
) -> Iterator[tuple[str, dict]]:
    """(name, case) of every case asked for, each written as soon as it is there."""
    tag = f"{dtype}, {threads} thread{'s' if threads > 1 else ''}"
    rounds, only = options.rounds, options.only
    fewest = threads == min(options.threads)
    if "decode" in only:
        yield f"decode, {tag}", cases.decode(rivals, threads, rounds, options.tokens)
        yield f"machine, {tag}", cases.machine_rates([rivals.dtype])
    if "overhead" in only:
        yield f"overhead, {tag}", cases.overhead(rivals, 6 * rounds)
    # The longer cases once: on one thread, where the clock is quietest; contexts in float32.
    if "means" in only and fewest:
        yield f"means, {tag}", cases.means(rivals, 4 * rounds)
    if "context" in only and fewest and dtype == "fp32":
        yield f"context, {tag}", cases.against_context(rivals, 3 * rounds)
    if "engine" in only:
        yield (
            f"engine, {tag}",
            cases.engine(rivals, max(2, rounds // 2), max(4, options.tokens // 2)),
        )


def _brief(value: dict[str, object]) -> str:
    if "pages" in value:
        return f"{len(value['pages'])} pages"
    if "ratio_wall" in value:
        return str({"wall": value["ratio_wall"], "cpu": value["ratio_cpu"]})
    inner = value.get("points") or {k: v for k, v in value.items() if isinstance(v, dict)}
    return str({k: v.get("ratio_wall", v) for k, v in inner.items()})


if __name__ == "__main__":
    raise SystemExit(main())
