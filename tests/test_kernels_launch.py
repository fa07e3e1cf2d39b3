"""What the launcher refuses, by name, and the rule for the number of splits."""

from __future__ import annotations

import pytest
import torch
from paged_case import paged_case

from kvlab.kernels import KernelError
from kvlab.kernels.paged_decode import check_block_tables, paged_decode
from kvlab.kernels.reference import paged_decode_torch
from kvlab.kernels.splits import (
    choose_num_splits,
    num_tiles,
    split_range,
    split_table,
    wave_efficiency,
)


def spoil(**changes) -> tuple[torch.Tensor, ...]:
    case = paged_case([9, 4])
    for name, change in changes.items():
        setattr(case, name, change(getattr(case, name)))
    return case.tensors


REFUSED = [
    (dict(query=lambda t: t[0]), "num_seqs, num_heads, head_dim"),
    (dict(query=lambda t: t[:, :3]), "multiple of num_kv_heads"),
    (dict(query=lambda t: t[..., :8].contiguous()), "pass them .transpose"),
    (dict(value_cache=lambda t: t[:2]), "must agree"),
    (dict(seq_lens=lambda t: t[:1]), "1 rows for 2 queries"),
    (dict(seq_lens=lambda t: t - 9), "0 or more"),
    (dict(seq_lens=lambda t: t.float()), "int32 or int64"),
    (dict(query=lambda t: t.half()), "one and the same"),
    (dict.fromkeys(("query", "key_cache", "value_cache"), torch.Tensor.double), "float32, float16"),
    (dict(seq_lens=lambda t: t.to("meta")), "one device"),
    (dict(key_cache=lambda t: t.mT.contiguous().mT), "key_cache has stride 2"),
    (dict.fromkeys(("key_cache", "value_cache"), lambda t: t[:, :0]), "a block_size above 0"),
    (dict.fromkeys(("query", "key_cache"), lambda t: t[..., :0]), "expected a head_dim"),
    (dict(seq_lens=lambda t: torch.stack((t, t), dim=1)[:, 0]), "seq_lens has stride 2"),
    (dict(block_tables=lambda t: t + 1000), "cache has blocks 1 to 6"),
    (dict(block_tables=lambda t: t * 0), r"block_tables\[0, 0\] is 0; .* block 0 holds nothing"),
    (dict(block_tables=lambda t: t[:, :2]), "3 blocks of 4"),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=[words for _, words in REFUSED])
def test_wrong_inputs_raise_named_errors(changes, words) -> None:
    for decode in (paged_decode, paged_decode_torch):
        with pytest.raises(KernelError, match=words):
            decode(*spoil(**changes))


SETTINGS = [
    *({"window": bad} for bad in (0, -1, 2.5, True)),
    *({"num_splits": bad} for bad in (0, 129, 1.5)),
    *({"scale": bad} for bad in (float("nan"), float("inf"))),
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_wrong_settings_raise_named_errors(options) -> None:
    for decode in (paged_decode, paged_decode_torch):
        with pytest.raises(KernelError, match=f"{next(iter(options))} .*; expected None or"):
            decode(*paged_case([9]).tensors, **options)


def test_blocks_behind_the_window_may_be_gone() -> None:
    case = paged_case([40], block_size=4, window=6)
    assert int(case.block_tables[0, 0]) == 10**6
    check_block_tables(case.block_tables, case.seq_lens, 13, 4, window=6)
    with pytest.raises(KernelError):
        check_block_tables(case.block_tables, case.seq_lens, 13, 4)


def test_splits_cover_every_position_once() -> None:
    for seq_len in (0, 1, 31, 32, 33, 1000):
        for num_splits in (1, 2, 7, 40):
            for window in (None, 1, 50):
                first = max(seq_len - window, 0) if window else 0
                seen = []
                for split in range(num_splits):
                    begin, end = split_range(seq_len, split, num_splits, 32, window)
                    seen += range(max(begin, first), end)
                assert seen == list(range(first, seq_len))


def test_a_full_card_is_not_split() -> None:
    assert choose_num_splits(32, 8, 4096, 108, 32) == 1  # 256 programs for 216 slots
    assert choose_num_splits(1, 8, 30, 108, 32) == 1  # one tile cannot be split
    assert choose_num_splits(0, 8, 4096, 108, 32) == 1


def test_a_single_sequence_is_split_until_the_card_is_busy() -> None:
    splits = choose_num_splits(1, 8, 4096, 108, 32)
    assert wave_efficiency(8 * splits, 216) > 0.8
    assert 8 * splits <= 216, "one wave, not a wave and a remainder"


def test_the_rule_has_no_cliff() -> None:
    """The busiest slot walks little more than its fair share of tiles, at any context length."""
    for batch in (1, 2, 5, 8, 16):
        for seq_len in range(2048, 8192, 32):
            splits = choose_num_splits(batch, 8, seq_len, 108, 32)
            table = split_table(batch, 8, seq_len, 108, 32)
            tiles = -(-num_tiles(seq_len, 32) // splits) * table["num_waves"]
            floor = batch * 8 * num_tiles(seq_len, 32) / 216
            assert tiles <= 2.2 * floor + 2, (batch, seq_len, splits, tiles, floor)


def test_never_more_splits_than_tiles_or_the_limit() -> None:
    assert choose_num_splits(1, 1, 96, 132, 32) == 3
    assert choose_num_splits(1, 1, 10**6, 132, 32) <= 128
    assert choose_num_splits(1, 1, 10**6, 132, 32, window=64) <= 3


@pytest.mark.parametrize(
    "counts",
    [
        {"num_multiprocessors": 0},
        {"tile": 0},
        {"window": 0},
        {"num_seqs": -1},
        {"num_kv_heads": -1},
        {"max_seq_len": -1},
    ],
)
def test_counts_that_no_launch_has_are_named(counts) -> None:
    shape = dict(num_seqs=1, num_kv_heads=8, max_seq_len=4096, num_multiprocessors=108, tile=32)
    with pytest.raises(KernelError, match=f"{next(iter(counts))}={next(iter(counts.values()))}"):
        choose_num_splits(**{**shape, **counts})


def test_no_work_is_one_split_and_no_split_is_named() -> None:
    assert choose_num_splits(1, 8, 0, 108, 32) == 1
    assert choose_num_splits(0, 0, 0, 1, 1) == 1
    for call in (
        lambda: split_range(64, 0, 0, 32),
        lambda: split_range(64, -1, 2, 32),
        lambda: split_range(-1, 0, 2, 32),
        lambda: num_tiles(64, 0),
        lambda: wave_efficiency(8, 0),
        lambda: split_table(1, 8, 64, 108, 32, num_splits=0),
    ):
        with pytest.raises(KernelError, match=r"expected [01] or more"):
            call()
