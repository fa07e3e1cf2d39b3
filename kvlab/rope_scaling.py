"""How each long-context rule bends the rotary frequencies.

    default    theta^(-2i/r)
    linear     all of them divided by factor
    dynamic    theta grown with the total length (NTK-aware)
    llama3     fast pairs kept, slow pairs divided, a blend between
    yarn       the same idea with a ramp over the pair index, and a factor on cos and sin
    longrope   one divisor per pair, a short list and a long one, switched by total length
    proportional   the first share of the pairs turns at the full head's frequencies, the rest stand

A rule's settings come from RopeSpec.params under the names that config.json uses:
factor, original_max_position_embeddings, max_position_embeddings, low_freq_factor,
high_freq_factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate,
short_factor, long_factor, short_mscale, long_mscale, alpha, partial_rotary_factor.

Sources: Llama 3.1 model card; Peng et al. 2023 (YaRN, arXiv 2309.00071); Ding et al. 2024
(LongRoPE, arXiv 2402.13753). Checked against transformers' own functions in tests/test_rope.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from kvlab.blocks import is_whole
from kvlab.errors import KvlabError
from kvlab.specs import RopeSpec


class RopeError(KvlabError):
    """RoPE settings that cannot be turned into frequencies."""


def inverse_frequencies(rope: RopeSpec, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """inv_freq [rotary_dim / 2] float32 (radians per position) and the attention factor.

    seq_len  total length (cached + new); only dynamic and longrope read it
    """
    if not is_whole(rope.rotary_dim, 0) or rope.rotary_dim % 2:
        raise RopeError(f"rotary_dim is {rope.rotary_dim}, expected an even number >= 0")
    _positive(rope, {"rope_theta": rope.theta}, "rope_theta")
    if rope.rope_type not in RULES:
        raise RopeError(
            f"rope_type is {rope.rope_type!r}, expected one of {', '.join(sorted(RULES))}. "
            "Falling back to the default table would be silently wrong, so nothing is built."
        )
    return RULES[rope.rope_type](rope, dict(rope.params), seq_len)


def length_limit(rope: RopeSpec) -> int | None:
    """Longest total length that the first table serves; None where one table serves all."""
    params = dict(rope.params)
    if rope.rope_type == "longrope":
        return int(_positive(rope, params, "original_max_position_embeddings"))
    if rope.rope_type == "dynamic" and not params.get("alpha"):
        return _dynamic_limit(rope, params)
    return None


def _need(rope: RopeSpec, params: Mapping[str, object], name: str) -> float:
    value = params.get(name)
    if value is None:
        raise RopeError(
            f"rope_type {rope.rope_type!r} needs {name!r}, the settings are "
            f"{sorted(params) or 'empty'}. Add it to rope_parameters (rope_scaling in old configs)."
        )
    return value  # type: ignore[return-value]


def _positive(rope: RopeSpec, params: Mapping[str, object], name: str) -> float:
    """A setting that divides something: 0 would give infinite angles and no exception."""
    value = _need(rope, params, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise RopeError(
            f"rope_type {rope.rope_type!r}: {name} is {value!r}, expected a positive number"
        )
    return float(value)


def _optional(rope: RopeSpec, params: Mapping[str, object], name: str, default: float) -> float:
    """A setting that may be missing. 0 counts as missing, as in transformers."""
    return _positive(rope, params, name) if params.get(name) else default


def _stretch(rope: RopeSpec, params: Mapping[str, object], original: float) -> float:
    """How many times the original length: as given, or from the two lengths."""
    if params.get("factor") is None:
        return _positive(rope, params, "max_position_embeddings") / original
    return _positive(rope, params, "factor")


def _base(theta: float, dim: int) -> torch.Tensor:
    """theta^(-2i/dim) for i = 0..dim/2-1, float32 throughout as the checkpoints were trained."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim))


