"""Rotary tables and rotation: exact vectors, then transformers' own functions."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import tiny_spec

from kvlab.errors import RopeError, WrongPosition
from kvlab.generate import cached_generate
from kvlab.model import Decoder
from kvlab.rope import (
    RopeTable,
    apply_rope,
    check_positions,
    interleave_permutation,
    length_limit,
    padded_positions,
    rope_inv_freq,
    rope_tables,
)
from kvlab.specs import RopeSpec

LN40 = math.log(40)


def spec(rope_type="default", theta=10_000.0, dim=8, **params) -> RopeSpec:
    return RopeSpec(theta, dim, rope_type, tuple(sorted(params.items())))


LLAMA31_8B = spec(
    "llama3", 5e5, 128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
LLAMA32_1B = spec(
    "llama3", 5e5, 64, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
LONGROPE = spec(
    "longrope", dim=8, short_factor=(1.0,) * 4, long_factor=(4.0,) * 4,
    original_max_position_embeddings=8, max_position_embeddings=32,
)  # fmt: skip


def rotate(x, positions, rope, interleaved=False, seq_len=None):
    return apply_rope(x, *rope_tables(rope, positions, seq_len=seq_len), interleaved=interleaved)


# --- positions -------------------------------------------------------------------------------


def positions_fed(prompt_len, chunk_size=None):
    """The positions of every forward of a run with four outputs."""
    model, seen = Decoder.random(tiny_spec()), []
    forward = model.forward

    def recorded(token_ids, positions, *rest, **named):
        seen.append(positions[0].tolist())
        return forward(token_ids, positions, *rest, **named)

    model.forward = recorded
    cached_generate(model, range(1, prompt_len + 1), 4, chunk_size=chunk_size)
    return seen


def test_pos_01_decode_position_is_seq_len_minus_one():
    seen = positions_fed(prompt_len=5)
    assert seen == [[0, 1, 2, 3, 4], [5], [6], [7]]
    for step in seen:
        check_positions(torch.tensor(step), step[-1] + 1)
    with pytest.raises(WrongPosition, match="end at seq_lens - 1"):
        check_positions(torch.tensor([6]), 6)
    check_positions(torch.tensor([[0], [5]]), torch.tensor([0, 6]))  # an idle row has position 0


@pytest.mark.parametrize(
    ("shape", "seq_lens"),
    [
        ((2, 1), [3, 3, 3]),
        ((3, 1), [3, 3]),
        ((4,), [3, 3]),
        ((2, 2, 1), [3, 3]),
        ((0,), 3),
        ((2, 0), 3),
    ],
)
def test_pos_01_positions_and_lengths_of_different_batches_are_named(shape, seq_lens):
    with pytest.raises(WrongPosition, match="one seq_len a row"):
        check_positions(torch.full(shape, 2), torch.tensor(seq_lens))


def test_pos_01_a_uniform_shift_leaves_scores_and_only_the_check_sees_it():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 1, 64, dtype=torch.float64)
    rope, positions = spec(dim=64), torch.arange(6)

    def scores(q_positions, k_positions):
        inv_freq = rope_inv_freq(rope)[0].double()
        tables = [(p[:, None] * inv_freq) for p in (q_positions, k_positions)]
        rotated = [apply_rope(x, a.cos(), a.sin()) for x, a in zip((q, k), tables, strict=True)]
        return rotated[0].squeeze(1) @ rotated[1].squeeze(1).T

    right = scores(positions, positions)
    assert (scores(positions + 1, positions + 1) - right).abs().max() < 1e-12
    assert (scores(positions + 1, positions) - right).abs().max() > 0.1
    with pytest.raises(WrongPosition):
        check_positions(positions + 1, 6)


def test_pos_02_offsets_advance_by_the_tokens_fed():
    seen = positions_fed(prompt_len=6, chunk_size=4)
    assert [row[0] for row in seen] == [0, 4, 6, 7, 8]
    assert seen[0] == [0, 1, 2, 3] and seen[1] == [4, 5]
    with pytest.raises(WrongPosition, match="ascend by one"):
        check_positions(torch.tensor([10, 13, 12, 13]), 14)


def test_pos_03_every_padded_row_counts_its_own_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = padded_positions(mask)
    assert positions[0, 2:].tolist() == [0, 1, 2] and positions[1].tolist() == [0, 1, 2, 3, 4]
    decode = mask.sum(-1, keepdim=True)
    assert decode.tolist() == [[3], [5]]
    check_positions(decode, mask.sum(-1) + 1)
    with pytest.raises(WrongPosition):
        check_positions(torch.tensor([[5], [5]]), mask.sum(-1) + 1)


@pytest.mark.parametrize("learned", [False, True])
def test_pos_03_a_row_shift_is_harmless_for_rope_and_not_for_learned_positions(learned):
    """One attention layer, GPT-2 style (a table added to x) or RoPE, on shifted positions."""
    torch.manual_seed(1)
    x = torch.randn(4, 1, 16)
    table = torch.randn(12, 16)

    def output(positions):
        h = x + table[positions][:, None] if learned else x
        q = k = h if learned else rotate(h, positions, spec(dim=16))
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k)[0].tril(), -1)
        return weights @ h.squeeze(1)

    drift = (output(torch.arange(4) + 2) - output(torch.arange(4))).abs().max()
    assert drift > 0.1 if learned else drift < 1e-4


# --- rotation --------------------------------------------------------------------------------


def test_pos_06_both_pairings_exact_and_norms_cannot_tell():
    x = torch.arange(1.0, 9.0).view(1, 1, 8)
    half = rotate(x, torch.tensor([1]), spec())[0, 0]
    inter = rotate(x, torch.tensor([1]), spec(), interleaved=True)[0, 0]
    right_half = [-3.6671, 1.3910, 2.9299, 3.9920, 3.5430, 6.1697, 7.0296, 8.0040]
    right_inter = [-1.1426, 1.9221, 2.5857, 4.2795, 4.9398, 6.0497, 6.9920, 8.0070]
    torch.testing.assert_close(half, torch.tensor(right_half), atol=5e-5, rtol=0)
    torch.testing.assert_close(inter, torch.tensor(right_inter), atol=5e-5, rtol=0)
    assert half.norm() == pytest.approx(x.norm().item()) == pytest.approx(inter.norm().item())


def test_pos_06_permuting_q_and_k_maps_one_pairing_to_the_other():
    torch.manual_seed(2)
    q, k = torch.randn(2, 5, 3, 32)
    order = interleave_permutation(32)
    assert interleave_permutation(8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    positions, rope = torch.arange(5), spec(dim=32)
    inter = [rotate(x, positions, rope, interleaved=True) for x in (q, k)]
    half = [rotate(x[..., order], positions, rope) for x in (q, k)]
    torch.testing.assert_close(inter[0][..., order], half[0])
    scores = [torch.einsum("qhd,khd->hqk", *pair) for pair in (inter, half)]
    torch.testing.assert_close(*scores)


def test_rotation_by_zero_and_dtype_and_leading_shapes():
    x = torch.randn(2, 3, 4, 8)
    assert torch.equal(rotate(x, torch.zeros(2, 3, dtype=torch.long), spec()), x)
    assert rotate(x.bfloat16(), torch.ones(2, 3, dtype=torch.long), spec()).dtype == torch.bfloat16
    flat = rotate(x.view(6, 4, 8), torch.arange(6), spec()).view(2, 3, 4, 8)
    assert torch.equal(flat, rotate(x, torch.arange(6).view(2, 3), spec()))


def test_float32_angles_tell_every_position_apart_and_bf16_ones_do_not():
    cos, sin = rope_tables(spec(dim=64), 4096)
    fast = torch.stack((cos[:, 0], sin[:, 0]), -1)
    assert len({tuple(row) for row in fast.tolist()}) == 4096
    bf16 = torch.arange(4096).to(torch.bfloat16)
    assert bf16.unique().numel() < 1100
    assert cos.dtype == torch.float32


# --- scaling rules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "kept", "blended", "divided", "last", "scaled_last"),
    [
        (LLAMA31_8B, range(29), range(29, 35), range(35, 64), 2.455141e-6, 3.068926e-7),
        (LLAMA32_1B, range(15), range(15, 18), range(18, 32), 3.013858e-6, 9.418307e-8),
    ],
)
def test_pos_07_llama3_bands(rope, kept, blended, divided, last, scaled_last):
    plain = rope_inv_freq(spec(theta=rope.theta, dim=rope.rotary_dim))[0]
    scaled = rope_inv_freq(rope)[0]
    factor = dict(rope.params)["factor"]
    pairs = range(rope.rotary_dim // 2)
    assert [i for i in pairs if scaled[i] == plain[i]] == list(kept)
    assert [i for i in pairs if scaled[i] == plain[i] / factor] == list(divided)
    assert [i for i in pairs if plain[i] / factor < scaled[i] < plain[i]] == list(blended)
    assert plain[-1].item() == pytest.approx(last, rel=1e-6)
    assert scaled[-1].item() == pytest.approx(scaled_last, rel=1e-6)


def test_pos_07_the_scaled_table_is_the_one_that_rotates():
    cos, _ = RopeTable(LLAMA31_8B).rows(torch.tensor([8000]))
    plain, _ = RopeTable(spec(theta=5e5, dim=128)).rows(torch.tensor([8000]))
    assert torch.equal(cos[0, :29], plain[0, :29])
    assert (cos[0, 29:50] - plain[0, 29:50]).abs().max() > 0.5


def test_pos_07_an_unknown_or_incomplete_rule_is_an_error_not_the_default():
    with pytest.raises(RopeError, match=r"'llama4'.*expected one of"):
        rope_inv_freq(spec("llama4", factor=8.0))
    with pytest.raises(RopeError, match="needs 'low_freq_factor'"):
        rope_inv_freq(spec("llama3", factor=8.0))


def attend(q, k, v):
    """Causal, one head: q, k, v [s, d] with q the tail."""
    mask = torch.ones(q.shape[0], k.shape[0]).tril(k.shape[0] - q.shape[0]).bool()
    return torch.softmax((q @ k.T).masked_fill(~mask, -math.inf), -1) @ v


@pytest.mark.parametrize("keep_unrotated", [True, False])
def test_pos_08_longrope_keys_go_stale_when_the_table_switches(keep_unrotated):
    """Original length 8, prompt 7, generate 3: the ninth token switches the table."""
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 10, 8)
    cached = torch.empty(0, 8)
    errors = []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 10)):
        new = k[start:stop]
        if not keep_unrotated:
            new = rotate(new[:, None], torch.arange(start, stop), LONGROPE, seq_len=stop)[:, 0]
        cached = torch.cat((cached, new))
        keys = cached
        if keep_unrotated:
            keys = rotate(cached[:, None], torch.arange(stop), LONGROPE, seq_len=stop)[:, 0]
        query = rotate(q[start:stop, None], torch.arange(start, stop), LONGROPE, seq_len=stop)
        out = attend(query[:, 0], keys, v[:stop])[-1]
        full = [rotate(x[:stop, None], torch.arange(stop), LONGROPE, seq_len=stop) for x in (q, k)]
        errors.append((out - attend(full[0][:, 0], full[1][:, 0], v[:stop])[-1]).abs().max())
    assert max(errors[:2]) < 1e-5
    if keep_unrotated:
        assert max(errors) < 1e-5
    else:
        assert errors[2] > 1e-3
    limit = length_limit(LONGROPE)
    assert limit == 8
    first, *others = (rope_inv_freq(LONGROPE, n)[0] for n in (limit - 1, limit, 9, 10))
    assert [torch.equal(first, other) for other in others] == [True, False, False]


def test_pos_08_a_table_refuses_to_switch_and_says_what_to_do():
    table = RopeTable(LONGROPE)
    table.rows(torch.arange(8))
    with pytest.raises(RopeError, match=r"right up to 8 tokens.*max_seq_len"):
        table.rows(torch.tensor([8]))
    planned = RopeTable(LONGROPE, max_seq_len=10)
    long_cos, _ = rope_tables(LONGROPE, 10, seq_len=10)
    assert torch.equal(planned.rows(torch.arange(10))[0], long_cos)


def test_pos_08_dynamic_ntk_has_one_table_per_length():
    rope = spec("dynamic", dim=16, factor=2.0, max_position_embeddings=32)
    tables = [rope_inv_freq(rope, n)[0] for n in (31, 32, 33, 34)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[1], tables[2]) and not torch.equal(tables[2], tables[3])
    with pytest.raises(RopeError):
        RopeTable(rope).rows(torch.tensor([32]))
    planned = RopeTable(rope, max_seq_len=64)
    assert torch.equal(planned.rows(torch.arange(64))[0], rope_tables(rope, 64, seq_len=64)[0])
    with pytest.raises(RopeError):
        planned.rows(torch.tensor([64]))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 32), (128, 96), (256, 64), (192, 64)])
def test_pos_10_dims_past_the_rotated_ones_are_unchanged_bit_for_bit(head_dim, rotary_dim):
    torch.manual_seed(4)
    x = torch.randn(3, 2, head_dim)
    for interleaved in (False, True):
        out = rotate(x, torch.tensor([1, 50, 900]), spec(dim=rotary_dim), interleaved)
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])
        assert not torch.isclose(out[..., :rotary_dim], x[..., :rotary_dim]).all(-1).any()
    with pytest.raises(RopeError, match="even number"):
        rope_inv_freq(spec(dim=rotary_dim + 1))


@pytest.mark.parametrize(("factor", "right"), [(8, 1.2079441541679836), (32, 1.3465735902799727)])
def test_pos_11_yarn_attention_factor_multiplies_cos_and_sin(factor, right):
    rope = spec("yarn", dim=64, factor=float(factor), original_max_position_embeddings=4096)
    assert rope_inv_freq(rope)[1] == pytest.approx(right, abs=1e-15)
    cos, sin = rope_tables(rope, 3)
    torch.testing.assert_close(cos**2 + sin**2, torch.full((3, 32), right**2))


@pytest.mark.parametrize(
    ("params", "right"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),  # DeepSeek-V3
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * LN40 + 1) / (0.1 * LN40 + 1)),
        ({"mscale": 1.0}, 0.1 * LN40 + 1),  # one alone counts for nothing
        ({"attention_factor": 1.5}, 1.5),
    ],
)  # fmt: skip
def test_pos_11_yarn_mscale_variants(params, right):
    rope = spec("yarn", dim=64, factor=40.0, original_max_position_embeddings=4096, **params)
    assert rope_inv_freq(rope)[1] == pytest.approx(right)


@pytest.mark.parametrize(
    ("params", "right"),
    [
        ({"short_mscale": 1.25, "long_mscale": 1.5}, (1.25, 1.5)),  # Phi MoE
        ({"long_mscale": 1.5, "attention_factor": 1.1}, (1.1, 1.5)),
        ({}, (math.sqrt(1 + math.log(4) / math.log(8)),) * 2),
    ],
)
def test_pos_08_each_longrope_table_may_have_its_own_factor(params, right):
    rope = replace(LONGROPE, params=tuple(sorted({**dict(LONGROPE.params), **params}.items())))
    for length, factor in zip((8, 9), right, strict=True):
        assert rope_inv_freq(rope, length)[1] == pytest.approx(factor)
        assert rope_tables(rope, 1, seq_len=length)[0].max().item() == pytest.approx(factor)


def test_pos_08_a_fixed_alpha_is_one_table_for_every_length():
    """Hunyuan writes "dynamic" with an alpha: theta * alpha^(d / (d - 2)), whatever the length."""
    rope = spec("dynamic", dim=128, alpha=1000.0, factor=1.0, max_position_embeddings=64)
    right = (10_000.0 * 1000 ** (128 / 126)) ** (-126 / 128)
    for length in (None, 64, 100_000):
        assert rope_inv_freq(rope, length)[0][-1].item() == pytest.approx(right)
    assert length_limit(rope) is None
    RopeTable(rope, 32).rows(torch.tensor([100]))


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"factor": 2, **ORIGINAL}


@pytest.mark.parametrize(
    ("rule", "params", "named"),
    [
        ("linear", {"factor": 0}, "factor is 0"),
        ("linear", {"factor": -2}, "factor is -2"),
        ("linear", {"factor": "x"}, "factor is 'x'"),
        ("dynamic", {"factor": 0, **ORIGINAL}, "factor is 0"),
        ("dynamic", {"factor": 2, "max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ("yarn", {"factor": 0, **ORIGINAL}, "factor is 0"),
        ("yarn", {"factor": 2, "original_max_position_embeddings": 0}, "embeddings is 0"),
        ("llama3", {**LLAMA3, **ORIGINAL, "factor": 0}, "factor is 0"),
        (
            "llama3",
            {**LLAMA3, **ORIGINAL, "low_freq_factor": 5},
            "low_freq_factor at most",
        ),
        ("llama3", {**ORIGINAL, "factor": 8}, "needs 'low_freq_factor'"),
        ("llama3", LLAMA3, "needs 'original_max_position_embeddings'"),
        *(("yarn", {**YARN, "attention_factor": x}, "attention_factor is") for x in (0, -1, "x")),
        ("yarn", {**YARN, "beta_fast": -32}, "beta_fast is -32"),
        ("yarn", {**YARN, "mscale": "x", "mscale_all_dim": 1}, "mscale is 'x'"),
        *(
            ("longrope", {**YARN, "short_factor": (1, x, 1, 1)}, "short_factor")
            for x in (0, -1, None, math.nan)
        ),
        *(("longrope", {**YARN, "short_factor": x}, "short_factor") for x in (2, "abcd", (1, 1))),
        ("proportional", {"partial_rotary_factor": -1}, "partial_rotary_factor is -1"),
    ],
)
def test_pos_07_a_setting_that_gives_no_finite_table_is_named(rule, params, named):
    with pytest.raises(RopeError, match=named):
        rope_inv_freq(RopeSpec(10_000.0, 8, rule, tuple(sorted(params.items()))))


@pytest.mark.parametrize("theta", [0, -1.0, math.inf, math.nan, None, "10000"])
def test_pos_07_a_base_that_is_no_positive_number_is_named(theta):
    with pytest.raises(RopeError, match="rope_theta"):
        rope_inv_freq(RopeSpec(theta, 8))


def test_pos_10_two_rotated_dimensions_have_no_dynamic_exponent():
    params = (("factor", 2.0), ("max_position_embeddings", 16))
    with pytest.raises(RopeError, match="4 or more"):
        rope_inv_freq(RopeSpec(10_000.0, 2, "dynamic", params), 20)


def test_pos_11_yarn_needs_a_base_above_one():
    params = (("factor", 2.0), ("original_max_position_embeddings", 64))
    with pytest.raises(RopeError, match="more than 1"):
        rope_inv_freq(RopeSpec(1.0, 8, "yarn", params))


def test_pos_22_positions_in_a_floating_type_are_refused():
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(WrongPosition, match="whole numbers"):
            rope_tables(spec(), torch.tensor([257, 15_962], dtype=dtype))


def test_pos_23_yarn_borders_the_wrong_way_round_are_refused():
    with pytest.raises(RopeError, match="beta_fast at least beta_slow"):
        rope_inv_freq(spec("yarn", factor=2.0, beta_fast=1, beta_slow=32, **ORIGINAL))


def test_pos_22_the_decoder_s_own_table_refuses_floating_positions_too():
    with pytest.raises(WrongPosition, match="whole numbers"):
        RopeTable(RopeSpec(10_000.0, 8)).rows(torch.tensor([257.0]))


def test_pos_10_more_rotated_dimensions_than_the_head_has_are_named():
    with pytest.raises(AssertionError, match="head of 4"):
        apply_rope(torch.zeros(1, 1, 4), *rope_tables(RopeSpec(10_000.0, 8), 1))
