"""The record of `make bench` as tables and figures, for chapter 8; the bench page adds its own."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

from kvlab import costs
from kvlab.notebook.display import figure, say, table
from kvlab.sheet import units
from kvlab.specs import DATA_DIR, ModelSpec

Record = Mapping[str, dict]

CLOCKS = {"wall": "wall clock", "cpu": "processor time"}
DYNAMIC = "transformers, dynamic cache"


def recorded(name: str = "cpu") -> dict:
    """A record of data/measurements, as `python -m bench` wrote it."""
    return json.loads((DATA_DIR / "measurements" / f"{name}.json").read_text("utf-8"))


def cases_of(record: Record, kind: str, only: str | None = None) -> dict[str, dict]:
    """Cases of one kind, or only one, by the rest of their name: "fp32, 1 thread" -> the case."""
    return {
        name.split(", ", 1)[1]: case
        for name, case in record["cases"].items()
        if name.split(", ", 1)[0] == kind and only in (None, name.split(", ", 1)[1])
    }


def _loads(record: Record) -> list[float]:
    cases = record["cases"].values()
    return [case["load_average_after"] for case in cases if "load_average_after" in case]


def clock_of(record: Record) -> str:
    """The clock that compares: "wall", but "cpu" where more ran than the bench and its threads."""
    return "cpu" if max(_loads(record)) > record["machine"]["cores"] + 1 else "wall"


def milliseconds(measured: dict) -> str:
    """A median, as text."""
    return f"{1e3 * measured['median_seconds']:.1f}"


def say_machine(record: Record) -> None:
    """One paragraph: where, when and with what the record was made, and how busy it was."""
    machine = record["machine"]
    loads = _loads(record)
    llama = machine.get("llama_cpp_python")
    say(
        f"Recorded on {record['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['instructions']}, {units.binary_bytes(machine['memory_bytes'])} of memory. "
        f"torch {machine['torch']}, transformers {machine['transformers']}, "
        + (f"llama-cpp-python {llama}" if llama else "llama.cpp not installed")
        + f". Weights: {machine['weights']}.",
        f"The load on the machine was {min(loads):.0f} to {max(loads):.0f} while this ran. "
        f"Ratios are of {CLOCKS[clock_of(record)]} unless they say otherwise.",
    )


def show_overhead(record: Record, only: str | None = None) -> None:
    """Where a step's time goes. only: one case, such as "fp32, 1 thread"."""
    clock = clock_of(record)
    for name, case in cases_of(record, "overhead", only).items():
        calls = case["operators"]
        rows = [
            {
                "what runs": what,
                "ms a step": milliseconds(case[clock][what]),
                "kvlab's step = 1": f"{ratio:.2f}",
                "operator calls": f"{calls[what]:,}" if what in calls else "",
            }
            for what, ratio in case[f"ratio_{clock}"].items()
        ]
        table(rows, f"One cached step at s = {case['context']}, {name}, {CLOCKS[clock]}")


def show_means(record: Record, only: str | None = None) -> None:
    """The loop without one of its means at a time."""
    clock = clock_of(record)
    for name, case in cases_of(record, "means", only).items():
        rows = [
            {
                "changed back": "nothing" if what == "all of them" else what,
                "step takes": f"{ratio:.2f} x",
                "operator calls": f"{case['operators'][what]:,}",
            }
            for what, ratio in case[f"ratio_{clock}"].items()
        ]
        table(
            rows, f"What each plain means buys: the loop without it, s = {case['context']}, {name}"
        )


def show_context(record: Record) -> None:
    """A cached step against its context, and the uncached step beside it."""
    clock = clock_of(record)
    ratio = f"ratio_{clock}"
    for name, case in cases_of(record, "context").items():
        points = case["points"]
        contexts = [int(c) for c in points]
        loops = ("kvlab", DYNAMIC)
        figure(
            {
                loop: (
                    contexts,
                    [1e3 * points[str(c)][clock][loop]["median_seconds"] for c in contexts],
                )
                for loop in loops
            },
            x="context s, tokens",
            y=f"ms a step, {CLOCKS[clock]}",
            title=f"One cached step against its context, {name}",
            alt="Time of a cached step over context for kvlab and for transformers",
            from_zero=True,
        )
        rows = [
            {
                "context s": f"{c:,}",
                "transformers / kvlab": f"{points[str(c)][ratio][DYNAMIC]:.2f}",
                "uncached / cached": f"{points[str(c)]['uncached'][ratio]['uncached']:.1f}",
            }
            for c in contexts
        ]
        table(rows, f"Ratios of one step, {name}, {CLOCKS[clock]}")


