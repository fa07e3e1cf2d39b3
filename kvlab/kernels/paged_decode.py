"""Two Triton kernels: paged decode attention over splits of the KV range, and their merge.

Decoding asks one question per sequence and head: one query against every cached key. The work is
cut three ways. A program takes one sequence, one KV head and one split of the positions. All
query heads that share the KV head sit in one tile, so K and V are read once for all of them. Each
program leaves a partial output and its log-sum-exp; the second kernel merges them.

Shapes: query [num_seqs, num_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, dim]
in any stride order, block_tables [num_seqs, max_blocks], seq_lens [num_seqs].

After FlashAttention's online softmax and Flash-Decoding's split over the KV range (Dao et al.,
2022 and 2023) and PagedAttention's block table (Kwon et al., 2023).
"""

from __future__ import annotations

import os

# Fused multiply-add, today's default, said aloud: Triton 3.10 will change the default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:  # Triton has wheels for Linux only; elsewhere the launcher says so and torch does the work
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


def jit(function):
    """triton.jit, where there is Triton."""
    return triton.jit(function) if triton is not None else function


@jit
def kv_offset(block_id, slot, head, stride_block, stride_token, stride_head):
    """Elements from the cache's start to row (block_id, slot, head).

    Pass block_id and slot as 64-bit integers: block 65,536 of Llama-3-8B's packed blocks of
    32,768 elements starts at element 2^31, one more than a 32-bit integer can hold.
    """
    return block_id * stride_block + slot * stride_token + head * stride_head


@jit
def fold_tile(top, total, acc, q, k, v, visible, scale):
    """Fold one tile of keys into the running softmax of a group of query heads.

    top, total [G]: largest score so far, and sum of exp(score - top). acc [G, DV]: sum of
    exp(score - top) * value, not yet divided by total. q [G, D], k [N, D], v [N, DV], visible [N].
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [G, N] in fp32
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)  # what the old sums are worth under the new maximum
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@jit
def decode_split(
    out_ptr,  # [num_seqs, num_heads, num_splits, VALUE_DIM], contiguous
    lse_ptr,  # [num_seqs, num_heads, num_splits], contiguous
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    seq_lens_ptr,
    scale,
    window,  # positions a query may look back on, itself included
    num_blocks,
    query_stride_seq,
    query_stride_head,
    key_stride_block,
    key_stride_token,
    key_stride_head,
    value_stride_block,
    value_stride_token,
    value_stride_head,
    table_stride_seq,
    FOLD: tl.constexpr,  # fold_tile, or a reader's own
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens per cache block, any number
    BLOCK_G: tl.constexpr,  # GROUP, HEAD_DIM, VALUE_DIM rounded up: the tile's shape
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,  # keys per turn of the loop
    UPCAST: tl.constexpr,  # the interpreter multiplies raw bf16 bits: widen before tl.dot
):
    """One program: one sequence, one KV head, one split of the positions."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    num_splits = tl.num_programs(2)

    # Which positions are mine: whole tiles, shared out evenly over the splits.
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
    first_tile = first // TILE
    num_tiles = tl.cdiv(seq_len, TILE) - first_tile
    per_split = tl.cdiv(num_tiles, num_splits)
    begin = (first_tile + split * per_split) * TILE
    end = tl.minimum(begin + per_split * TILE, seq_len)

    # The group's queries, loaded once. Padded rows and lanes are zeros.
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    n = tl.arange(0, TILE)
    heads = kv_head * GROUP + g
    query_rows = seq * query_stride_seq + heads * query_stride_head
    query_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(query_ptr + query_rows[:, None] + d[None, :], mask=query_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    top = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    foreign = tl.zeros([TILE], tl.int32)  # block ids that do not exist, seen so far

    for start in range(begin, end, TILE):
        position = start + n
        mine = (position >= first) & (position < end)
        # position -> block id -> row. A masked position loads nothing: no table entry past the
        # sequence's last block, no unwritten slot (0 * NaN would be NaN), no other block.
        entry = seq * table_stride_seq + position // BLOCK_SIZE
        block_id = tl.load(table_ptr + entry, mask=mine, other=0).to(tl.int64)
        exists = (block_id >= 0) & (block_id < num_blocks)
        foreign += (mine & (exists == 0)).to(tl.int32)
        visible = mine & exists
        slot = (position % BLOCK_SIZE).to(tl.int64)
        k_row = kv_offset(
            block_id, slot, kv_head, key_stride_block, key_stride_token, key_stride_head
        )
        v_row = kv_offset(
            block_id, slot, kv_head, value_stride_block, value_stride_token, value_stride_head
        )
        k_mask = visible[:, None] & (d < HEAD_DIM)[None, :]
        v_mask = visible[:, None] & (dv < VALUE_DIM)[None, :]
        k = tl.load(key_ptr + k_row[:, None] + d[None, :], mask=k_mask, other=0.0)
        v = tl.load(value_ptr + v_row[:, None] + dv[None, :], mask=v_mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        top, total, acc = FOLD(top, total, acc, q, k, v, visible, scale)

    # A foreign block id was never followed, and must not pass unseen: the row becomes NaN.
    total = tl.where(tl.sum(foreign, 0) > 0, float("nan"), total)
    # An empty split saw no key: output 0, lse -inf, and no division by zero.
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -float("inf"), top + tl.log(divisor))
    out = acc / divisor[:, None]
    row = (seq * num_kv_heads * GROUP + heads) * num_splits + split
    out_mask = (g < GROUP)[:, None] & (dv < VALUE_DIM)[None, :]
    out_at = out_ptr + row[:, None] * VALUE_DIM + dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + row, lse, mask=g < GROUP)


@jit
def merge_splits(
    out_ptr,  # [rows, VALUE_DIM], contiguous; a row is one (sequence, query head)
    lse_ptr,  # [rows], contiguous
    part_ptr,  # [rows, num_splits, VALUE_DIM]
    part_lse_ptr,  # [rows, num_splits]
    num_splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,  # num_splits rounded up
    CHUNK: tl.constexpr,  # partial results loaded per turn
):
    """One program: weigh one row's partial outputs by exp(lse) and add them up."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_V)
    s = tl.arange(0, BLOCK_S)
    lse = tl.load(part_lse_ptr + row * num_splits + s, mask=s < num_splits, other=-float("inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == -float("inf"), 0.0, top)  # nothing anywhere: avoid -inf minus -inf
    total = tl.sum(tl.exp(lse - top), 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, num_splits, CHUNK):
        c = start + tl.arange(0, CHUNK)
        part_lse = tl.load(
            part_lse_ptr + row * num_splits + c, mask=c < num_splits, other=-float("inf")
        )
        mask = (c < num_splits)[:, None] & (dv < VALUE_DIM)[None, :]
        at = part_ptr + (row * num_splits + c)[:, None] * VALUE_DIM + dv[None, :]
        acc += tl.sum(tl.load(at, mask=mask, other=0.0) * tl.exp(part_lse - top)[:, None], 0)
    out = (acc / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * VALUE_DIM + dv, out, mask=dv < VALUE_DIM)
    tl.store(lse_ptr + row, tl.where(total == 0.0, -float("inf"), top + tl.log(divisor)))


#: True when this process imported Triton with TRITON_INTERPRET=1: kernels run in Python.
INTERPRETED = triton is not None and not isinstance(decode_split, triton.JITFunction)