def _default(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    return _base(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    return _base(rope.theta, rope.rotary_dim) / _positive(rope, params, "factor"), 1.0


def _proportional(
    rope: RopeSpec, params: Mapping, seq_len: int | None
) -> tuple[torch.Tensor, float]:
    share = _optional(rope, params, "partial_rotary_factor", 1.0)
    inv_freq = _base(rope.theta, rope.rotary_dim)
    inv_freq[int(share * rope.rotary_dim // 2) :] = 0.0  # these pairs do not turn
    return inv_freq / _optional(rope, params, "factor", 1.0), 1.0


def _dynamic_limit(rope: RopeSpec, params: Mapping) -> int:
    name = "max_position_embeddings"
    if params.get(name) is None:
        name = "original_max_position_embeddings"
    return int(_positive(rope, params, name))


def _dynamic(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    dim = rope.rotary_dim
    if dim == 2:
        raise RopeError(
            "rope_type 'dynamic' with rotary_dim 2: its exponent is dim / (dim - 2), expected 4 or "
            "more rotated dimensions"
        )
    if params.get("alpha"):  # Hunyuan: a stretch that is fixed, and so one table for all lengths
        stretch = _positive(rope, params, "alpha")
    else:
        factor, limit = _positive(rope, params, "factor"), _dynamic_limit(rope, params)
        stretch = factor * max(seq_len or limit, limit) / limit - (factor - 1)
    return _base(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    factor = _positive(rope, params, "factor")
    low = _positive(rope, params, "low_freq_factor")
    high = _positive(rope, params, "high_freq_factor")
    original = _positive(rope, params, "original_max_position_embeddings")
    if low > high:
        raise RopeError(
            f"rope_type 'llama3': low_freq_factor is {low:g} and high_freq_factor {high:g}, "
            "expected the first to be at most the second: between them frequencies are blended"
        )
    inv_freq = _base(rope.theta, rope.rotary_dim)
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


def _yarn(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    original = _positive(rope, params, "original_max_position_embeddings")
    if rope.theta <= 1:
        raise RopeError(f"rope_type 'yarn' with rope_theta {rope.theta}: expected more than 1")
    factor = _stretch(rope, params, original)
    if params.get("attention_factor") is not None:
        attention_factor = _positive(rope, params, "attention_factor")
    else:
        mscale = _optional(rope, params, "mscale", 0)
        all_dim = _optional(rope, params, "mscale_all_dim", 0)
        attention_factor = yarn_attention_factor(factor)
        if mscale and all_dim:  # DeepSeek: the second one is undone inside its softmax
            attention_factor = yarn_attention_factor(factor, mscale)
            attention_factor /= yarn_attention_factor(factor, all_dim)
    dim = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_that_turns(_optional(rope, params, "beta_fast", 32))
    high = pair_that_turns(_optional(rope, params, "beta_slow", 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    turning = rope.theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    inv_freq = 1.0 / (factor * turning) * (1 - keep) + 1.0 / turning * keep
    return inv_freq, attention_factor


def _longrope(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    original = int(_positive(rope, params, "original_max_position_embeddings"))
    length = "long" if seq_len and seq_len > original else "short"
    name = f"{length}_factor"
    given = _need(rope, params, name)
    entries = given if isinstance(given, list | tuple) else (given,)
    divisors = torch.tensor([_positive(rope, {name: entry}, name) for entry in entries])
    if divisors.shape != (rope.rotary_dim // 2,):
        raise RopeError(
            f"{name} has {divisors.numel()} entries, expected {rope.rotary_dim // 2}: one per "
            f"rotated pair (rotary_dim {rope.rotary_dim})"
        )
    # Phi MoE and Phi-3 small: a factor of its own for each of the two tables
    own = f"{length}_mscale" if f"{length}_mscale" in params else "attention_factor"
    if params.get(own) is not None:
        attention_factor = _positive(rope, params, own)
    else:
        factor = _stretch(rope, params, original)
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    exponent = torch.arange(0, rope.rotary_dim, 2).to(torch.float32) / rope.rotary_dim
    return 1.0 / (divisors * rope.theta**exponent), attention_factor


def _none(rope: RopeSpec, params: Mapping, seq_len: int | None) -> tuple[torch.Tensor, float]:
    return torch.zeros(rope.rotary_dim // 2), 1.0  # an angle of zero leaves x as it is


#: rope_type -> the function that builds its frequencies.
RULES: dict[str, Callable[[RopeSpec, Mapping, int | None], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "none": _none,
}
