"""The paged decode kernel in Triton's interpreter, against float64, on irregular shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_case import TOLERANCE, paged_case

from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.paged_decode import paged_decode
from kvlab.kernels.reference import (
    merge,
    paged_decode_reference,
    paged_decode_torch,
    partial_attention,
    replay,
    trace_loads,
)
from kvlab.kernels.splits import split_range


def test_this_process_runs_the_interpreter() -> None:
    assert kernels.INTERPRETED, "tests/conftest.py sets TRITON_INTERPRET=1 before any import"


def agree(case, tolerance=None, **options) -> None:
    window, scale = options.get("window"), options.get("scale")
    out, lse = paged_decode(*case.tensors, **options)
    want, want_lse = paged_decode_reference(*case.tensors, window=window, scale=scale)
    tolerance = tolerance or TOLERANCE[case.query.dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    assert out.dtype == case.query.dtype and lse.dtype == torch.float32


SHAPES = [  # num_heads, num_kv_heads, head_dim, value_dim, block_size
    (1, 1, 16, 16, 1),
    (3, 1, 20, 20, 3),  # a group of three, padded lanes
    (9, 3, 64, 64, 16),  # SmolLM2-135M
    (7, 1, 80, 80, 16),  # a group of seven, head_dim 80
    (6, 6, 5, 5, 7),  # no sharing, a head narrower than a tile
    (12, 2, 24, 40, 5),  # values wider than keys
    (4, 2, 40, 8, 128),  # values narrower; one block holds a whole sequence
    (8, 1, 128, 128, 32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_equals_float64_on_irregular_shapes(shape, num_splits) -> None:
    h, h_kv, d, dv, block_size = shape
    case = paged_case([1, 70, 0, 33], h, h_kv, d, dv, block_size)
    agree(case, num_splits=num_splits)


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_lengths_around_tile_and_block_edges(seq_len) -> None:
    agree(paged_case([seq_len], 2, 1, block_size=16), num_splits=2)


@pytest.mark.parametrize("window", [1, 5, 32, 33, 64, 1000])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sliding_window_reads_only_the_window(window, num_splits) -> None:
    agree(
        paged_case([100, 3, 64], block_size=5, window=window), window=window, num_splits=num_splits
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_half_precision_inputs_accumulate_in_fp32(dtype, num_splits) -> None:
    agree(paged_case([70, 9], 6, 2, 24, block_size=6, dtype=dtype), num_splits=num_splits)


def test_scale_is_used() -> None:
    agree(paged_case([40]), scale=0.031)


def test_int64_tables_and_lengths() -> None:
    case = paged_case([40, 3])
    case.block_tables, case.seq_lens = case.block_tables.long(), case.seq_lens.long()
    agree(case)


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    h_kv = number(1, 3)
    seq_lens = [number(0, 90) for _ in range(number(1, 3))]
    window = number(1, 60) if number(0, 1) else None
    case = paged_case(
        seq_lens, h_kv * number(1, 9), h_kv, number(1, 70), number(1, 70), number(1, 40),
        seed=seed, window=window,
    )  # fmt: skip
    agree(case, num_splits=number(1, 9), window=window)


def test_an_empty_batch_gives_empty_tensors() -> None:
    case = paged_case([3])
    empty = (case.query[:0], case.key_cache, case.value_cache)
    out, lse = paged_decode(*empty, case.block_tables[:0], case.seq_lens[:0])
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_every_shipped_tile_gives_the_same_answer(capability, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_device_facts", lambda device: (capability, 1))
    agree(paged_case([50], 3, 1, 20, block_size=6), num_splits=2)


def test_the_kernel_loads_exactly_the_visible_rows_once_per_kv_head() -> None:
    case = paged_case([21, 0, 9], 6, 2, 8, 12, block_size=4)
    with trace_loads() as trace:
        paged_decode(*case.tensors, num_splits=2)
    visible = []
    for row, seq_len in enumerate(case.seq_lens.tolist()):
        table = case.block_tables[row].tolist()
        for turn in itertools.chain(*(replay(table, 4, seq_len, i, 2, 32) for i in range(2))):
            visible += turn.slots
    rows = sorted(slot * 2 + head for slot in visible for head in range(2))
    keys = sorted(row * 8 + lane for row in rows for lane in range(8))
    values = sorted(row * 12 + lane for row in rows for lane in range(12))
    assert sorted(trace.elements(case.key_cache)) == keys
    assert sorted(trace.elements(case.value_cache)) == values
    assert trace.bytes_loaded(case.key_cache) + trace.bytes_loaded(case.value_cache) == (
        30 * 2 * (8 + 12) * 4
    )


@pytest.mark.parametrize("window", [None, 40])
def test_replay_is_what_one_program_does(window) -> None:
    case = paged_case([75], 4, 2, 16, block_size=8, window=window)
    with trace_loads() as trace:
        paged_decode(*case.tensors, num_splits=3, window=window)
    table = case.block_tables[0].tolist()
    for split in range(3):
        turns = replay(table, 8, 75, split, 3, 32, window)
        program = (0, 1, split)
        slots = [e // 32 for e in trace.elements(case.key_cache, program=program) if e % 16 == 0]
        assert slots == [slot for turn in turns for slot in turn.slots]
        looked_up = trace.elements(case.block_tables, program=program)
        assert sorted(set(looked_up)) == [e for turn in turns for e in turn.table_entries]
        begin, end = split_range(75, split, 3, 32, window)
        first = max(75 - window, 0) if window else 0
        assert [p for turn in turns for p in turn.positions] == list(range(max(begin, first), end))


def test_partial_attentions_merge_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (3, 20, 20))
    whole, whole_lse = partial_attention(q, k, v, 0.4)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 19), slice(19, 20)]
    parts = [partial_attention(q, k[cut], v[cut], 0.4) for cut in cuts]
    out, lse = merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("window", [None, 20])
def test_the_programs_in_torch_are_the_kernel(window) -> None:
    case = paged_case([37, 0, 50], 6, 2, 12, 20, block_size=6, window=window)
    want, want_lse = paged_decode_torch(*case.tensors, window=window, num_splits=2)
    out, lse = paged_decode(*case.tensors, window=window, num_splits=2)
    torch.testing.assert_close(want, out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(want_lse, lse, atol=2e-6, rtol=2e-6)
