"""A measurement as a file: samples, medians, ratios, and everything needed to read them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from kvlab.notebook.measure import cpu_name, memory_bytes
from kvlab.specs import DATA_DIR, HardwareSpec

FOLDER = DATA_DIR / "measurements"


def summary(samples: Mapping[str, list[float]], per: float = 1.0) -> dict[str, dict[str, object]]:
    """Median seconds (each divided by `per`, the tokens a call makes) and the samples."""
    return {
        name: {
            "median_seconds": statistics.median(values) / per,
            "samples": [round(value / per, 6) for value in values],
        }
        for name, values in samples.items()
    }


def ratios(samples: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """How many times each takes as long as `base`: the median over rounds of the quotient."""
    return {
        name: round(statistics.median(a / b for a, b in zip(values, samples[base], strict=True)), 3)
        for name, values in samples.items()
    }


def machine() -> dict[str, object]:
    """What a measurement must be read with: the processor, threads, load, versions."""
    return {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(name: str, cases: dict[str, object], machine: dict[str, object]) -> Path:
    """data/measurements/NAME.json; cases already there under other names are kept."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    old = json.loads(path.read_text("utf-8")) if path.is_file() else {"cases": {}}
    record = {
        "about": "written by `python -m bench`; every ratio compares calls timed in turns",
        "date": today(),
        "machine": machine,
        "cases": {**old["cases"], **cases},
    }
    return replace_file(path, record)


def write_hardware(name: str, device: HardwareSpec) -> Path:
    """data/hardware/NAME.json: the machine's own roofs, beside those of the datasheets."""
    facts = {key: value for key, value in asdict(device).items() if value is not None}
    facts["source"] = f"{device.source}, by `python -m bench` on {today()}"
    return replace_file(DATA_DIR / "hardware" / f"{name}.json", facts)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def replace_file(path: Path, facts: dict[str, object]) -> Path:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return partial.replace(path)
