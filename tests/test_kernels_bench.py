"""The bench without a GPU: what it says, what it refuses, and what a record holds."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small_models import tiny_spec

from bench import gpu as bench
from kvlab import costs
from kvlab.checkpoint import CheckpointError
from kvlab.kernels import KernelError
from kvlab.model import Decoder, random_weights
from kvlab.notebook.bench_record import against_roofline, engine_against_roofline, gpu_records
from kvlab.notebook.measure import runtime


def test_without_a_gpu_it_says_so_and_ends_well(capsys) -> None:
    assert bench.main([]) == 0
    assert "no GPU" in capsys.readouterr().out


def test_a_wrong_kernel_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(
        bench, "paged_decode", lambda query, *_, **__: (torch.zeros_like(query), None)
    )
    with pytest.raises(KernelError, match="Nothing was timed"):
        bench.check_results([torch.float32], "cpu")


def test_krn_09_the_device_check_covers_the_interpreters_grid() -> None:
    cases = bench.check_results([torch.float32], "cpu")
    assert len(cases) == 12 and max(case["largest_error"] for case in cases) < 1e-5


@pytest.fixture
def on_the_cpu(monkeypatch):
    make = bench.make_tensors
    monkeypatch.setattr(bench, "make_tensors", lambda shape, dtype, *_: make(shape, dtype, "cpu"))
    monkeypatch.setattr(bench, "gpu_seconds", lambda run: [2e-3, 1e-3, 4e-3])


def test_a_row_relates_bytes_to_the_copy(on_the_cpu) -> None:
    shape = bench.Shape(2, 64, 16, 4, 2, 16)
    row = bench.time_shape(shape, torch.float32, copied_per_second=2**24)
    assert row["kv_bytes"] == 2 * 64 * 2 * (16 + 16) * 4
    assert row["kv_bytes_per_second"] == row["kv_bytes"] / 2e-3
    assert row["share_of_copy"] == row["kv_bytes_per_second"] / 2**24
    assert {"kvlab", "torch, enable_gqa", "torch, group folded"} <= set(row["seconds"])
    assert all(times == 1 for times in row["times_as_fast_as"].values())
    json.dumps(row)


def test_another_kernel_that_fails_is_recorded(on_the_cpu, monkeypatch) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("not this shape")

    monkeypatch.setattr(bench, "other_kernels", lambda *_: {"other": broken})
    row = bench.time_shape(bench.Shape(1, 16, 16, 2, 1, 16), torch.float32, 1.0)
    assert row["failed"] == {"other": "RuntimeError: not this shape"}


def test_the_others_agree_with_the_kernel() -> None:
    case = bench.make_tensors(bench.Shape(2, 32, 16, 4, 2, 16), torch.float32, "cpu")
    want, _ = bench.paged_decode(*case)
    for name, run in bench.other_kernels(*case[:4]).items():
        torch.testing.assert_close(run(), want, atol=1e-5, rtol=1e-5, msg=name)


# -- the whole run, as on a card ---------------------------------------------------------


CARD = {"hardware": "a card", "dtype": "float32", "l2_bytes": 0, "date": "2026-01-01"}


@pytest.fixture
def run(on_the_cpu, monkeypatch, tmp_path):
    """measure(), small enough for Triton's interpreter; gives (record, the file's record)."""
    spec = tiny_spec(vocab_size=40_000, max_position_embeddings=512)
    model = Decoder(spec, random_weights(spec))
    monkeypatch.setattr(bench, "the_model", lambda dtype, device: (model, "tiny"))
    monkeypatch.setattr(bench, "gpu_seconds_of_a_copy", lambda num_bytes: [1.0])
    monkeypatch.setattr(bench, "streamed_bytes_per_second", lambda device: 2.0**20)
    monkeypatch.setattr(bench, "matrix_flops_per_second", lambda dtype, device: 2.0**30)
    small = partial(bench.engine_part, batches=(1, 2), context=5, count=4, rounds=1)
    monkeypatch.setitem(bench.PARTS, "engine", small)
    shapes = [bench.Shape(1, 2048, 64, 2, 1, 16), bench.Shape(2, 64, 16, 32, 8, 16)]
    monkeypatch.setitem(bench.PARTS, "shapes", partial(bench.shapes_part, shapes=shapes))
    path = tmp_path / "gpu_a-card.json"

    def run(*only, seconds=600.0):
        record = bench.measure(dict(CARD), list(only or bench.PARTS), seconds, path, "cpu")
        return record, json.loads(path.read_text())

    return run


def test_a_run_measures_all_parts_and_holds_them_against_the_goals(run, tmp_path, capsys) -> None:
    record, written = run()
    assert written == json.loads(json.dumps(record)) and record["failed"] == {}
    assert record["engine"]["same_ids_float32"] == record["engine"]["of_requests"] == 6
    assert [case["batch"] for case in record["engine"]["batches"]] == [1, 2]
    assert len(record["kernel"]) == 12 * 2 and len(record["shapes"]) == 2
    lines = "\n".join(bench.against_goals(record))
    assert "1: " in lines and "not measured" in lines and "6 of 6" in lines  # no FlashInfer here
    assert capsys.readouterr().err.count("shapes") == 2
    assert gpu_records(tmp_path) == [written]
    (row,) = against_roofline(written)  # Llama-3-8B's heads only
    assert (row["sequences"], row["tokens"], row["measured_seconds"]) == (2, 64, 2e-3)
    assert row["predicted_seconds"] == record["shapes"][1]["kv_bytes"] / (2 * bench.COPIED_BYTES)
    rows = engine_against_roofline(written, tiny_spec())
    weights, cached = costs.streamed_params(tiny_spec()), costs.kv_bytes(tiny_spec(), 5, 4)
    assert [row["floor_seconds"] for row in rows] == [
        (4 * weights + batch * cached) / 2**20 for batch in (1, 2)
    ]


def test_a_wrong_kernel_ends_the_timing_and_the_record_says_so(run, monkeypatch) -> None:
    monkeypatch.setattr(
        bench, "paged_decode", lambda query, *_, **__: (torch.zeros_like(query), None)
    )
    record, written = run()
    assert "Nothing was timed" in written["failed"]["kernel"] and "roofs" in written
    assert {"engine", "shapes"} <= set(written["failed"]) and "shapes" not in written
    assert any("kernel broke off" in line for line in bench.against_goals(record))


def test_a_part_that_breaks_off_leaves_what_it_had(run, monkeypatch) -> None:
    def breaks_off(record, device):
        yield [{"seq_len": 1}]
        raise RuntimeError("the card is gone")

    monkeypatch.setitem(bench.PARTS, "kernel", breaks_off)
    _, written = run("kernel")
    assert written["kernel"] == [{"seq_len": 1}]
    assert written["failed"] == {"kernel": "RuntimeError: the card is gone"}


def test_when_time_is_up_no_shape_is_begun(run) -> None:
    record, _ = run("shapes", seconds=0.0)
    assert set(record) - set(CARD) == {"kernel", "roofs", "shapes", "failed"}  # what it needs, first
    assert len(record["shapes"]) == 1 and not record["failed"]


def test_a_shape_without_room_is_part_of_the_record(run, monkeypatch) -> None:
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench, "time_shape", full)
    record, _ = run("shapes")
    assert [row["failed"] for row in record["shapes"]] == [{"kvlab": "no room"}] * 2
    assert "not measured" in bench.against_goals(record)[1]


def test_without_the_checkpoint_the_engine_runs_on_random_weights_and_says_so(monkeypatch) -> None:
    def missing(**_):
        raise CheckpointError("no network")

    monkeypatch.setattr(bench, "load", missing)
    monkeypatch.setattr(bench, "preset", lambda name: tiny_spec())
    model, source = bench.the_model(torch.float32, "cpu")
    assert model.spec == tiny_spec() and "random" in source and "no network" in source


def test_one_line_says_what_runs_where(monkeypatch) -> None:
    spec = tiny_spec()
    model = Decoder(spec, random_weights(spec))
    line = runtime(model)
    assert "thread" in line and "Weights in float32. Loops attend in torch, an engine in torch: " in line
    half = runtime(Decoder(spec, random_weights(spec, dtype=torch.bfloat16)))
    assert "bfloat16 (left to itself, load() takes fp32" in half

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 24 * 10**9))
    card = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16)
    line = runtime(card)
    assert "NVIDIA L4, compute capability 8.9, 20.0 of 24.0 GB free" in line
    assert "float16 (left to itself, load() takes bf16: compute capability 8.9" in line