def say_products(record: Record) -> None:
    """How much longer a product with sixteen rows takes than with one, in each library."""
    clock = clock_of(record)
    for name, case in cases_of(record, "engine").items():
        alone = case["products"][clock]
        libraries = sorted({label.split(", batch")[0] for label in alone}, reverse=True)
        if len(libraries) < 2:
            continue
        one = alone["torch, batch 1"]["median_seconds"]
        torch_16, numpy_16 = (
            alone[f"{library}, batch 16"]["median_seconds"] / one for library in libraries
        )
        say(
            "A product with sixteen rows reads each weight as often as one with a single row: "
            f"once. With {name} this processor takes {torch_16:.1f} times as long for it in "
            f"torch's library, and {numpy_16:.1f} times in numpy's over the same memory. "
            "Products are most of a batch's step, so the engine gains little more than they allow."
        )


# -- a GPU, as `make gpu` records it -------------------------------------------------------------


def gpu_records(folder: Path = DATA_DIR / "measurements") -> list[dict]:
    """Every record of a GPU in data/measurements, oldest first. Empty until somebody makes one."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("gpu_*.json"))]
    return sorted(records, key=lambda record: record["date"])


def against_roofline(record: dict) -> list[dict]:
    """A row for each number of sequences and tokens: predicted seconds and measured ones.

    Predicted are the bytes of K and V at the pace of the card's own copy.
    """
    rows = {
        (row["num_seqs"], row["seq_len"]): {
            "sequences": row["num_seqs"],
            "tokens": row["seq_len"],
            "predicted_seconds": row["kv_bytes"] / record["roofs"]["copy"]["bytes_per_second"],
            "measured_seconds": statistics.median(row["seconds"]["kvlab"]),
        }
        for row in record.get("shapes", [])
        if "kvlab" in row.get("seconds", {}) and row["num_splits"] is None
        and (row["block_size"], row["num_heads"], row["num_kv_heads"]) == (16, 32, 8)
    }  # fmt: skip
    return [rows[key] for key in sorted(rows)]


def engine_against_roofline(record: dict, spec: ModelSpec) -> list[dict]:
    """A row a batch size: the floor of an engine's step, and its seconds with kernel and torch.

    The floor is the bytes of a step (all weights once, K and V of every request) over the bytes a
    second that the card was measured to read. spec is the model that the record ran.
    """
    engine, width = record.get("engine", {"batches": []}), getattr(torch, record["dtype"]).itemsize
    weights = costs.weight_bytes(costs.streamed_params(spec), width)
    return [
        {
            "batch": case["batch"],
            "floor_seconds": costs.memory_seconds(
                weights + case["batch"] * costs.kv_bytes(spec, engine["context"], width),
                record["roofs"]["streamed_bytes_per_second"],
            ),
            **{k: statistics.median(steps) for k, steps in case["step_seconds"].items()},
        }
        for case in engine["batches"]
    ]


def show_engine_on_gpus(spec: ModelSpec, records: list[dict]) -> None:
    """A table for each record of a GPU: an engine's step beside its floor."""
    for record in records:
        rows = [
            {
                "requests": row["batch"],
                "floor, ms": f"{1e3 * row['floor_seconds']:.2f}",
                "with the kernel, ms": f"{1e3 * row['triton']:.2f}",
                "with torch, ms": f"{1e3 * row['torch']:.2f}",
                "kernel / floor": f"{row['triton'] / row['floor_seconds']:.1f}",
            }
            for row in engine_against_roofline(record, spec)
        ]
        if rows:
            at = f"{record['engine']['context']:,} tokens each, {record['dtype']}"
            table(rows, f"One step of the engine on {record['hardware']}, {record['date']}: {at}")
    if not records:
        say("**No GPU's record stands in `data/measurements/` yet.** `make gpu` makes one.")
