"""The bench's records of several processors side by side: what stays and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvlab import units
from kvlab.plots import table
from kvlab.plots_bench import CLOCKS, Record, clock_of

PADDED = "transformers, padded"
FLOOR = "reading the weights' bytes"
DYNAMIC = "transformers, dynamic cache"
Cell = Callable[[Record], str]


def _ratio(case: str, *path: str) -> Cell:
    """Reads one ratio of a case, by the clock that this record compares with."""

    def cell(record: Record) -> str:
        *parts, loop = path
        found = record["cases"][case]
        for part in parts:
            found = found[part]
        ratio = found[f"ratio_{clock_of(record)}"].get(loop)
        return "" if ratio is None else f"{ratio:.2f}"

    return cell


def _gain(case: str, what: str, label: str) -> Cell:
    """How many times the tokens of one row sixteen rows give in the same time."""

    def cell(record: Record) -> str:
        times = record["cases"][case][what][clock_of(record)]
        one, sixteen = (times[f"{label}batch {n}"]["median_seconds"] for n in (1, 16))
        return f"{16 * one / sixteen:.1f}"

    return cell


def _flops(name: str, dtype: str) -> Cell:
    def cell(record: Record) -> str:
        rates = record["cases"][f"machine, {name}"]["matrix_flops_per_second"]
        return f"{units.flops(rates[dtype])}/s"

    return cell


def _rows() -> Iterator[tuple[str, Cell]]:
    for dtype, long in (("fp32", "float32"), ("bf16", "bfloat16")):
        name = f"{dtype}, 1 thread"
        yield f"{dtype}: product of square matrices", _flops(name, long)
        yield f"{dtype}: transformers, time", _ratio(f"decode, {name}", DYNAMIC)
        yield f"{dtype}: llama.cpp, time", _ratio(f"decode, {name}", "llama.cpp")
        yield f"{dtype}: reading the weights, time", _ratio(f"decode, {name}", FLOOR)
        if dtype == "fp32":
            at_2048 = _ratio(f"context, {name}", "points", "2048", DYNAMIC)
            yield "fp32: transformers at s = 2,048, time", at_2048
        yield f"{dtype}: padded batch, time", _ratio(f"engine, {name}", "ragged outputs", PADDED)
        yield f"{dtype}: tokens a second, 16 requests / 1", _gain(f"engine, {name}", "batches", "")
        only = _gain(f"engine, {name}", "products", "torch, ")
        yield f"{dtype}: the same, if only products took time", only


def show_processors(records: Mapping[str, Record]) -> None:
    """One column a record: what kvlab's loop and engine gain on each processor."""
    titles = {
        name: f"{record['machine']['cpu']}, {record['machine']['instructions']}"
        for name, record in records.items()
    }
    clocks = {CLOCKS[clock_of(record)] for record in records.values()}
    table(
        [
            {"one thread": what, **{titles[name]: cell(r) for name, r in records.items()}}
            for what, cell in _rows()
        ],
        f"What carries over from one processor to another ({' or '.join(sorted(clocks))})",
        "Times: kvlab's loop or engine = 1. The padded batch answers 32 requests whose outputs "
        "differ in length.",
    )
