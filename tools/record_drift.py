"""Record the drift curves of chapter 4's widget: data/measurements/drift.json.

    python tools/record_drift.py

Every offset in every recorded layer, KL against the right run at each of the decode steps, on
the checkpoint that `kvlab.checkpoint` loads by default. Takes some minutes on two cores.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform

import torch

from kvlab.faults.drift import TEXT, checkpoint, shifted_drift
from kvlab.specs import DATA_DIR

OFFSETS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_LEN, NUM_STEPS = 64, 96


def curve(offset: int, layer: int | None) -> dict:
    """One run, rounded to three digits."""
    drift = shifted_drift(offset, layer, PROMPT_LEN, NUM_STEPS)
    return {
        "offset": offset,
        "layer": layer,
        "kl": [float(f"{max(value, 0):.3g}") for value in drift.kl],
        "perplexity": round(drift.perplexity, 2),
        "right_perplexity": round(drift.right_perplexity, 2),
        "first_differing": drift.first_differing,
    }


def main() -> None:
    """Write the file."""
    loaded = checkpoint()
    layers = [None, 0, 1, 2, 4, 9, 14, 19, 24, loaded.spec.num_layers - 1]
    record = {
        "what": "KL(right || moved), nats, per decode step; decode positions moved by offset in "
        "one layer, or in all (layer null)",
        "command": "python tools/record_drift.py",
        "model": loaded.source,
        "dtype": "float32",
        "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest()[:16],
        "prompt_len": PROMPT_LEN,
        "num_steps": NUM_STEPS,
        "num_layers": loaded.spec.num_layers,
        "torch": torch.__version__,
        "machine": f"CPU, {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "curves": [],
    }
    for layer in layers:
        for offset in OFFSETS:
            record["curves"].append(curve(offset, layer))
        print(f"layer {layer}: done", flush=True)
    curves = record.pop("curves")
    head = json.dumps(record, indent=1)[:-2]
    body = ",\n".join("  " + json.dumps(entry, separators=(",", ":")) for entry in curves)
    path = DATA_DIR / "measurements" / "drift.json"
    path.write_text(f'{head},\n "curves": [\n{body}\n ]\n}}\n', encoding="utf-8")
    print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
