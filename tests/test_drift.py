"""The drift laboratory: one forward equals the cached run it stands for; the record is whole."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kvlab import faults
from kvlab.faults.drift import (
    TEXT,
    cached_logits,
    checkpoint,
    drift,
    shifted_drift,
    shifted_logits,
    text_ids,
)
from kvlab.faults.scenes import tiny_model
from kvlab.notebook.widgets.positions import DriftCurves, Rotate, pair_score, read_record
from kvlab.rope import rope_inv_freq
from kvlab.specs import RopeSpec


def test_one_forward_equals_a_cached_run_whose_decode_positions_are_off_by_one():
    model, ids = tiny_model(), tuple((7 * i) % 50 for i in range(20))
    with faults.fault("decode_position_off_by_one"):
        cached = cached_logits(model, ids, 8)
    torch.testing.assert_close(shifted_logits(model, ids, 8, 1), cached, atol=1e-4, rtol=1e-4)
    assert (shifted_logits(model, ids, 8, 0) - cached).abs().max() > 1e-3


def test_moving_one_layer_lies_between_moving_none_and_all():
    model, ids = tiny_model(), tuple((7 * i) % 50 for i in range(20))
    right, all_moved = (shifted_logits(model, ids, 8, offset) for offset in (0, 3))
    one = shifted_logits(model, ids, 8, 3, layer=1)
    assert (one - right).abs().max() > 1e-3 and (one - all_moved).abs().max() > 1e-3
    torch.testing.assert_close(one[0], right[0])  # step 0 is the prompt's: nothing moved yet


@pytest.mark.real
def test_record_was_made_from_this_text_and_these_weights():
    record = read_record()
    assert record["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()[:16]
    assert record["num_layers"] == checkpoint().spec.num_layers
    now = shifted_drift(1, None, record["prompt_len"], record["num_steps"])
    kept = next(c for c in record["curves"] if c["offset"] == 1 and c["layer"] is None)
    for fresh, old in zip(now.kl, kept["kl"], strict=True):
        assert fresh == pytest.approx(old, rel=0.05, abs=1e-6)
    assert now.first_differing == kept["first_differing"]


def test_record_says_where_it_comes_from():
    record = read_record()
    for key in ("what", "command", "model", "dtype", "torch", "machine", "date"):
        assert record[key]
    assert all(len(curve["kl"]) == record["num_steps"] + 1 for curve in record["curves"])
    widget = DriftCurves()
    assert record["date"] in widget.source and len(widget.twin().rows) >= 5


@pytest.mark.real
def test_drift_refuses_more_text_than_there_is():
    with pytest.raises(faults.FaultError, match="tokens"):
        drift(prompt_len=len(text_ids()), num_steps=8)


def test_pair_score_depends_on_the_difference_only():
    rope = RopeSpec(10_000.0, 64)
    start = pair_score(rope, 4, 6, 4)
    assert pair_score(rope, 4, 7, 5) == pytest.approx(start, abs=1e-5)
    assert abs(pair_score(rope, 4, 7, 4) - start) > 0.01
    widget = Rotate(rope)
    assert widget.inv_freq == pytest.approx(rope_inv_freq(rope)[0].tolist())
    scores = [row[-1] for row in widget.twin().rows]
    assert scores[0] == scores[3] == scores[4] and len({*scores[:3]}) == 3
