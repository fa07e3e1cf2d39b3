"""Rotary position embedding: the positions, the frequencies, the tables, the rotation.

    x = [1, 2, 3, 4, 5, 6, 7, 8], position 1, theta 10 000
    half-split:   pairs (1,5) (2,6) (3,7) (4,8)  -> [-3.667, 1.391, 2.930, 3.992, 3.543, ...]
    interleaved:  pairs (1,2) (3,4) (5,6) (7,8)  -> [-1.143, 1.922, 2.586, 4.280, 4.940, ...]

Pair i of a head turns by the angle position * inv_freq[i]. Only the difference of two positions
survives in a dot product, which is why a key can be rotated once and kept.

    prompt of 5: positions 0 1 2 3 4      seq_len 5
    1st decode:  position  5              seq_len 6      position = seq_len - 1

A position is a property of the token, not of the batch and not of the step: the number of real
tokens before it in its own sequence. seq_len counts the token being fed.

Angles are always computed in float32: in bfloat16 the integers above 256 are no longer all
different, so neighbouring positions would share an angle.

Sources: Su et al. 2021, arXiv 2104.09864; Llama 3.1 model card; Peng et al. 2023 (YaRN, arXiv
2309.00071); Ding et al. 2024 (LongRoPE, arXiv 2402.13753). The scaling rules are checked against
transformers' own functions in tests/test_rope_transformers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvlab.errors import RopeError, WrongPosition
from kvlab.specs import RopeSpec

# --- positions --------------------------------------------------------------------------------


def padded_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions [batch, length] of a padded batch: each row counts its own real tokens.

    [[0,0,1,1,1], [1,1,1,1,1]] -> [[0,0,0,1,2], [0,1,2,3,4]]

    The value in a padded place is 0 and means nothing: no query may read its key.
    """
    mask = attention_mask.to(torch.long)
    return (mask.cumsum(-1) - 1).clamp(min=0) * mask


def next_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions [batch, 1] of the token that follows each row of a padded batch.

    [[0,0,1,1,1], [1,1,1,1,1]] -> [[3], [5]]: the number of real tokens, not of columns.
    """
    return attention_mask.to(torch.long).sum(-1, keepdim=True)


def check_positions(positions: torch.Tensor, seq_lens: torch.Tensor | int) -> None:
    """Raise WrongPosition unless the last position of every row is seq_len - 1.

    positions  [q_len] or [batch, q_len], each row ascending by one
    seq_lens   [] or [batch], cached plus new tokens; an idle row (0) expects position 0

    Right for rows without padding in the query. This is the check that no output test replaces:
    if every position is shifted alike, no output changes.
    """
    lengths = torch.as_tensor(seq_lens).reshape(-1)
    rows = positions.reshape(1, -1) if positions.dim() == 1 else positions
    is_fit = rows.dim() == 2 and rows.shape[1] > 0 and lengths.numel() in (1, rows.shape[0])
    if is_fit:
        last = (lengths - 1).clamp(min=0).to(rows.dtype).expand(rows.shape[0])
        steps = torch.arange(1 - rows.shape[1], 1, device=rows.device)
        is_fit = torch.equal(rows, last[:, None] + steps)
    if not is_fit:
        raise WrongPosition(
            f"positions {positions.tolist()} at seq_lens {lengths.tolist()}; expected rows that "
            f"ascend by one and end at seq_lens - 1, one seq_len a row or one for all. Take "
            f"positions from the number of cached tokens at the step, not from a counter kept "
            f"beside it."
        )


# --- frequencies ------------------------------------------------------------------------------


def rope_inv_freq(rope: RopeSpec, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Radians per position of every pair, and the factor that multiplies cos and sin.

    rope     settings of one layer kind
    seq_len  total length, only read by the rules whose table depends on it (dynamic, longrope)

    Returns inv_freq [rotary_dim / 2] float32 and the attention factor (1.0 for most rules).
    Raises RopeError for settings that give no finite, meaningful table.
    """
    rule = RULES.get(rope.rope_type)
    is_even = isinstance(rope.rotary_dim, int) and rope.rotary_dim >= 0 and rope.rotary_dim % 2 == 0
    is_base = isinstance(rope.theta, int | float) and 0 < rope.theta < math.inf
    if rule is None or not is_even or not is_base:
        raise RopeError(
            f"rope_type is {rope.rope_type!r}, rotary_dim {rope.rotary_dim!r}, rope_theta "
            f"{rope.theta!r}; expected one of {', '.join(sorted(RULES))}, an even number, and a "
            f"positive number. Falling back to the default table would be silently wrong, so "
            f"nothing is built."
        )
    return rule(rope, seq_len)


