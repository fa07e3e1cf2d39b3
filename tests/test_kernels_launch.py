"""What the launcher refuses, by name, and the rule for the number of splits."""

from __future__ import annotations

import pytest
import torch
from paged_case import paged_case

from kvlab.kernels import checks
from kvlab.kernels.launch import Tile, paged_decode
from kvlab.kernels.splits import (
    SplitError,
    choose_num_splits,
    num_tiles,
    split_range,
    split_table,
    wave_efficiency,
)
from kvlab.kernels.walk import paged_decode_walk


def spoil(**changes) -> tuple[torch.Tensor, ...]:
    case = paged_case([9, 4])
    for name, change in changes.items():
        setattr(case, name, change(getattr(case, name)))
    return case.tensors


REFUSED = [
    (dict(query=lambda t: t[0]), checks.WrongShape, "num_seqs, num_heads, head_dim"),
    (dict(query=lambda t: t[:, :3]), checks.WrongShape, "multiple of num_kv_heads"),
    (dict(query=lambda t: t[..., :8].contiguous()), checks.WrongShape, "layout='HND'"),
    (dict(value_cache=lambda t: t[:2]), checks.WrongShape, "must agree"),
    (dict(seq_lens=lambda t: t[:1]), checks.WrongShape, "1 rows for 2 queries"),
    (dict(seq_lens=lambda t: t - 9), checks.WrongShape, "0 or more"),
    (dict(seq_lens=lambda t: t.float()), checks.WrongDtype, "int32 or int64"),
    (dict(query=lambda t: t.half()), checks.WrongDtype, "one and the same"),
    (
        dict(
            query=lambda t: t.double(),
            key_cache=lambda t: t.double(),
            value_cache=lambda t: t.double(),
        ),
        checks.WrongDtype,
        "float32, float16, bfloat16",
    ),
    (dict(seq_lens=lambda t: t.to("meta")), checks.WrongDevice, "one device"),
    (
        dict(key_cache=lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
        checks.NotContiguous,
        "key_cache has stride 2",
    ),
    (
        dict(key_cache=lambda t: t[:, :0], value_cache=lambda t: t[:, :0]),
        checks.WrongShape,
        "block_size",
    ),
    (
        dict(query=lambda t: t[..., :0], key_cache=lambda t: t[..., :0]),
        checks.WrongShape,
        "a head_dim",
    ),
    (
        dict(seq_lens=lambda t: torch.stack((t, t), dim=1)[:, 0]),
        checks.NotContiguous,
        "seq_lens has stride 2",
    ),
    (dict(block_tables=lambda t: t + 1000), checks.BlockIdOutOfRange, "cache has blocks 0 to 6"),
    (dict(block_tables=lambda t: t[:, :2]), checks.BlockTableTooShort, "3 blocks of 4"),
]


@pytest.mark.parametrize("changes, error, words", REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_wrong_inputs_raise_named_errors(changes, error, words) -> None:
    for decode in (paged_decode, paged_decode_walk):
        with pytest.raises(error, match=words.replace("(", r"\(")):
            decode(*spoil(**changes))


SETTINGS = [
    *({"window": bad} for bad in (0, 2.5)),
    *({"num_splits": bad} for bad in (0, 129, 1.5)),
    *({"scale": bad} for bad in (float("nan"), float("inf"))),
    {"layout": "NDH"},
    # A group has 2 query heads of width 16: no power of two, then each size too small.
    *({"tile": Tile(*sizes, 4, 1)} for sizes in ((24, 2, 16, 16), (0, 2, 16, 16))),
    *({"tile": Tile(*sizes, 4, 1)} for sizes in ((16, 1, 16, 16), (16, 2, 8, 16), (16, 2, 16, 8))),
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_wrong_settings_raise_named_errors(options) -> None:
    with pytest.raises(checks.BadSetting, match="expected"):
        paged_decode(*paged_case([9]).tensors, **options)


def test_blocks_behind_the_window_may_be_gone() -> None:
    case = paged_case([40], block_size=4, window=6)
    assert int(case.block_tables[0, 0]) == 10**6
    checks.check_block_tables(case.block_tables, case.seq_lens, 13, 4, window=6)
    with pytest.raises(checks.BlockIdOutOfRange):
        checks.check_block_tables(case.block_tables, case.seq_lens, 13, 4)


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
        {"max_splits": 0},
        {"programs_per_multiprocessor": 0},
        {"num_seqs": -1},
        {"num_kv_heads": -1},
        {"max_seq_len": -1},
    ],
)
def test_counts_that_no_launch_has_are_named(counts) -> None:
    shape = dict(num_seqs=1, num_kv_heads=8, max_seq_len=4096, num_multiprocessors=108, tile=32)
    with pytest.raises(SplitError, match=f"{next(iter(counts))}={next(iter(counts.values()))}"):
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
        with pytest.raises(SplitError, match=r"expected [01] or more"):
            call()


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_the_query_itself_is_named(window) -> None:
    case = paged_case([9, 4])
    with pytest.raises(checks.BadSetting, match=f"window {window}; expected None or at least 1"):
        checks.check_block_tables(case.block_tables, case.seq_lens, 13, 4, window)
    with pytest.raises(checks.BadSetting, match=f"window {window}"):
        paged_decode_walk(*case.tensors, window=window)
    with pytest.raises(SplitError, match="num_splits=0"):
        paged_decode_walk(*case.tensors, num_splits=0)
