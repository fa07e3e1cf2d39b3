"""Paged K and V for kernel tests: shuffled blocks, and NaN in every slot that nobody may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Largest difference from float64 that rounding explains. bf16 keeps 8 bits: half a unit in the
#: last place of a value near 2 is 0.004, and the interpreter truncates where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class PagedCase:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens)


def paged_case(
    seq_lens: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    fill: float = float("nan"),
    window: int | None = None,
) -> PagedCase:
    """Random K and V at every visible position, `fill` everywhere else.

    No sequence owns block 0, the null block. Rows of the block table end in the id 10 ** 6, which no cache has; with a window, so does
    every entry before the first visible block.
    """
    value_dim = value_dim or head_dim
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(needed) + 3
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    keys = torch.full((num_blocks, block_size, num_kv_heads, head_dim), fill, dtype=dtype)
    values = torch.full((num_blocks, block_size, num_kv_heads, value_dim), fill, dtype=dtype)
    tables = torch.full((len(seq_lens), max(needed, default=0) + 2), 10**6, dtype=torch.int32)
    for row, seq_len in enumerate(seq_lens):
        first = max(seq_len - window, 0) if window else 0
        for entry in range(first // block_size, needed[row]):
            tables[row, entry] = ids.pop()
        for position in range(first, seq_len):
            block, offset = int(tables[row, position // block_size]), position % block_size
            keys[block, offset] = torch.randn(num_kv_heads, head_dim, generator=generator)
            values[block, offset] = torch.randn(num_kv_heads, value_dim, generator=generator)
    query = torch.randn(len(seq_lens), num_heads, head_dim, generator=generator).to(dtype)
    return PagedCase(query, keys, values, tables, torch.tensor(seq_lens, dtype=torch.int32))
