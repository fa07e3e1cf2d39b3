"""How the elements of a KV cache are stored: plain numbers, or blocks that share a scale.

A block-scaled format keeps `block` values and one scale for them in `block_bytes`; its bytes per
element are an exact fraction, so that a cache of q8_0 is not off by its scales.

Sources: llama.cpp's block_q8_0 and block_q4_0; the OCP Microscaling formats (MX) specification;
NVIDIA's NVFP4 (16 values and an FP8 scale).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvlab.errors import KvlabError
from kvlab.specs import ModelSpec


class KvFormatError(KvlabError):
    """A storage format that is not known, or whose blocks do not tile a model's rows."""


@dataclass(frozen=True)
class StorageFormat:
    """How elements are stored: `block` of them at a time, in `block_bytes` (scales included)."""

    name: str
    block: int
    block_bytes: int
    note: str = ""

    @property
    def bytes_per_element(self) -> int | Fraction:
        """Exact: 2 for bf16, 17/16 for q8_0."""
        share = Fraction(self.block_bytes, self.block)
        return share.numerator if share.denominator == 1 else share


#: Name -> format. Per-tensor scales (a number or two for the whole cache) are not counted.
FORMATS: dict[str, StorageFormat] = {
    f.name: f
    for f in (
        StorageFormat("fp32", 1, 4),
        StorageFormat("bf16", 1, 2),
        StorageFormat("fp16", 1, 2),
        StorageFormat("fp8", 1, 1, "one scale for a whole tensor, not counted"),
        StorageFormat("int8", 1, 1, "one scale for a whole tensor, not counted"),
        StorageFormat("int8_g32", 32, 34, "32 values of 8 bits and a 2-byte scale"),
        StorageFormat("int8_g128", 128, 130, "128 values of 8 bits and a 2-byte scale"),
        StorageFormat("int4", 32, 18, "32 values of 4 bits and a 2-byte scale"),
        StorageFormat("int4_g64", 64, 36, "64 values of 4 bits, a 2-byte scale and a 2-byte zero"),
        StorageFormat("mxfp8", 32, 33, "32 values of 8 bits and a 1-byte scale"),
        StorageFormat("mxfp4", 32, 17, "32 values of 4 bits and a 1-byte scale"),
        StorageFormat("nvfp4", 16, 9, "16 values of 4 bits and a 1-byte scale"),
        StorageFormat("q8_0", 32, 34, "llama.cpp: 32 values of 8 bits and a 2-byte scale"),
        StorageFormat("q4_0", 32, 18, "llama.cpp: 32 values of 4 bits and a 2-byte scale"),
        StorageFormat("q4_1", 32, 20, "llama.cpp: as q4_0, and a 2-byte minimum"),
        StorageFormat("q5_0", 32, 22, "llama.cpp: 32 values of 5 bits and a 2-byte scale"),
        StorageFormat("q5_1", 32, 24, "llama.cpp: as q5_0, and a 2-byte minimum"),
        StorageFormat("iq4_nl", 32, 18, "llama.cpp: 32 values of 4 bits and a 2-byte scale"),
    )
}
OTHER_NAMES = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "fp8_inc": "fp8", "f16": "fp16", "f32": "fp32",
}  # fmt: skip


def storage_format(name: str) -> StorageFormat:
    """The format of a name such as bf16, fp8 or q8_0."""
    key = name.lower().removeprefix("torch.") if isinstance(name, str) else name
    found = FORMATS.get(OTHER_NAMES.get(key, key)) if isinstance(key, str) else None
    if found is None:
        raise KvFormatError(f"kv dtype: given {name!r}; expected one of {', '.join(FORMATS)}")
    return found


def require_whole_blocks(spec: ModelSpec, storage: StorageFormat) -> None:
    """Refuse a block-scaled format whose blocks do not tile a layer's row of K or of V."""
    for _, layer in spec.layer_groups:
        for row in (layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim):
            if row % storage.block:
                raise KvFormatError(
                    f"kv dtype {storage.name}: a row of {row} elements ({layer.kind} layer of "
                    f"{spec.name}) is not a whole number of blocks of {storage.block}; choose a "
                    f"format with smaller blocks"
                )
