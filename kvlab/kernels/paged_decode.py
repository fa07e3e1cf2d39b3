"""Two Triton kernels: paged decode attention over splits of the KV range, and their merge.

Decoding asks one question per sequence and head: one query against every cached key. The work is
cut three ways. A program takes one sequence, one KV head and one split of the positions. All
query heads that share the KV head sit in one tile, so K and V are read once for all of them. Each
program leaves a partial output and its log-sum-exp; the second kernel merges them.

Shapes: query [num_seqs, num_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, dim]
in any stride order, block_tables [num_seqs, max_blocks], seq_lens [num_seqs].

The kernels come first, then what the launcher refuses, and last the launcher itself,
`paged_decode(query, key_cache, value_cache, block_tables, seq_lens)`.

After FlashAttention's online softmax and Flash-Decoding's split over the KV range (Dao et al.,
2022 and 2023) and PagedAttention's block table (Kwon et al., 2023).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from kvlab.blocks import NULL_BLOCK
from kvlab.kernels import KernelError, refuse
from kvlab.kernels.splits import MAX_SPLITS, SUPPORTED_FROM, choose_num_splits, choose_tile

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


def kernel_device() -> str | None:
    """Where this process runs Triton kernels: "cuda", "cpu" (the interpreter), or None."""
    if triton is None:
        return None
    if INTERPRETED:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


#: Stands for "no window": larger than any sequence.
NO_WINDOW = 2**31 - 1
#: dtypes the kernel takes for query, keys and values
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _device_facts(device: torch.device) -> tuple[int, int]:
    """(capability, number of multiprocessors); the interpreter counts as a card with one."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.major * 10 + properties.minor, properties.multi_processor_count
    return SUPPORTED_FROM, 1


# A kernel that is handed a wrong tensor does not complain: it reads someone else's memory. So the
# launcher looks at shapes, dtypes, devices and strides on every call (no work on the device), and
# into the block tables where its caller has not done so already.


def misfits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None,
    window: int | None,
    num_splits: int | None,
) -> Iterator[str]:
    """What does not fit about a call of `paged_decode`, first things first."""
    tables = {
        "block_tables": (block_tables, "[num_seqs, max_blocks]"),
        "seq_lens": (seq_lens, "[num_seqs]"),
    }
    named = {
        "query": (query, "[num_seqs, num_heads, head_dim]"),
        "key_cache": (key_cache, "[num_blocks, block_size, num_kv_heads, head_dim]"),
        "value_cache": (value_cache, "[num_blocks, block_size, num_kv_heads, value_dim]"),
    } | tables
    for name, (tensor, shape) in named.items():
        if tensor.dim() != shape.count(",") + 1:
            yield f"{name} has shape {list(tensor.shape)}; expected {shape}. Reshape it."
        elif tensor.device != query.device:
            yield f"{name} lies on {tensor.device}, query on {query.device}; expected one device."
        elif tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            yield (
                f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1, since "
                "it is loaded in runs. Call .contiguous(), or transpose another dimension."
            )
    (num_seqs, num_heads, head_dim), keys, values = query.shape, key_cache.shape, value_cache.shape
    hint = "If heads come before tokens in the caches, pass them .transpose(1, 2)."
    if keys[:3] != values[:3]:
        yield (
            f"key_cache {list(keys)} and value_cache {list(values)} must agree in num_blocks, "
            f"block_size and num_kv_heads. {hint}"
        )
    if keys[3] != head_dim:
        yield f"query has head_dim {head_dim}, key_cache {list(keys)} has {keys[3]}. {hint}"
    if head_dim == 0 or keys[1] == 0:
        yield f"key_cache {list(keys)}; expected a head_dim and a block_size above 0."
    if keys[2] == 0 or num_heads % keys[2]:
        yield f"{num_heads} query heads; expected a multiple of num_kv_heads, {keys[2]}. {hint}"
    for name, (tensor, _) in tables.items():
        if tensor.shape[0] != num_seqs:
            yield f"{name} has {tensor.shape[0]} rows for {num_seqs} queries; expected one each."
        if tensor.dtype not in (torch.int32, torch.int64):
            yield f"{name} is {tensor.dtype}; expected int32 or int64."
    if not query.dtype == key_cache.dtype == value_cache.dtype or query.dtype not in DTYPES:
        yield (
            f"query {query.dtype}, keys {key_cache.dtype}, values {value_cache.dtype}; expected "
            "one and the same of float32, float16, bfloat16. Convert the query to the cache's."
        )
    if scale is not None and not math.isfinite(scale):
        yield f"scale {scale}; expected None or a finite number."
    if window is not None and (type(window) is not int or window < 1):
        yield f"window {window}; expected None or at least 1 (the query itself)."
    splits = 1 if num_splits is None else num_splits
    if type(splits) is not int or not 1 <= splits <= MAX_SPLITS:
        yield f"num_splits {num_splits}; expected None or 1 to {MAX_SPLITS}."


