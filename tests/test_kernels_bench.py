"""The bench without a GPU: what it says, what it refuses, and what a record holds."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu as bench
from kvlab.kernels import KernelError


def test_without_a_gpu_it_says_so_and_ends_well(capsys) -> None:
    assert bench.main(["--quick"]) == 0
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
    monkeypatch.setattr(bench, "make_tensors", lambda shape, dtype: make(shape, dtype, "cpu"))
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
