"""Record what each fault of the registry does: data/measurements/faults.json.

    python tools/record_faults.py

Every fault's own measure, with the switch off and on, on the checkpoint that kvlab.checkpoint
loads by default where the fault is one of a model or its cache. The field guide prints the
record; tests/test_faults.py measures again.
"""

from __future__ import annotations

import datetime
import json
import math
import platform

import torch

from book.extension.field_guide import RECORD
from kvlab.faults import all_faults, fault
from kvlab.faults.drift import checkpoint


def two_digits(value: float) -> float | None:
    """The value as it is kept; None for what is not a finite number, which JSON has not."""
    return float(f"{value:.2g}") if math.isfinite(value) else None


def main() -> None:
    """Write the file."""
    entries = {}
    for entry in all_faults():
        quiet = entry.measure()
        with fault(entry.name):
            wrong = entry.measure()
        entries[entry.name] = {"off": two_digits(quiet), "on": two_digits(wrong)}
        print(entry.name, entries[entry.name], flush=True)
    record = {
        "command": "python tools/record_faults.py",
        "model": checkpoint().source,
        "torch": torch.__version__,
        "machine": f"CPU, {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "faults": entries,
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