def length_limit(rope: RopeSpec) -> int | None:
    """Longest total length that the first table serves; None where one table serves all."""
    if rope.rope_type == "longrope":
        return int(_setting(rope, "original_max_position_embeddings"))
    if rope.rope_type == "dynamic" and not _given(rope, "alpha"):
        name = "max_position_embeddings"
        given = _given(rope, name) is not None
        return int(_setting(rope, name if given else f"original_{name}"))
    return None


def _given(rope: RopeSpec, name: str) -> object:
    """A rule's own setting under its name in config.json, or None."""
    return dict(rope.params).get(name)


def _setting(
    rope: RopeSpec, name: str, default: float | None = None, *, given: object = None
) -> float:
    """A setting that divides something: 0 would give infinite angles and no exception.

    Where there is a default, 0 counts as missing, as in transformers.
    """
    value = _given(rope, name) if given is None else given
    if not value and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        settings = sorted(dict(rope.params)) or "empty"
        raise RopeError(
            f"rope_type {rope.rope_type!r} needs {name!r}: {name} is {value!r}, expected a "
            f"positive number; the settings are {settings}. It stands in rope_parameters "
            f"(rope_scaling in old configs)."
        )
    return float(value)  # type: ignore[arg-type]


def _require(is_good: bool, rope: RopeSpec, expected: str) -> None:
    """Settings that are numbers one by one and mean nothing together."""
    if not is_good:
        raise RopeError(
            f"rope_type {rope.rope_type!r}: {dict(rope.params)} with rope_theta {rope.theta:g} and "
            f"rotary_dim {rope.rotary_dim}; expected {expected}"
        )


def _base(rope: RopeSpec, stretch: float = 1.0) -> torch.Tensor:
    """theta^(-2i/r) for i = 0..r/2-1, float32 throughout as the checkpoints were trained."""
    exponent = torch.arange(0, rope.rotary_dim, 2).to(torch.float32) / rope.rotary_dim
    return 1.0 / ((rope.theta * stretch) ** exponent)


def _stretch(rope: RopeSpec, original: float) -> float:
    """How many times the original length: as given, or from the two lengths."""
    if _given(rope, "factor") is None:
        return _setting(rope, "max_position_embeddings") / original
    return _setting(rope, "factor")


Rule = Callable[[RopeSpec, int | None], tuple[torch.Tensor, float]]


