"""One pair of a head, turned by position: shift the query or the key and watch the score."""

from __future__ import annotations

import math

import torch
import traitlets

from kvlab.rope import apply_rope, rope_inv_freq, rope_tables
from kvlab.specs import RopeSpec
from kvlab.widgets.base import LabWidget, Twin

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
        inv_freq, _ = rope_inv_freq(rope)
        super().__init__(inv_freq=[float(value) for value in inv_freq], **traits)

    def twin(self) -> Twin:
        """The score at the start, after each of the three shifts, and far away."""
        m, n = self.query_pos, self.key_pos
        cases = (
            ("start", m, n),
            ("query shifted by 1", m + 1, n),
            ("key shifted by 1", m, n + 1),
            ("both shifted by 1", m + 1, n + 1),
            ("both shifted by 1,000", m + 1000, n + 1000),
        )
        rows = [
            (name, q, k, q - k, f"{pair_score(self._rope, self.pair, q, k):.3f}")
            for name, q, k in cases
        ]
        return Twin(
            f"Score of pair {self.pair} when positions move",
            ("", "query at m", "key at n", "m - n", "score q . k"),
            rows,
            note=f"The pair turns by {self.inv_freq[self.pair]:.4f} radians a position.",
        )
