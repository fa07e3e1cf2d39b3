"""`python -m bench`: measure, and write data/measurements/NAME.json.

python -m bench                    everything, about ten minutes on an idle machine
python -m bench --only decode      one case
python -m bench --name my-laptop   another record; the page plots the one named "cpu"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from bench import cases, llamacpp, record
from bench.rivals import Rivals
from kvlab import checkpoint
from kvlab.measure import describe_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = ("decode", "overhead", "means", "context", "engine")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="cpu", help="name of the record")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype_name in options.dtypes:
            dtype = DTYPES[dtype_name]
            loaded = checkpoint.load(dtype=dtype)
            rivals = Rivals.load(loaded, dtype, Path(scratch))
            for threads in options.threads:
                torch.set_num_threads(threads)
                measured = _measure(rivals, dtype_name, threads, options)
                found.update(measured)
                machine = {
                    **describe_machine(),
                    "transformers": transformers.__version__,
                    "llama_cpp_python": llamacpp.VERSION,
                    "weights": loaded.source,
                }
                path = record.write(options.name, found, machine)
    print(f"written: {path.name} in data/measurements", file=sys.stderr)
    return 0


def _measure(rivals: Rivals, dtype: str, threads: int, options) -> dict[str, object]:
    tag = f"{dtype}, {threads} thread{'s' if threads > 1 else ''}"
    rounds, found = options.rounds, {}

    def add(case: str, value: dict[str, object]) -> None:
        load = describe_machine()["load_average"]
        found[f"{case}, {tag}"] = {"load_average_after": load, **value}
        print(f"{case}, {tag}: {_brief(value)}", file=sys.stderr, flush=True)

    if "decode" in options.only:
        add("decode", cases.decode(rivals, threads, rounds))
        add("machine", cases.machine_rates([rivals.dtype]))
    if "overhead" in options.only:
        add("overhead", cases.overhead(rivals, 6 * rounds))
    # The longer cases once: in float32 on one thread, where a plot is easiest to read.
    if "means" in options.only and threads == min(options.threads):
        add("means", cases.means(rivals, 4 * rounds))
    if "context" in options.only and threads == min(options.threads) and dtype == "fp32":
        add("context", cases.against_context(rivals, 3 * rounds))
    if "engine" in options.only and threads == max(options.threads):
        add("engine", cases.engine(rivals, max(2, rounds // 2)))
    return found


def _brief(value: dict[str, object]) -> str:
    if "ratio_wall" in value:
        return str({"wall": value["ratio_wall"], "cpu": value["ratio_cpu"]})
    inner = value.get("points") or {k: v for k, v in value.items() if isinstance(v, dict)}
    return str({k: v.get("ratio_wall", v) for k, v in inner.items()})


if __name__ == "__main__":
    raise SystemExit(main())
