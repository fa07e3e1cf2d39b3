"""Public kernel faults, each as its smallest input (names carry the catalogue's row)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from paged_case import paged_case

from kvlab.kernels import KernelError
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.paged_decode import paged_decode
from kvlab.kernels.reference import (
    merge,
    paged_decode_reference,
    partial_attention,
    trace_loads,
)

# block_id or slot, its stride in elements, and whether the product fits 32 bits
OFFSETS = [
    (65_535, 16 * 2 * 8 * 128, True),
    (65_536, 16 * 2 * 8 * 128, False),
    (3_728_270, 576, True),
    (3_728_271, 576, False),
    (2_097_151, 1_024, True),
    (2_097_152, 1_024, False),
    (14_339, 149_760, True),
    (14_340, 149_760, False),
]


@pytest.mark.parametrize("row, stride, fits", OFFSETS)
def test_krn_01_offsets_need_64_bits(row, stride, fits) -> None:
    offset = kernels.kv_offset.fn  # the kernel's own arithmetic, called on numpy integers
    zero = np.zeros(1, np.int32)
    with np.errstate(over="ignore"):
        narrow = offset(np.array([row], np.int32), zero, zero, np.int32(stride), zero, zero)
    wide = offset(np.array([row], np.int64), zero, zero, np.int32(stride), zero, zero)
    assert wide.dtype == np.int64 and int(wide[0]) == row * stride
    assert narrow.dtype == np.int32 and (int(narrow[0]) == row * stride) is fits
    as_token = offset(zero, np.array([row], np.int64), zero, zero, np.int32(stride), zero)
    assert int(as_token[0]) == row * stride


def test_krn_01_block_65536_of_llama_3_8b_is_read_where_it_lies(tmp_path) -> None:
    shape = (65_537, 2, 16, 8, 128)  # K and V packed in a block: 4 GiB, of which two are written
    file = np.memmap(tmp_path / "sparse", dtype=np.float16, mode="w+", shape=shape)
    packed = torch.from_numpy(file)
    packed[65_535:] = torch.randn(2, *shape[1:], generator=torch.Generator().manual_seed(1))
    keys, values = packed[:, 0], packed[:, 1]
    query = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(2)).half()
    table, lens = torch.tensor([[65_536, 65_535]], dtype=torch.int32), torch.tensor([18])
    out, _ = paged_decode(query, keys, values, table, lens)
    near, _ = paged_decode(query, keys[65_534:], values[65_534:], table - 65_534, lens)
    assert torch.equal(out, near)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_krn_02_empty_sequences_and_empty_splits(num_splits) -> None:
    case = paged_case([5, 0, 3])
    out, lse = paged_decode(*case.tensors, num_splits=num_splits)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full_like(lse[1], float("-inf")))
    want, want_lse = paged_decode_reference(*case.tensors)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-6, rtol=2e-6)
    alone, _ = paged_decode(
        case.query[:1], case.key_cache, case.value_cache, case.block_tables[:1], case.seq_lens[:1],
        num_splits=num_splits,
    )  # fmt: skip
    assert torch.equal(alone[0], out[0]), "the empty neighbour changed this row"


def test_krn_02_seven_tokens_over_four_splits_of_three() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, dtype=torch.float64, generator=generator) for n in (2, 7, 7))
    parts = [partial_attention(q, k[i : i + 3], v[i : i + 3], 0.25) for i in (0, 3, 6, 9)]
    assert torch.isneginf(parts[3][1]).all() and not parts[3][0].any()
    out, lse = merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    whole, whole_lse = partial_attention(q, k, v, 0.25)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_krn_02_two_empty_parts_merge_to_nothing() -> None:
    out, lse = merge(torch.zeros(2, 3, 8), torch.full((2, 3), float("-inf")))
    assert torch.equal(out, torch.zeros(3, 8)) and torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_krn_04_nan_in_unwritten_slots_changes_nothing(dtype) -> None:
    poisoned = paged_case([13], block_size=4, fill=float("nan"), dtype=dtype)
    clean = paged_case([13], block_size=4, fill=0.0, dtype=dtype)
    last = int(poisoned.block_tables[0, 3])
    assert poisoned.key_cache[last, 1:].isnan().all(), "slots 13 to 15"
    assert poisoned.value_cache.isnan().any(dim=-1).sum() > 6, "foreign blocks as well"
    for num_splits in (1, 3):
        out, lse = paged_decode(*poisoned.tensors, num_splits=num_splits)
        want, want_lse = paged_decode(*clean.tensors, num_splits=num_splits)
        assert out.isfinite().all()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_krn_07_fp16_scores_beyond_65504() -> None:
    case = paged_case([20], 1, 1, 128, block_size=16, dtype=torch.float16)
    case.query[:] = 256
    for cache in (case.key_cache,):
        cache[~cache.isnan()] = 256
    out, lse = paged_decode(*case.tensors)
    table, lens = case.block_tables[0].long(), torch.arange(20)
    values = case.value_cache[table[lens // 16], lens % 16, 0].double()
    score = 128 * 256 * 256 * 128**-0.5
    assert score > 65_504
    torch.testing.assert_close(out[0, 0].double(), values.mean(0), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.item(), score + np.log(20), rtol=1e-6, atol=0.1)


def test_krn_08_slices_of_a_fused_qkv_buffer() -> None:
    fused = torch.randn(5, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    keys, values = fused[:, :, 4:6], fused[:, :, 6:8]  # [blocks, block_size, 2, 16]
    queries = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))[:, :4]
    tables, lens = torch.tensor([[1, 3], [4, 2]], dtype=torch.int32), torch.tensor([7, 5])
    strided = paged_decode(queries, keys, values, tables, lens)
    copied = paged_decode(
        queries.contiguous(), keys.contiguous(), values.contiguous(), tables, lens
    )
    assert torch.equal(strided[0], copied[0]) and torch.equal(strided[1], copied[1])


@pytest.mark.parametrize("first", ["blocks", "key or value"])
def test_krn_08_both_packings_of_k_and_v(first) -> None:
    constants = torch.arange(0.0, 4.0)  # block b holds b in K, 10 b in V
    shape = (4, 2, 4, 1, 16) if first == "blocks" else (2, 4, 4, 1, 16)
    packed = torch.empty(shape)
    keys, values = (packed[:, 0], packed[:, 1]) if first == "blocks" else (packed[0], packed[1])
    keys.copy_(constants.view(4, 1, 1, 1).expand(4, 4, 1, 16))
    values.copy_(10 * constants.view(4, 1, 1, 1).expand(4, 4, 1, 16))
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    for entries, expected in ((1, 30.0), (2, 20.0), (3, 20.0)):
        out, _ = paged_decode(
            torch.zeros(1, 1, 16), keys, values, table, torch.tensor([4 * entries])
        )
        torch.testing.assert_close(out, torch.full_like(out, expected))


def test_krn_08_head_major_caches() -> None:
    case = paged_case([30, 11], 6, 2, 24, block_size=4)
    out, lse = paged_decode(*case.tensors)
    head_major = [c.transpose(1, 2).contiguous() for c in (case.key_cache, case.value_cache)]
    tables = (case.block_tables, case.seq_lens)
    views = [cache.transpose(1, 2) for cache in head_major]
    stored, stored_lse = paged_decode(case.query, *views, *tables)
    mixed, _ = paged_decode(case.query, case.key_cache, views[1], *tables)
    with pytest.raises(KernelError, match=r"pass them \.transpose\(1, 2\)"):
        paged_decode(case.query, *head_major, *tables)
    assert torch.equal(out, stored) and torch.equal(lse, stored_lse) and torch.equal(out, mixed)


def in_a_new_process(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=clean | environment,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_krn_09_without_the_interpreter_a_cpu_tensor_is_refused_by_name() -> None:
    words = in_a_new_process(
        "import os, torch\n"
        "import kvlab.kernels.paged_decode as kernels\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"  # too late: Triton is imported
        "z = torch.zeros\n"
        "try: kernels.paged_decode(z(1, 1, 16), z(1, 4, 1, 16), z(1, 4, 1, 16),"
        " z(1, 1, dtype=torch.int32), z(1, dtype=torch.int32))\n"
        "except kernels.KernelError as error: print('refused:', error)\n"
    )
    assert "refused:" in words and "TRITON_INTERPRET=1" in words, words


def test_krn_09_the_interpreter_can_be_chosen_after_the_package_is_imported() -> None:
    code = "import sys, kvlab.kernels.splits; print({'torch', 'triton', 'numpy'} & {*sys.modules})"
    assert in_a_new_process(code) == "set()\n", "splits also runs in the page, without torch"


def test_krn_09_bf16_is_widened_in_the_interpreter() -> None:
    case = paged_case([40], 4, 1, 32, dtype=torch.bfloat16)
    out, _ = paged_decode(*case.tensors)
    want, _ = paged_decode_reference(*case.tensors)
    assert (out.double() - want).abs().max() < 2e-2, "tl.dot would multiply raw bf16 bits"


def test_page_07_an_id_past_the_pool_is_rejected_on_read() -> None:
    case = paged_case([8], block_size=4)
    caches = (case.key_cache[:4], case.value_cache[:4])
    table = torch.tensor([[1, 4]], dtype=torch.int32)
    for bad in (table, torch.tensor([[1, -1]]), torch.tensor([[1, 0]])):
        with pytest.raises(KernelError, match=r"block_tables\[0, 1\]"):
            paged_decode(case.query, *caches, bad, case.seq_lens)
    # An engine that checked once per step skips the check: nothing foreign is loaded even so,
    # and the row says that something is wrong.
    with trace_loads() as trace:
        out, _ = paged_decode(case.query, *caches, table, case.seq_lens, check=False)
    assert max(trace.elements(case.key_cache)) < 4 * 4 * 2 * 16
    assert out.isnan().all()


def test_page_07_the_last_tile_does_not_read_past_the_table_row() -> None:
    case = paged_case([10, 5], block_size=4)  # three entries; a tile covers eight blocks
    rows = torch.full((2, 9), -7, dtype=torch.int32)
    rows[:, :3] = case.block_tables[:, :3]
    case.block_tables = rows[:, :3]
    with trace_loads() as trace:
        paged_decode(*case.tensors)
    read = trace.elements(rows)
    assert set(read) == {0, 1, 2, 9, 10}, "entry 3 of no row"


def test_without_triton_everything_else_works_and_the_launcher_says_why() -> None:
    words = in_a_new_process(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from kvlab.notebook import exercises\n"
        "from kvlab.kernels import KernelError, choose, paged_decode, reference, report\n"
        "z = torch.zeros\n"
        "case = (torch.ones(1, 2, 16), z(2, 4, 1, 16), torch.ones(2, 4, 1, 16),"
        " torch.ones(1, 1, dtype=torch.int32), torch.tensor([3]))\n"
        "print(reference.paged_decode_torch(*case)[0].unique().tolist())\n"
        "print(choose.choose_backend().reason, paged_decode.kernel_device())\n"
        "try: paged_decode.paged_decode(*case)\n"
        "except KernelError as error: print('refused:', error)\n"
        "print([exercises.verdict(e.id, e.solution)[0] for e in exercises.chapter_exercises(6)])\n"
        "print('report', report.main([]))\n"
    )
    assert "[1.0]" in words and "torch: Triton is not installed" in words, words
    assert "refused: Triton is not installed" in words and "None" in words, words
    assert "[True, True, True, True, True]" in words, words
    assert "Traceback" not in words and "report " in words, words
