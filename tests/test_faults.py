"""The whole registry: each fault shows its symptom, each detector fires on it, and on it alone."""

from __future__ import annotations

import json
import re

import pytest
import torch

from book.extension.field_guide import field_guide_markdown, read_record
from kvlab import faults
from kvlab.faults.detectors import check_heads
from kvlab.faults.drift import checkpoint, compare, drift, text_ids
from kvlab.faults.registry import (
    LAYERS,
    TEXTS,
    Fault,
    replaced,
    replaced_places,
    suspended,
    watched,
)
from kvlab.faults.scenes import tiny_model
from kvlab.generate import cached_generate
from kvlab.rope import apply_rope
from kvlab.sheet.cli import main

ALL = faults.all_faults()
EACH = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def nothing_left_on():
    """No test may leave a switch behind."""
    yield
    faults.off()
    assert replaced_places() == []


@EACH
def test_detector_fires_on_its_fault_and_is_silent_without_it(entry: Fault):
    entry.detect()
    with faults.fault(entry.name), pytest.raises(faults.FaultDetected, match=r"\d"):
        entry.detect()
    entry.detect()


@pytest.mark.real
@EACH
def test_symptom_is_measured(entry: Fault):
    """On the checkpoint where the fault is one of the model or its cache; else in its own unit."""
    quiet = entry.measure()
    assert quiet < entry.threshold
    with faults.fault(entry.name):
        wrong = entry.measure()
    if entry.visible:
        assert wrong > entry.threshold
    else:
        assert wrong < entry.threshold


@pytest.mark.real
def test_all_detectors_are_silent_over_512_steps_of_the_checkpoint():
    """One run of 512 decode steps with every live detector in place."""
    loaded = checkpoint()
    steps = []
    with faults.watch() as placed:
        outputs = cached_generate(
            loaded.model, loaded.encode("The keeper wrote"), 513, on_step=steps.append
        )
    assert len(outputs) == 513 and steps[-1].t == 512
    assert len(placed) >= 6


@EACH
def test_detector_is_silent_over_512_steps_where_it_has_no_live_form(entry: Fault):
    """Detectors that bring their own small scenario run it for 512 steps."""
    if entry.watch is None:
        entry.detect(steps=512)
    else:
        assert callable(entry.watch)  # covered by the run above


@EACH
def test_every_entry_is_complete(entry: Fault):
    for text in (
        entry.symptom, entry.smallest_input, entry.looks_like, entry.detector, entry.cure,
    ):  # fmt: skip
        assert len(text) > 10 and text.rstrip().endswith((".", "`"))
    assert re.fullmatch(r"[a-z0-9_]+", entry.name)
    assert entry.source and entry.unit and entry.threshold > 0


def test_the_faults_that_the_book_promises_are_there():
    names = {entry.name for entry in ALL}
    assert names >= {
        "decode_position_off_by_one", "decode_position_restarts", "shared_counter_under_padding",
        "query_offset_mutated_in_place", "interleaved_for_half_split",
        "scaling_parsed_not_applied", "bf16_angles", "uniform_shift",
        "heads_expanded_before_write", "heads_tiled", "top_left_mask", "layout_confused",
        "stale_rollback", "write_before_rotate",
    }  # fmt: skip


@pytest.mark.real
def test_one_line_switches_a_fault_on_and_off():
    right = drift(num_steps=4).mean_kl
    faults.on("decode_position_restarts")
    faults.on("decode_position_restarts")  # twice is once
    assert faults.is_on() == ["decode_position_restarts"]
    assert drift(num_steps=4).mean_kl > 1e-3
    faults.off("decode_position_restarts")
    assert drift(num_steps=4).mean_kl == right


def test_an_error_inside_the_block_still_puts_everything_back():
    for entry in ALL:
        with pytest.raises(ZeroDivisionError), faults.fault(entry.name):
            raise ZeroDivisionError
        assert replaced_places() == []


def test_an_unknown_name_is_a_named_error_that_lists_the_known_ones():
    with (
        pytest.raises(faults.FaultError, match="decode_position_off_by_one"),
        faults.fault("off_by_one"),
    ):
        pass


