"""The kernel compiled for GPUs that are not here: what the machine code must and must not hold."""

from __future__ import annotations

import json

import pytest

from kvlab.kernels import report
from kvlab.kernels.splits import choose_tile


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    variants = report.shipped_variants()
    next(v for v in variants if v["arch"] == 90 and v["dtype"] == "bf16")["keep_text"] = True
    return report.compile_variants(variants)


def split_rows(rows: list[dict], *archs: int) -> list[dict]:
    names = {f"sm_{arch}" for arch in archs}
    return [r for r in rows if r["kernel"] == "decode_split" and (not archs or r["arch"] in names)]


def test_every_variant_compiles_without_spills_or_stack(rows) -> None:
    assert len(rows) >= 15
    for row in rows:
        assert "error" not in row, row
        assert row["spills"] == 0 and row["stack_bytes"] == 0, row
        assert set(report.COLUMNS) <= set(row)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_tensor_cores_and_asynchronous_copies_from_sm_80_on(rows, arch, dtype) -> None:
    (row,) = [r for r in split_rows(rows, arch) if r["dtype"] == dtype]
    assert row["supported"] and row["tensor_core"] >= 8 and row["async_copy"] >= 8, row
    assert row["registers"] <= 128 and row["shared_bytes"] <= 48 * 1024, row


def test_fp32_keeps_full_precision_and_still_copies_asynchronously(rows) -> None:
    for row in split_rows(rows, 80, 90):
        if row["dtype"] == "fp32":
            assert row["tensor_core"] == 0, "tensor cores would round fp32 to 10 bits of mantissa"
            assert row["async_copy"] >= 8 and row["registers"] <= 128, row


def test_sm_75_compiles_to_at_most_128_registers_and_is_marked_unsupported(rows) -> None:
    old = split_rows(rows, 75)
    assert {row["dtype"] for row in old} == {"fp16", "fp32"}, "a T4 has no bf16"
    for row in old:
        assert row["registers"] <= 128 and not row["supported"], row
        assert row["shared_bytes"] <= 64 * 1024
        assert row["tensor_core"] == 0 and row["async_copy"] == 0, "plain FMA, said as it is"


def test_krn_01_the_compiled_kernel_multiplies_in_64_bits(rows) -> None:
    (row,) = [r for r in rows if "ttir" in r]
    products = [
        line for line in row["ttir"].splitlines() if "arith.muli" in line and "_row_" in line
    ]
    assert len(products) >= 6, "block, slot and head, for keys and for values"
    assert all("i64" in line.split(" : ")[1] for line in products), products
    assert "mul.lo.s64" in row["ptx"] or "mad.lo.s64" in row["ptx"]


@pytest.mark.parametrize("capability", [75, 80])
def test_the_tile_fits_every_shape(capability) -> None:
    for group in (1, 3, 4, 7, 8, 16, 32):
        for head_dim in (5, 64, 80, 128, 192, 256, 512):
            tile = choose_tile(group, head_dim, head_dim, 2, capability)
            assert tile.block_g >= group and tile.block_d >= head_dim and tile.keys >= 16
            assert tile.keys * (tile.block_d + tile.block_v) * 2 <= 32 * 1024


def test_report_prints_one_line_of_json(monkeypatch, capsys, rows) -> None:
    monkeypatch.setattr(report, "compile_variants", lambda _: rows)
    assert report.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert report.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 1 and lines[0].split()[0] == "arch"


def test_a_spill_on_a_supported_card_fails_the_report(monkeypatch, rows) -> None:
    spoiled = [dict(row) for row in rows]
    spoiled[-1]["spills"] = 8
    monkeypatch.setattr(report, "compile_variants", lambda _: spoiled)
    assert report.main(["--json"]) == 1


def test_the_record_that_the_chapter_shows_is_what_compiles_now(rows) -> None:
    recorded = report.compile_record()
    versions = {row["triton"] for row in recorded}
    assert len(recorded) == len(rows) and len(versions) == 1
    if versions != {rows[0]["triton"]}:
        return  # another Triton makes other machine code; the record says which made it
    texts = {"seconds", "ttir", "ptx"}
    for old, new in zip(recorded, rows, strict=True):
        assert old == {k: v for k, v in new.items() if k not in texts}, (
            "run python -m kvlab.kernels.report --record data/kernel_report.json"
        )