def _default(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """The plain table."""
    return _base(rope), 1.0


def _none(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """An angle of zero leaves x as it is."""
    return torch.zeros(rope.rotary_dim // 2), 1.0


def _linear(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """All frequencies divided by factor."""
    return _base(rope) / _setting(rope, "factor"), 1.0


def _proportional(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """The first share of the pairs turns at the full head's frequencies, the rest stands."""
    share = _setting(rope, "partial_rotary_factor", 1.0)
    inv_freq = _base(rope)
    inv_freq[int(share * rope.rotary_dim // 2) :] = 0.0
    return inv_freq / _setting(rope, "factor", 1.0), 1.0


def _dynamic(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """theta grown with the total length (NTK-aware)."""
    dim = rope.rotary_dim
    _require(dim != 2, rope, "4 or more rotated dimensions: the exponent is dim / (dim - 2)")
    if _given(rope, "alpha"):  # Hunyuan: a stretch that is fixed, and so one table for all lengths
        stretch = _setting(rope, "alpha")
    else:
        factor, limit = _setting(rope, "factor"), length_limit(rope) or 0
        stretch = factor * max(seq_len or limit, limit) / limit - (factor - 1)
    return _base(rope, stretch ** (dim / (dim - 2))), 1.0


def _llama3(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """Fast pairs kept, slow pairs divided, a blend between."""
    factor = _setting(rope, "factor")
    low, high = _setting(rope, "low_freq_factor"), _setting(rope, "high_freq_factor")
    original = _setting(rope, "original_max_position_embeddings")
    _require(low <= high, rope, "low_freq_factor at most high_freq_factor: between them is a blend")
    inv_freq = _base(rope)
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    scaled = torch.where(turns < low, inv_freq / factor, inv_freq)
    if low == high:
        return scaled, 1.0  # Llama 4 Scout: kept or divided, nothing between
    keep = (turns - low) / (high - low)  # above 1: kept; below 0: divided; between: blended
    blended = (1 - keep) * inv_freq / factor + keep * inv_freq
    return torch.where((turns >= low) & (turns <= high), blended, scaled), 1.0


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1: 1.2079 for factor 8, 1.3466 for factor 32."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """As llama3 with a ramp over the pair index, and a factor on cos and sin."""
    original = _setting(rope, "original_max_position_embeddings")
    _require(rope.theta > 1, rope, "a rope_theta of more than 1")
    factor = _stretch(rope, original)
    if _given(rope, "attention_factor") is not None:
        attention_factor = _setting(rope, "attention_factor")
    else:
        mscale, all_dim = _setting(rope, "mscale", 0), _setting(rope, "mscale_all_dim", 0)
        attention_factor = yarn_attention_factor(factor)
        if mscale and all_dim:  # DeepSeek: the second one is undone inside its softmax
            attention_factor = yarn_attention_factor(factor, mscale)
            attention_factor /= yarn_attention_factor(factor, all_dim)
    dim = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    fast, slow = _setting(rope, "beta_fast", 32), _setting(rope, "beta_slow", 1)
    _require(fast >= slow, rope, "beta_fast at least beta_slow: a ramp runs from one to the other")
    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if dict(rope.params).get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    turning = rope.theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    inv_freq = 1.0 / (factor * turning) * (1 - keep) + 1.0 / turning * keep
    return inv_freq, attention_factor


def _longrope(rope: RopeSpec, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """One divisor per pair, a short list and a long one, switched by total length."""
    original = int(_setting(rope, "original_max_position_embeddings"))
    length = "long" if seq_len and seq_len > original else "short"
    name = f"{length}_factor"
    given = _given(rope, name)
    entries = given if isinstance(given, list | tuple) and given else (given,)
    divisors = torch.tensor([_setting(rope, name, given=entry or 0) for entry in entries])
    num_pairs = rope.rotary_dim // 2
    _require(len(divisors) == num_pairs, rope, f"{num_pairs} entries of {name}, one a rotated pair")
    # Phi MoE and Phi-3 small: a factor of its own for each of the two tables
    own = f"{length}_mscale" if _given(rope, f"{length}_mscale") is not None else "attention_factor"
    if _given(rope, own) is not None:
        attention_factor = _setting(rope, own)
    else:
        factor = _stretch(rope, original)
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    exponent = torch.arange(0, rope.rotary_dim, 2).to(torch.float32) / rope.rotary_dim
    return 1.0 / (divisors * rope.theta**exponent), attention_factor


#: rope_type -> the function that builds its frequencies.
RULES: dict[str, Rule] = {
    "default": _default,
    "none": _none,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


# --- tables and rotation ----------------------------------------------------------------------


def rope_tables(
    rope: RopeSpec, positions: int | torch.Tensor, *, seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every angle, float32.

    positions  an integer n for positions 0..n-1, or a tensor of whole positions [...]
    seq_len    see rope_inv_freq

    Returns cos, sin, each [n, rotary_dim / 2] (or [..., rotary_dim / 2]), already multiplied
    by the attention factor.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions)
    inv_freq, attention_factor = rope_inv_freq(rope, seq_len)
    return _turns(positions, inv_freq.to(positions.device), attention_factor)


def _turns(
    positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * inv_freq, times the attention factor."""
    if positions.is_floating_point():
        raise WrongPosition(
            f"positions in {positions.dtype} given; expected whole numbers: bf16 has no 257"
        )
    angles = positions.to(torch.float32)[..., None] * inv_freq
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the heads of x. Same shape and dtype come back.

    x            [..., heads, head_dim]: queries or keys, before the cache write
    cos, sin     [..., rotary_dim / 2]: the rows of x's positions; one row serves all heads.
                 Or what prepare_rotation made of them.
    interleaved  False: dimension i is paired with i + rotary_dim / 2 (Llama in Hugging Face
                 format, GPT-NeoX). True: dimension 2i with 2i + 1 (the original layout).
    """
    if cos.dim() < x.dim():
        cos, sin = prepare_rotation(cos, sin)
    if interleaved:
        cos, sin = cos.transpose(-1, -2), sin.transpose(-1, -2)
    # The two numbers of a pair lie along one axis of their own: [..., 2, half] or [..., half, 2].
    sizes, pair = cos.shape[-2:], -1 if interleaved else -2
    width = sizes[0] * sizes[1]
    assert width <= x.shape[-1], f"{width} dimensions to rotate in a head of {x.shape[-1]}"
    turned = x if width == x.shape[-1] else x[..., :width]
    turned = turned.to(torch.promote_types(x.dtype, cos.dtype)).unflatten(-1, sizes)
    # Each times cos, plus its partner times sin, where the first's partner counts negative.
    rotated = (turned * cos).add_(turned.flip(pair).mul_(sin)).flatten(-2).to(x.dtype)
    if width == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., width:]), dim=-1)


def prepare_rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles laid out for apply_rope once, where many layers use the same ones.

    cos, sin [..., rotary_dim / 2] -> [..., 1, 2, rotary_dim / 2]: one row for all heads, and both
    numbers of a pair. The first of them gets minus its partner times sin, so its sin is negative.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((cos, cos), dim=-2), torch.stack((-sin, sin), dim=-2)


def interleave_permutation(rotary_dim: int) -> torch.Tensor:
    """The order that turns an interleaved head into a half-split one.

    rotary_dim 8 -> [0, 2, 4, 6, 1, 3, 5, 7]

    `x[..., perm]` of an interleaved head, rotated half-split, is the interleaved rotation of
    x in the same order. Applied to the rows of W_q and W_k alike it changes no score, which is
    how checkpoints are converted from one layout to the other.
    """
    return torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)


class RopeTable:
    """cos and sin by position, from frequencies that are chosen once.

    rope         settings of one layer kind
    max_seq_len  the longest total length that will be served. It picks the frequencies of the
                 rules that have several, once, before the first key is cached (vLLM does the same
                 for longrope). None: up to the length the model was first trained for.

    A position past the chosen length raises RopeError instead of quietly switching, since the
    keys already cached were rotated with the old frequencies.
    """

    def __init__(
        self, rope: RopeSpec, max_seq_len: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.rope = rope
        self.limit = length_limit(rope)  # None: one table serves every length
        self.planned_len = self.limit
        if self.limit is not None and max_seq_len is not None and max_seq_len > self.limit:
            self.planned_len = max_seq_len
            self.limit = max_seq_len if rope.rope_type == "dynamic" else None
        inv_freq, self.attention_factor = rope_inv_freq(rope, self.planned_len)
        self.inv_freq = inv_freq.to(device)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [*positions.shape, rotary_dim / 2] of the given positions, float32."""
        # One number is read back from a GPU here, for the few rules that end somewhere.
        num_positions = int(positions.max()) + 1 if self.limit and positions.numel() else 0
        if self.limit is not None and num_positions > self.limit:
            raise RopeError(
                f"position {num_positions - 1} needs a total length of {num_positions}, but this "
                f"{self.rope.rope_type} table is right up to {self.limit} tokens. Keys already "
                "cached are rotated with it and would go stale. Give max_seq_len so that the "
                "table is chosen once, or recompute the prompt, or cache unrotated keys and "
                "rotate them on read."
            )
        return _turns(positions, self.inv_freq, self.attention_factor)