def test_code_and_data_name_the_same_faults_layer_by_layer():
    assert [entry.name for entry in ALL] == list(TEXTS)  # a fault without texts is not registered
    layers = [entry.layer for entry in ALL]
    assert set(layers) == set(LAYERS) and layers == sorted(layers, key=list(LAYERS).index)


class Thing:
    def value(self, x):
        return x


def test_a_detector_sees_what_the_original_gets_whatever_the_order():
    seen = []

    def fault(original, self, x):
        return original(self, x + 1)

    def detector(original, self, x):
        seen.append(x)
        return original(self, x)

    place = (Thing, "value")
    for first, second in (
        (replaced(place, fault), watched((place, detector))),
        (watched((place, detector)), replaced(place, fault)),
    ):
        with first, second:
            assert Thing().value(1) == 2
            with suspended():
                assert Thing().value(1) == 1
    assert seen == [2, 2]


@pytest.mark.real
def test_pos_01_uniform_shift_is_invisible_to_outputs_and_visible_to_positions():
    loaded, prompt = checkpoint(), list(text_ids()[:24])
    right = cached_generate(loaded.model, prompt, 24)
    with faults.fault("uniform_shift"):
        assert cached_generate(loaded.model, prompt, 24) == right
        with pytest.raises(faults.FaultDetected), faults.watch("uniform_shift"):
            cached_generate(loaded.model, prompt, 2)


def test_att_03_heads_of_the_checkpoint_are_grouped_in_threes():
    check_heads(9, 3)
    with (
        faults.fault("heads_tiled"),
        pytest.raises(faults.FaultDetected, match=r"\[0, 1, 2, 0, 1, 2, 0, 1, 2\]"),
    ):
        check_heads(9, 3)
    with faults.fault("heads_tiled"):  # the two ends cannot tell
        check_heads(4, 1)
        check_heads(4, 4)


def test_drift_of_a_run_with_itself_is_zero():
    logits = torch.randn(4, 10)
    same = compare(logits, logits, [1, 2, 3])
    assert same.mean_kl == 0 and same.first_differing is None
    assert same.perplexity == same.right_perplexity


def test_command_lists_every_fault(capsys):
    assert main(["faults", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [entry.name for entry in ALL]
    assert set(rows[0]) == {"name", "layer", "symptom", "detector", "source"}
    assert main(["faults"]) == 0
    text = capsys.readouterr().out
    assert all(entry.name in text for entry in ALL)


@EACH
def test_record_holds_what_the_field_guide_prints(entry: Fault):
    kept = read_record()["faults"][entry.name]
    assert kept["off"] is not None and kept["off"] < entry.threshold
    assert (kept["on"] is None or kept["on"] > entry.threshold) == entry.visible


def test_field_guide_has_an_entry_for_every_fault():
    page = field_guide_markdown()
    for entry in ALL:
        assert f"### `{entry.name}`" in page and entry.cure in page
    assert "https://github.com/GeeeekExplorer/nano-vllm/issues/67" in page
    assert page.count("\n### ") == len(ALL)


def test_pos_20_a_key_rotated_twice():
    """The pair (1, 0), speed 1, position 1, attention factor 1.3465736."""
    factor, pair = 1.3465736, torch.tensor([[[1.0, 0.0]]])
    cos, sin = (factor * turn(torch.ones(1, 1)) for turn in (torch.cos, torch.sin))
    once = apply_rope(pair, cos, sin)
    twice = apply_rope(once, cos, sin)
    torch.testing.assert_close(once[0, 0], torch.tensor([0.727557, 1.133103]), atol=1e-6, rtol=0)
    torch.testing.assert_close(twice[0, 0], torch.tensor([-0.754583, 1.648793]), atol=1e-6, rtol=0)
    name, seen = "keys_rotated_twice", pytest.raises(faults.FaultDetected, match=r"R.position. W x")
    with faults.fault(name), faults.watch(name), seen:
        cached_generate(tiny_model(), [1, 2, 3, 4], 3)
