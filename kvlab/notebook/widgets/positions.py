"""Positions, in chapter 4: one rotated pair to shift, and what shifted positions do to a model."""

from __future__ import annotations

import json
import math

import torch
import traitlets

from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.rope import apply_rope, rope_inv_freq, rope_tables
from kvlab.specs import DATA_DIR, RopeSpec

#: The pair before rotation, as angles: q at 0 and k at 50 degrees, both of length 1.
KEY_DEGREES = 50.0


def pair_score(rope: RopeSpec, pair: int, query_pos: int, key_pos: int) -> float:
    """q . k of one rotated pair, by kvlab's own rotation."""
    half = rope.rotary_dim // 2
    angle = math.radians(KEY_DEGREES)
    vectors = torch.zeros(2, 1, rope.rotary_dim)
    vectors[0, 0, pair] = 1.0
    vectors[1, 0, pair], vectors[1, 0, pair + half] = math.cos(angle), math.sin(angle)
    tables = rope_tables(rope, torch.tensor([query_pos, key_pos]))
    query, key = apply_rope(vectors, *tables)
    return float((query * key).sum())


class Rotate(LabWidget):
    """Two arrows on a circle. Each turns by its own position; the score sees the difference.

    rope                settings whose frequencies the pairs have
    query_pos, key_pos  positions m and n
    pair                index of the pair; pair 0 turns fastest
    """

    script = "rotate.js"
    inv_freq = traitlets.List(traitlets.Float()).tag(sync=True)
    key_degrees = traitlets.Float(KEY_DEGREES).tag(sync=True)
    query_pos = traitlets.Int(6).tag(sync=True)
    key_pos = traitlets.Int(4).tag(sync=True)
    pair = traitlets.Int(4).tag(sync=True)

    def __init__(self, rope: RopeSpec, **traits) -> None:
        self._rope = rope
        super().__init__(inv_freq=rope_inv_freq(rope)[0].tolist(), **traits)

    def twin(self) -> Twin:
        """The score at the start, after each of the three shifts, and far away."""
        cases = (
            ("start", 0, 0),
            ("query shifted by 1", 1, 0),
            ("key shifted by 1", 0, 1),
            ("both shifted by 1", 1, 1),
            ("both shifted by 1,000", 1000, 1000),
        )
        rows = []
        for name, query_shift, key_shift in cases:
            m, n = self.query_pos + query_shift, self.key_pos + key_shift
            rows.append((name, m, n, m - n, f"{pair_score(self._rope, self.pair, m, n):.3f}"))
        return Twin(
            f"Score of pair {self.pair} when positions move",
            ("", "query at m", "key at n", "m - n", "score q . k"),
            rows,
            f"The pair turns by {self.inv_freq[self.pair]:.4f} radians a position.",
        )


def read_record() -> dict:
    """data/measurements/drift.json, made by tools/record_drift.py."""
    return json.loads((DATA_DIR / "measurements" / "drift.json").read_text("utf-8"))


class DriftCurves(LabWidget):
    """KL against the decode step, for an offset in all layers or in one. Recorded, not live.

    offset  positions that each decode position is moved by
    layer   "all layers", or "layer 12 only"
    """

    script = "drift.js"
    curves: traitlets.List = traitlets.List().tag(sync=True)
    source = traitlets.Unicode().tag(sync=True)
    offset = traitlets.Int(16).tag(sync=True)
    layer = traitlets.Unicode("all layers").tag(sync=True)

    def __init__(self, **traits) -> None:
        record = read_record()
        curves = [
            {**curve, "layer": "all layers" if layer is None else f"layer {layer} only"}
            for curve, layer in ((curve, curve["layer"]) for curve in record["curves"])
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
