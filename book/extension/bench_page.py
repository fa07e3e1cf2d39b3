"""What only the bench page shows of the record of `make bench`."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.notebook.bench_record import (
    CLOCKS,
    DYNAMIC,
    Record,
    cases_of,
    clock_of,
    milliseconds,
    recorded,
)
from kvlab.notebook.display import figure, say, table
from kvlab.sheet import units
from kvlab.specs import DATA_DIR

PADDED = "transformers, padded"
FLOOR = "reading the weights' bytes"


def show_decode(record: Record) -> None:
    """Every decode case: milliseconds a token of each loop, and ratios to kvlab's."""
    for name, case in cases_of(record, "decode").items():
        rows = [
            {
                "loop": loop,
                "ms a token, processor": milliseconds(case["cpu"][loop]),
                "ms a token, wall": milliseconds(case["wall"][loop]),
                "time, kvlab = 1 (processor)": f"{case['ratio_cpu'][loop]:.2f}",
                "time, kvlab = 1 (wall)": f"{case['ratio_wall'][loop]:.2f}",
                "same tokens": f"{case['tokens_equal_to_kvlab'].get(loop, '')}",
            }
            for loop in case["ratio_cpu"]
        ]
        table(
            rows,
            f"{name}: {case['tokens']} tokens after a prompt of {case['prompt_tokens']}",
            note="A ratio above 1 is slower than kvlab. Reading the weights' bytes is the floor.",
        )


def show_decode_figure(record: Record) -> None:
    """The ratios of all decode cases as bars."""
    cases = cases_of(record, "decode")
    clock = clock_of(record)
    loops = list(next(iter(cases.values()))[f"ratio_{clock}"])
    figure(
        {
            loop: (list(cases), [case[f"ratio_{clock}"].get(loop) for case in cases.values()])
            for loop in loops
        },
        x="case",
        y=f"{CLOCKS[clock]}, kvlab = 1",
        title="Greedy decoding of SmolLM2-135M: time of each loop against kvlab's",
        alt=f"Bars of {CLOCKS[clock]} relative to kvlab for each loop in each case",
        kind="bars",
    )


def show_engine(record: Record) -> None:
    """Tokens per second over batch sizes, and ragged requests against a padded batch."""
    clock = clock_of(record)
    for name, case in cases_of(record, "engine").items():
        batches = case["batches"][clock]
        sizes = {n: int(n.split()[-1]) for n in batches}
        one = batches["batch 1"]["median_seconds"]
        rows = [
            {
                "requests together": size,
                "tokens per second, batch of one = 1": (
                    f"{size * one / batches[n]['median_seconds']:.2f}"
                ),
            }
            for n, size in sizes.items()
        ]
        alone = case["products"][clock]
        for row, size in zip(rows, sizes.values(), strict=True):
            for library in sorted({label.split(", batch")[0] for label in alone}, reverse=True):
                first, this = (alone[f"{library}, batch {n}"]["median_seconds"] for n in (1, size))
                row[f"if only {library}'s products took time"] = f"{size * first / this:.2f}"
        table(
            rows,
            f"The engine over batch sizes, {name}, {CLOCKS[clock]}",
            "At the right: the gain if matrix products took all the time. "
            "The batch also shares the rest.",
        )
        rows = [
            {
                "32 requests": what,
                "tokens asked for": f"{case[kind]['tokens']:,}",
                **{loop: f"{ratio:.2f}" for loop, ratio in case[kind][f"ratio_{clock}"].items()},
            }
            for kind, what in (
                ("ragged", "prompts of different lengths"),
                ("ragged outputs", "outputs of different lengths as well"),
            )
        ]
        table(
            rows,
            f"Requests of different lengths together, {name}, {CLOCKS[clock]}, kvlab's engine = 1",
            "A padded batch computes every row until the longest is done.",
        )


def show_pages(record: Record) -> None:
    """What each page weighs, and how soon each slider's move is drawn."""
    if "pages" not in record["cases"]:
        say("No pages were measured for this record.")
        return
    case = record["cases"]["pages"]
    rows = [
        {"page": path, "loads before anything is pressed": units.decimal_bytes(facts["bytes"])}
        for path, facts in case["pages"].items()
    ]
    table(rows, f"Weight of the pages; the whole site is {units.decimal_bytes(case['site_bytes'])}")
    rows = [
        {
            "slider": slider,
            "script and layout, ms": milliseconds(times["script"]),
            "until painted, ms": milliseconds(times["frame"]),
            "worst": f"{1e3 * times['frame']['worst_seconds']:.1f}",
        }
        for facts in case["pages"].values()
        for slider, times in facts["sliders"].items()
    ]
    table(
        rows,
        f"One move of each slider, median, Chromium {case['chromium']} without a GPU",
        f"A move begins right after a frame; the next can be painted {1e3 / 60:.1f} ms later.",
    )


# -- several processors side by side: what stays and what does not ------------------------------


def recorded_processors() -> dict[str, dict]:
    """Every bench record by its name: "cpu", and those that stand beside it, such as "cpu-mine"."""
    names = sorted(path.stem for path in (DATA_DIR / "measurements").glob("cpu*.json"))
    return {name: recorded(name) for name in names}


def _gains(record: Record) -> dict[str, str]:
    """What one record says, as one column: times against kvlab's own, and tokens against one row's.

    Ratios are read by the clock that this record compares with.
    """
    clock, column = clock_of(record), {}
    ratio = f"ratio_{clock}"
    for dtype, long in (("fp32", "float32"), ("bf16", "bfloat16")):
        machine, decode, engine = (
            record["cases"][f"{kind}, {dtype}, 1 thread"]
            for kind in ("machine", "decode", "engine")
        )
        rate = machine["matrix_flops_per_second"][long]
        column[f"{dtype}: product of square matrices"] = f"{units.flops(rate)}/s"
        times = {
            f"{dtype}: transformers, time": decode[ratio].get(DYNAMIC),
            f"{dtype}: llama.cpp, time": decode[ratio].get("llama.cpp"),
            f"{dtype}: reading the weights, time": decode[ratio].get(FLOOR),
        }
        if dtype == "fp32":
            at_2048 = record["cases"]["context, fp32, 1 thread"]["points"]["2048"]
            times["fp32: transformers at s = 2,048, time"] = at_2048[ratio].get(DYNAMIC)
        times[f"{dtype}: padded batch, time"] = engine["ragged outputs"][ratio].get(PADDED)
        column |= {what: "" if time is None else f"{time:.2f}" for what, time in times.items()}
        for what, samples, label in (
            ("tokens a second, 16 requests / 1", engine["batches"][clock], "batch"),
            ("the same, if only products took time", engine["products"][clock], "torch, batch"),
        ):
            one, sixteen = (samples[f"{label} {n}"]["median_seconds"] for n in (1, 16))
            column[f"{dtype}: {what}"] = f"{16 * one / sixteen:.1f}"
    return column


def show_processors(records: Mapping[str, Record]) -> None:
    """One column a record: what kvlab's loop and engine gain on each processor."""
    columns = {
        f"{record['machine']['cpu']}, {record['machine']['instructions']}": _gains(record)
        for record in records.values()
    }
    clocks = {CLOCKS[clock_of(record)] for record in records.values()}
    table(
        [
            {"one thread": what, **{title: column[what] for title, column in columns.items()}}
            for what in next(iter(columns.values()))
        ],
        f"What carries over from one processor to another ({' or '.join(sorted(clocks))})",
        "Times: kvlab's loop or engine = 1. The padded batch answers 32 requests whose outputs "
        "differ in length.",
    )
