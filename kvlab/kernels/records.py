"""Records that the chapter shows: what the kernel compiled to, and times taken on GPUs.

data/kernel_report.json            python -m kvlab.kernels.report --record FILE
data/measurements/kernel_*.json    python -m kvlab.kernels.bench --out FILE
"""

from __future__ import annotations

import json
import statistics

from kvlab.specs import DATA_DIR


def compile_record() -> list[dict]:
    """Rows of the last recorded report, with the Triton version that made them."""
    return json.loads((DATA_DIR / "kernel_report.json").read_text("utf-8"))


def measurement_records() -> list[dict]:
    """Every recorded bench, oldest first. Empty as long as nobody has run it on a GPU."""
    paths = sorted((DATA_DIR / "measurements").glob("kernel_*.json"))
    records = [json.loads(path.read_text("utf-8")) for path in paths]
    return sorted(records, key=lambda record: record["date"])


def against_roofline(record: dict) -> list[dict]:
    """One row a shape of a bench: predicted seconds (KV bytes at copy bandwidth) and measured."""
    return [
        {
            "sequences": row["num_seqs"],
            "tokens": row["seq_len"],
            "predicted_seconds": row["kv_bytes"] / record["copy"]["bytes_per_second"],
            "measured_seconds": statistics.median(row["seconds"]["kvlab"]),
        }
        for row in record["rows"]
    ]
