"""The bench compares like with like, and its record says what its samples say."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from small_models import tiny_spec

from bench import ablation, llamacpp, record
from bench.cases import timed
from book.extension import bench_page
from book.extension.bench_page import recorded_processors
from kvlab.fast import products_for
from kvlab.model import Decoder, random_weights
from kvlab.notebook import bench_record
from kvlab.notebook.bench_record import recorded
from kvlab.rope import interleave_permutation


@pytest.fixture(scope="module")
def models():
    weights = random_weights(tiny_spec())
    model = Decoder(tiny_spec(), weights, products_for("cpu"))
    return model, ablation.row_major_copy(weights, model)


def test_every_variant_computes_the_same_step(models):
    """What is taken away is speed: logits agree, so the times are of the same work."""
    model, row_major = models
    expected = None
    for name, call in ablation.variants(model, row_major, context=24).items():
        seen = []
        before = [Decoder.forward]

        def forward(self, *arguments, before=before, seen=seen, **options):
            seen.append(before[0](self, *arguments, **options))
            return seen[-1]

        Decoder.forward = forward
        try:
            call()
        finally:
            Decoder.forward = before[0]
        expected = seen[0] if expected is None else expected
        torch.testing.assert_close(seen[0], expected, atol=2e-5, rtol=0, msg=name)


def test_variants_leave_the_package_as_it_was(models):
    model, row_major = models
    calls = ablation.variants(model, row_major, context=8)
    before = [calls["all of them"]() for _ in range(2)]
    for call in calls.values():
        call()
    assert torch.equal(calls["all of them"](), before[0])


def test_row_major_is_the_same_model_in_another_order(models):
    model, row_major = models
    for a, b in zip(model.layers, row_major.layers, strict=True):
        assert torch.equal(a.gate_up_proj, b.gate_up_proj)
        assert b.gate_up_proj.is_contiguous() and not a.gate_up_proj.is_contiguous()


def test_rows_for_llama_cpp_are_the_permutation_of_interleaved_pairs():
    weight = torch.arange(2 * 8 * 3.0).view(16, 3)  # two heads of eight
    exported = llamacpp._interleave(weight, heads=2)
    back = interleave_permutation(8)  # interleaved -> half-split, of one head
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        assert torch.equal(exported[rows][back], weight[rows])


def test_timed_takes_turns_and_keeps_both_clocks():
    order = []
    samples = timed({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b"] * 3
    assert set(samples) == {"wall", "cpu"} and len(samples["wall"]["a"]) == 2
    assert record.ratios({"a": [2.0, 3.0], "b": [1.0, 1.0]}, "b") == {"a": 2.5, "b": 1.0}


def test_a_busy_machine_is_compared_by_processor_time():
    quiet = {"machine": {"cores": 2}, "cases": {"a": {"load_average_after": 2.2}, "pages": {}}}
    busy = {"machine": {"cores": 2}, "cases": {"a": {"load_average_after": 9.0}, "pages": {}}}
    assert (bench_record.clock_of(quiet), bench_record.clock_of(busy)) == ("wall", "cpu")


def cases():
    named = [
        (f"{processor}: {name}", case)
        for processor, whole in recorded_processors().items()
        for name, case in whole["cases"].items()
    ]
    for name, case in named:
        if "points" in case:
            yield from ((f"{name}, s = {s}", point) for s, point in case["points"].items())
        elif "batches" in case:
            yield from ((f"{name}, {part}", case[part]) for part in ("batches", "ragged"))
        elif "ratio_wall" in case:
            yield name, case


@pytest.mark.parametrize(("name", "case"), list(cases()), ids=lambda value: str(value)[:40])
def test_recorded_medians_and_ratios_follow_from_the_samples(name, case):
    for clock in ("wall", "cpu"):
        base = case[clock][case["base"]]["samples"]
        for loop, measured in case[clock].items():
            samples = measured["samples"]
            assert measured["median_seconds"] == pytest.approx(statistics.median(samples), abs=2e-6)
            ratio = statistics.median(a / b for a, b in zip(samples, base, strict=True))
            assert case[f"ratio_{clock}"][loop] == pytest.approx(ratio, rel=0.02, abs=2e-3), name


@pytest.mark.parametrize("name", recorded_processors())
def test_record_names_machine_versions_and_weights(name):
    machine = recorded(name)["machine"]
    for key in ("cpu", "cores", "torch", "transformers", "weights", "load_average"):
        assert machine[key] is not None
    assert bench_record.cases_of(recorded(name), "decode")


def test_records_of_several_processors_stand_side_by_side(monkeypatch):
    shown = []
    monkeypatch.setattr(bench_page, "table", lambda rows, *_: shown.extend(rows))
    mine = copy.deepcopy(recorded("cpu"))
    mine["machine"]["cpu"] = "without llama.cpp"
    for case in ("decode, fp32, 1 thread", "decode, bf16, 1 thread"):
        for clock in ("wall", "cpu"):
            mine["cases"][case][f"ratio_{clock}"].pop("llama.cpp")
    bench_page.show_processors({"cpu": recorded("cpu"), "cpu-mine": mine})
    for row in shown:
        label, here, there = row.values()
        assert there == ("" if "llama.cpp" in label else here) and here
    batches = mine["cases"]["engine, fp32, 1 thread"]["batches"]["wall"]
    one, sixteen = (batches[f"batch {n}"]["median_seconds"] for n in (1, 16))
    gains = {row["one thread"]: list(row.values())[1] for row in shown}
    assert gains["fp32: tokens a second, 16 requests / 1"] == f"{16 * one / sixteen:.1f}"
