"""Rotary position embedding: the frequencies, the tables, the rotation.

    x = [1, 2, 3, 4, 5, 6, 7, 8], position 1, theta 10 000
    half-split:   pairs (1,5) (2,6) (3,7) (4,8)  -> [-3.667, 1.391, 2.930, 3.992, 3.543, ...]
    interleaved:  pairs (1,2) (3,4) (5,6) (7,8)  -> [-1.143, 1.922, 2.586, 4.280, 4.940, ...]

Pair i of a head turns by the angle position * inv_freq[i]. Only the difference of two
positions survives in a dot product, which is why a key can be rotated once and kept.
The rules that bend inv_freq for long contexts live in rope_scaling.py.

Everything here is a pure function of its arguments, except RopeTable, which keeps the rows
that it has already built. Angles are always computed in float32: in bfloat16 the integers
above 256 are no longer all different, so neighbouring positions would share an angle.

Source: Su et al. 2021, arXiv 2104.09864. Checkpoints in Hugging Face format use half-split.
"""

from __future__ import annotations

from typing import Any

import torch

from kvlab.errors import KvlabError
from kvlab.rope_scaling import RopeError, inverse_frequencies, length_limit
from kvlab.specs import RopeSpec

__all__ = [
    "RopeError",
    "RopeTable",
    "StaleRotation",
    "apply_rope",
    "interleave_permutation",
    "prepare_rotation",
    "rope_inv_freq",
    "rope_tables",
    "table_id",
]


class StaleRotation(KvlabError):
    """The table would have to change while keys rotated with the old one are still cached."""


def rope_inv_freq(rope: RopeSpec, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Radians per position of every pair, and the factor that multiplies cos and sin.

    rope     settings of one layer kind
    seq_len  total length, only read by the rules whose table depends on it (dynamic, longrope)

    Returns inv_freq [rotary_dim / 2] float32 and the attention factor (1.0 for most rules).
    """
    return inverse_frequencies(rope, seq_len)


def rope_tables(
    rope: RopeSpec, positions: int | torch.Tensor, *, seq_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every angle, float32.

    positions  an integer n for positions 0..n-1, or a tensor of positions of any shape [...]
    seq_len    see rope_inv_freq

    Returns cos, sin, each [n, rotary_dim / 2] (or [..., rotary_dim / 2]), already multiplied
    by the attention factor.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions)
    inv_freq, attention_factor = rope_inv_freq(rope, seq_len)
    angles = positions.to(torch.float32)[..., None] * inv_freq.to(positions.device)
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
    if x.shape[-1] < width:
        raise RopeError(
            f"x has head_dim {x.shape[-1]}, cos and sin rotate {width}: expected rotary_dim to be "
            "at most head_dim"
        )
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


def table_id(rope: RopeSpec, seq_len: int) -> str:
    """A name for the table that a total length of seq_len asks for.

    Two lengths with different ids need differently rotated keys, so a cache filled under one
    id cannot be read under the other. Most rules have a single table, "fixed".
    """
    limit = length_limit(rope)
    if limit is None:
        return "fixed"
    if seq_len <= limit:
        return "short"
    return "long" if rope.rope_type == "longrope" else f"length-{seq_len}"


class RopeTable:
    """cos and sin by position, built once and grown on demand.

    rope         settings of one layer kind
    max_seq_len  the longest total length that will be served. It picks the table of the rules
                 that have several, once, before the first key is cached (vLLM does the same
                 for longrope). None: up to the length the model was first trained for.

    A position past the chosen table raises StaleRotation instead of quietly switching, since
    the keys already cached were rotated with the old table.
    """

    def __init__(
        self,
        rope: RopeSpec,
        max_seq_len: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rope = rope
        self.limit = length_limit(rope)  # None: one table serves every length
        if self.limit is not None and max_seq_len is not None and max_seq_len > self.limit:
            self.limit = max_seq_len if rope.rope_type == "dynamic" else None
            self.planned_len: int | None = max_seq_len
        else:
            self.planned_len = self.limit
        self.table_id = table_id(rope, self.planned_len or 1)
        self.device, self.dtype = torch.device(device), dtype
        self.cos = torch.empty(0, rope.rotary_dim // 2, dtype=dtype, device=self.device)
        self.sin = self.cos.clone()

    def grow(self, num_positions: int) -> None:
        """Make sure that rows 0..num_positions-1 exist."""
        if self.limit is not None and num_positions > self.limit:
            raise StaleRotation(
                f"position {num_positions - 1} needs a total length of {num_positions}, but this "
                f"{self.rope.rope_type} table ({self.table_id}) is right up to {self.limit} "
                "tokens. Keys already cached are rotated with it and would go stale. Give "
                "max_seq_len so that the table is chosen once, or recompute the prompt, or "
                "cache unrotated keys and rotate them on read."
            )
        if num_positions <= self.cos.shape[0]:
            return
        rows = max(num_positions, 2 * self.cos.shape[0])
        if self.limit is not None:
            rows = min(rows, self.limit)
        cos, sin = rope_tables(self.rope, rows, seq_len=self.planned_len)
        self.cos = cos.to(device=self.device, dtype=self.dtype)
        self.sin = sin.to(device=self.device, dtype=self.dtype)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [*positions.shape, rotary_dim / 2] of the given positions (integers >= 0).

        Raises RopeError for a negative one: as an index it would quietly be the last row built.
        """
        if positions.numel():
            first, last = (int(end) for end in positions.aminmax())
            if first < 0:
                raise RopeError(
                    f"position {first} given, expected 0 or more: an idle row has position 0"
                )
            self.grow(last + 1)
        return self.cos[positions], self.sin[positions]

    def __repr__(self) -> str:
        settings: dict[str, Any] = {"rows": self.cos.shape[0], "table": self.table_id}
        return f"RopeTable({self.rope.rope_type}, {settings})"