def check_block_tables(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    window: int | None = None,
) -> int:
    """Every entry the kernel will look up names a real block; returns the longest seq_len.

    Only entries between the first visible position and the last one count: what stands in the
    rest of a row (padding, -1, blocks a window has left behind) is never read. Copies both
    tensors to the host, so an engine calls it once per step and passes check=False per layer.
    """
    if seq_lens.numel() == 0:
        return 0
    lens = seq_lens.to("cpu", torch.int64)
    table = block_tables.to("cpu", torch.int64)
    width = table.shape[1]

    def problems() -> Iterator[str]:
        if int(lens.min()) < 0:
            yield f"seq_lens holds {int(lens.min())}; lengths are 0 or more."
        needed = -(-lens // block_size)  # blocks per row
        if int(needed.max()) > width:
            row = int(needed.argmax())
            yield (
                f"sequence {row} has {int(lens[row])} tokens, {int(needed[row])} blocks of "
                f"{block_size}, but its block table has {width} entries. Grow the table."
            )
        first = (lens - window).clamp(min=0) // block_size if window else torch.zeros_like(lens)
        entry = torch.arange(width)[None, :]
        used = (entry >= first[:, None]) & (entry < needed[:, None])
        unreal = (table <= NULL_BLOCK) | (table >= num_blocks)
        for row, column in (used & unreal).nonzero().tolist():
            yield (
                f"block_tables[{row}, {column}] is {int(table[row, column])}; the cache has blocks "
                f"1 to {num_blocks - 1}, and block 0 holds nothing to read. The table is stale, or "
                "belongs to another pool."
            )

    refuse(problems())
    return int(lens.max())


def _out_of_reach(query: torch.Tensor) -> Iterator[str]:
    """Why Triton cannot work on this tensor in this process."""
    if triton is None:
        yield (
            "Triton is not installed (it has wheels for Linux only). kvlab.kernels.choose falls "
            "back to torch."
        )
    if query.device.type == "cpu" and not INTERPRETED:
        yield (
            "the tensors are on the CPU and this process imported Triton without its interpreter. "
            "Start a new process with TRITON_INTERPRET=1; kvlab.kernels.choose falls back to torch."
        )
    if query.device.type not in ("cpu", "cuda"):
        yield f"the kernel runs on CUDA devices; got {query.device}."
    if query.dtype == torch.bfloat16 and _device_facts(query.device)[0] < SUPPORTED_FROM:
        yield "this GPU has no bf16 arithmetic (capability below 8.0); use float16."


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    fold: Any = None,
    max_seq_len: int | None = None,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query per sequence against its paged K and V.

    query          [num_seqs, num_heads, head_dim], any strides but the last
    key_cache      [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last
    value_cache    the same with value_dim
    block_tables   [num_seqs, max_blocks] int32 or int64: block of each run of block_size tokens;
                   block 0 is the null block and is never read
    seq_lens       [num_seqs] int: cached tokens, this query's own included; 0 is allowed
    scale          head_dim ** -0.5 unless given
    window         positions the query may look back on, itself included
    num_splits     chosen by `choose_num_splits` unless given
    fold           the inner step, `fold_tile` unless given
    max_seq_len    an upper bound that saves reading seq_lens; only the split rule uses it
    check          False skips reading block_tables and seq_lens (see `check_block_tables`); a
                   block id out of range then turns that sequence's output into NaN

    -> out [num_seqs, num_heads, value_dim] in the query's dtype, and lse [num_seqs, num_heads]
    in float32 (natural logarithm). A sequence of length 0 gives exactly 0 and -inf.
    Raises KernelError.
    """
    case = (query, key_cache, value_cache, block_tables, seq_lens)
    refuse(misfits(*case, scale, window, num_splits))
    refuse(_out_of_reach(query))

    num_seqs, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, value_dim = value_cache.shape
    group = num_heads // num_kv_heads
    if check:
        max_seq_len = check_block_tables(block_tables, seq_lens, num_blocks, block_size, window)
    elif max_seq_len is None:
        max_seq_len = block_tables.shape[1] * block_size
    capability, num_multiprocessors = _device_facts(query.device)
    tile = choose_tile(group, head_dim, value_dim, query.element_size(), capability)
    if num_splits is None:
        num_splits = choose_num_splits(
            num_seqs, num_kv_heads, max_seq_len, num_multiprocessors, tile.keys, window
        )

    rows = num_seqs * num_heads
    out = query.new_empty(num_seqs, num_heads, value_dim)
    fp32: Any = {"dtype": torch.float32, "device": query.device}
    lse = torch.empty(num_seqs, num_heads, **fp32)
    if rows == 0:
        return out, lse
    part, part_lse = out, lse  # one split needs no merge: it writes the answer itself
    if num_splits > 1:
        part = torch.empty(rows, num_splits, value_dim, **fp32)
        part_lse = torch.empty(rows, num_splits, **fp32)
    on_device = torch.cuda.device(query.device) if query.is_cuda else nullcontext()
    with on_device:
        try:
            decode_split[(num_seqs, num_kv_heads, num_splits)](
                part,
                part_lse,
                *case,
                head_dim**-0.5 if scale is None else scale,
                NO_WINDOW if window is None else window,
                num_blocks,
                *query.stride()[:2],
                *key_cache.stride()[:3],
                *value_cache.stride()[:3],
                block_tables.stride(0),
                FOLD=fold_tile if fold is None else fold,
                UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
                **tile.constants(group, head_dim, value_dim, block_size),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        except triton.OutOfResources as error:
            raise KernelError(
                f"{tile} with head_dim {head_dim} in {query.dtype} does not fit this GPU: {error}. "
                "Use 16-bit K and V, or torch: choose_backend(prefer='torch')."
            ) from error
        if num_splits > 1:
            constants = tile.merge_constants(value_dim, num_splits)
            merge_splits[(rows,)](out, lse, part, part_lse, num_splits, **constants, num_warps=4)
    return out, lse
