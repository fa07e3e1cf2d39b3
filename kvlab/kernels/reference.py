"""The kernel's mathematics in torch: one partial softmax, the merge, and paged decode by gather.

Slow and short on purpose: this is what the kernel is held against, in float64.
"""

from __future__ import annotations

import torch


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of the keys, with what a merge needs.

    query [G, d], key [n, d], value [n, dv] -> out [G, dv], lse [G], where lse is the logarithm
    of the sum of exp(score). No keys: out is 0 and lse is -inf.
    """
    scores = query @ key.T * scale  # [G, n]
    if key.shape[0] == 0:
        return query.new_zeros(query.shape[0], value.shape[1]), query.new_full(
            (query.shape[0],), float("-inf")
        )
    lse = torch.logsumexp(scores, dim=1)
    return torch.exp(scores - lse[:, None]) @ value, lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint keys: outs [S, ..., dv], lses [S, ...].

    Each part weighs exp(lse), the sum its softmax was divided by. Where every part is empty
    (lse -inf) the result is 0 with lse -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    top = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    return (outs * torch.exp(lses - top)[..., None]).sum(dim=0), lse


def paged_decode_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention, one sequence and one KV head at a time, in `dtype`.

    query [num_seqs, num_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, dim],
    block_tables [num_seqs, max_blocks], seq_lens [num_seqs]
    -> out [num_seqs, num_heads, value_dim], lse [num_seqs, num_heads].
    """
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(num_seqs, num_heads, value_dim, dtype=dtype, device=query.device)
    lse = torch.full((num_seqs, num_heads), float("-inf"), dtype=dtype, device=query.device)
    for seq in range(num_seqs):
        seq_len = int(seq_lens[seq])
        first = max(seq_len - window, 0) if window else 0
        positions = torch.arange(first, seq_len, device=query.device)
        blocks = block_tables[seq].long()[positions // block_size]
        rows_k = key_cache[blocks, positions % block_size].to(dtype)  # [n, num_kv_heads, d]
        rows_v = value_cache[blocks, positions % block_size].to(dtype)
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            out[seq, heads], lse[seq, heads] = partial_attention(
                query[seq, heads].to(dtype), rows_k[:, head], rows_v[:, head], scale
            )
    return out, lse
