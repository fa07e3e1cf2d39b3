"""The recorded drift curves: how far a shifted decode position carries the checkpoint away."""

from __future__ import annotations

import json

import traitlets

from kvlab.specs import DATA_DIR
from kvlab.widgets.base import LabWidget, Twin

RECORD = DATA_DIR / "measurements" / "drift.json"


def read_record() -> dict:
    """data/measurements/drift.json, made by tools/record_drift.py."""
    return json.loads(RECORD.read_text("utf-8"))


def layer_name(layer: int | None) -> str:
    """How a curve's layer is called."""
    return "all layers" if layer is None else f"layer {layer} only"


class DriftCurves(LabWidget):
    """KL against the decode step, for an offset in all layers or in one. Recorded, not live.

    offset  positions that each decode position is moved by
    layer   name of the moved layer, as layer_name gives it
    """

    script = "drift.js"
    curves: traitlets.List = traitlets.List().tag(sync=True)
    source = traitlets.Unicode().tag(sync=True)
    offset = traitlets.Int(16).tag(sync=True)
    layer = traitlets.Unicode("all layers").tag(sync=True)

    def __init__(self, **traits) -> None:
        record = read_record()
        self._record = record
        curves = [
            {
                "offset": curve["offset"],
                "layer": layer_name(curve["layer"]),
                "kl": curve["kl"],
                "perplexity": curve["perplexity"],
                "right": curve["right_perplexity"],
                "first": -1 if curve["first_differing"] is None else curve["first_differing"],
            }
            for curve in record["curves"]
        ]
        source = (
            f"Recorded on {record['date']}: {record['model']}; {record['dtype']}, "
            f"torch {record['torch']}, {record['machine']}; prompt of {record['prompt_len']} "
            f"tokens, {record['num_steps']} decode steps."
        )
        super().__init__(curves=curves, source=source, **traits)

    def twin(self) -> Twin:
        """Mean KL of every recorded curve: one row a layer, one column an offset."""
        offsets = sorted({curve["offset"] for curve in self.curves})
        names = list(dict.fromkeys(curve["layer"] for curve in self.curves))
        mean = {
            (curve["layer"], curve["offset"]): sum(curve["kl"]) / len(curve["kl"])
            for curve in self.curves
        }
        rows = [(name, *(f"{mean[name, offset]:.2g}" for offset in offsets)) for name in names]
        head = ("moved", *(f"by {offset}" for offset in offsets))
        return Twin("Mean KL, nats per token, by layer and offset", head, rows, self.source)
