"""Faults of a decode kernel: offsets, masks, strides, precision and the merge.

They are switched on in kernels/walk.py, the kernel's steps in torch, so that they can be seen on
any machine; tests hold the walk equal to the Triton kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from kvlab.faults.describe import NOTHING
from kvlab.faults.registry import Fault, FaultDetected, register
from kvlab.faults.seams import replaced
from kvlab.kernels import walk
from kvlab.kernels.checks import BlockIdOutOfRange
from kvlab.kernels.reference import paged_decode_reference

#: Elements of one of Llama-3-8B's blocks with K and V packed: 16 tokens, 2, 8 heads, 128.
PACKED_BLOCK = 16 * 2 * 8 * 128


def _case(seq_lens: list[int], fill: float = 0.0) -> tuple[torch.Tensor, ...]:
    """query, keys, values, tables, lens: 4 heads on 2, d 8, block 4, blocks 1, 2, ... in turn."""
    generator = torch.Generator().manual_seed(5)
    needed = [-(-n // 4) for n in seq_lens]
    tables = torch.zeros(len(seq_lens), max(needed) + 1, dtype=torch.int32)
    caches = torch.full((2, sum(needed) + 2, 4, 2, 8), fill)
    block = 0
    for row, seq_len in enumerate(seq_lens):
        for position in range(seq_len):
            block += position % 4 == 0
            tables[row, position // 4] = block
            caches[:, block, position % 4] = torch.randn(2, 2, 8, generator=generator)
    query = torch.randn(len(seq_lens), 4, 8, generator=generator)
    return query, caches[0], caches[1], tables, torch.tensor(seq_lens)


def _poisoned_case() -> tuple[torch.Tensor, ...]:
    """13 tokens in blocks of 4; the slots that hold no token hold NaN."""
    return _case([13], math.nan)


def _fused() -> tuple[torch.Tensor, ...]:
    """The case of 9 tokens, with K and V as slices of one buffer, as a fused projection leaves."""
    query, keys, values, tables, lens = _case([9])
    buffer = torch.cat((keys, keys + 1, values), dim=2)  # heads 0-1 are K, 4-5 are V
    return query, buffer[:, :, :2], buffer[:, :, 4:], tables, lens


def _huge_scores() -> tuple[torch.Tensor, ...]:
    """Equal scores of 90,510: more than fp16 holds. Softmax must give every key the same weight."""
    query, keys, values, tables, lens = _case([6])
    return query.fill_(256.0), keys.fill_(125.0), values, tables, lens


def _error(make: Callable[[], tuple[torch.Tensor, ...]]) -> float:
    """Largest difference of the walk from float64; infinity where it is not a number."""
    case = make()
    wrong = (walk.paged_decode_walk(*case)[0] - paged_decode_reference(*case)[0]).abs().max().item()
    return wrong if math.isfinite(wrong) else math.inf


def _detector(make: Callable[[], tuple[torch.Tensor, ...]], advice: str) -> Callable[..., None]:
    def detect(steps: int = 8) -> None:
        wrong = _error(make)
        if wrong > 1e-4:
            raise FaultDetected(
                f"the output differs from float64 by {wrong:.3g}, expected under 1e-4. {advice}"
            )

    return detect


def _wrapped_offset() -> float:
    """Offset of block 65,536 over what it should be, minus one, without sign."""
    block = torch.tensor([65_536])
    offset = walk.kv_offset(block, torch.zeros_like(block), 0, (PACKED_BLOCK, 2048, 128))
    return abs(int(offset) / (65_536 * PACKED_BLOCK) - 1)


def _detect_wrapped(steps: int = 8) -> None:
    if _wrapped_offset() > 0:
        raise FaultDetected(
            "block 65,536 of 32,768 elements starts at 2,147,483,648; the offset came out "
            "otherwise. Widen block ids to 64 bits before the product, not after it."
        )


def _foreign_block() -> float:
    """0 if a table that names block 4 of 4 is refused; else how far the answer is off."""
    query, keys, values, tables, lens = _case([16])
    right, _ = paged_decode_reference(query, keys, values, tables, lens)
    keys, values, tables = keys[:4], values[:4], tables.clone()
    try:
        out, _ = walk.paged_decode_walk(query, keys, values, tables.where(tables != 3, 5), lens)
    except BlockIdOutOfRange:
        return 0.0
    return (out - right).abs().max().item()


def _detect_foreign(steps: int = 8) -> None:
    if (wrong := _foreign_block()) > 0:
        raise FaultDetected(
            f"a block id past the pool's 4 blocks was followed (the output moved by {wrong:.3g}). "
            "Check ids against both ends, when a table is read as well as when it is written."
        )


def _narrow(original, block_id, slot, head, strides):
    return original(block_id.int(), slot.int(), head, strides)


def _unguarded_merge(original, outs, lses):
    weights = torch.exp(lses - lses.max(dim=0).values)
    total = weights.sum(dim=0)
    return (outs * weights[..., None]).sum(dim=0) / total[..., None], torch.logsumexp(lses, 0)


def _averaged(original, outs, lses):
    return outs.mean(dim=0), torch.logsumexp(lses, 0)


def _unmasked_load(original, cache, offsets, visible):
    return original(cache, offsets, torch.ones_like(visible))


def _fp16_scores(original, top, total, acc, q, k, v, visible, scale):
    q, k = q.half(), k.half()
    scores = (q @ k.T).float()  # stored as fp16: anything above 65,504 is infinite
    q_like, k_like = torch.eye(len(scores)), scores.T.contiguous()
    return original(top, total, acc, q_like, k_like, v, visible, scale)


def _assumed_strides(original, cache):
    _, block_size, heads, dim = cache.shape
    return block_size * heads * dim, heads * dim, dim


def _lower_bound_only(original, tables, seq_lens, num_blocks, block_size, window=None):
    return original(tables, seq_lens, 2**31, block_size, window)


def _kernel_fault(name: str, seam: str, wrapper: Callable, **fields) -> Fault:
    def switch() -> AbstractContextManager[None]:
        return replaced(walk, seam, wrapper)

    unit = "largest difference from float64"
    return Fault(name=name, layer="kernel", switch=switch,
                 **{"unit": unit, "threshold": 1e-3, **fields})  # fmt: skip


register(
    _kernel_fault(
        "offset_in_32_bits",
        "kv_offset",
        _narrow,
        symptom="Right for months, then a crash or nonsense once the pool grows: a block's "
        "offset has wrapped, and some other block is read.",
        smallest_input="Blocks of 32,768 elements: block 65,535 starts at 2,147,450,880, which "
        "32 bits hold; block 65,536 starts at 2,147,483,648, which they do not.",
        looks_like="Nothing on small pools. On large ones an illegal access if one is lucky.",
        detector="The offset computed for a large block id equals the one in 64 bits.",
        cure="Widen the block id before it is multiplied by a stride.",
        source="vllm-project/vllm#50427, sgl-project/sglang#20389, triton-lang/triton#832",
        detect=_detect_wrapped,
        measure=_wrapped_offset,
        unit="offset of block 65,536 relative to the right one, minus one",
    ),
    _kernel_fault(
        "empty_part_not_a_number",
        "merge",
        _unguarded_merge,
        symptom="One idle row in the batch, and its output is NaN; the next layer spreads it.",
        smallest_input="seq_lens [5, 0, 3]: row 1 must be exactly 0 with lse -inf. Minus "
        "infinity less minus infinity is not a number.",
        looks_like=NOTHING + "Until a padded or finished request shares the batch.",
        detector="Outputs of an empty sequence are exactly 0.",
        cure="Take the maximum as 0 where every part is empty, and divide by 1 where the sum is 0.",
        source="vllm-project/vllm#57094, vllm-project/vllm#39148, HabanaAI/vllm-fork#318",
        detect=_detector(lambda: _case([5, 0, 3]), "Guard the merge of parts that saw no key."),
        measure=lambda: _error(lambda: _case([5, 0, 3])),
    ),
    _kernel_fault(
        "unwritten_slots_loaded",
        "load_rows",
        _unmasked_load,
        symptom="NaN now and then, on a pool that was not cleared; never on a fresh one.",
        smallest_input="Block size 4, 13 tokens, NaN in slots 13 to 15: the output must equal, "
        "bit for bit, the one with zeros there.",
        looks_like=NOTHING + "Masked scores make the probability 0, and 0 times NaN is NaN.",
        detector="Fill every unwritten slot with NaN and look for one in the output.",
        cure="Mask the load of V as well as the scores.",
        source="Dao-AILab/flash-attention#1745, flashinfer-ai/flashinfer#941",
        detect=_detector(_poisoned_case, "Load nothing for a masked position."),
        measure=lambda: _error(_poisoned_case),
    ),
    _kernel_fault(
        "scores_in_fp16",
        "fold_tile",
        _fp16_scores,
        symptom="NaN or one-hot attention on prompts with large activations.",
        smallest_input="d 128, all of q and k 256: the product is 8,388,608, scaled 741,455, and "
        "fp16 ends at 65,504. Equal scores must weigh equally.",
        looks_like=NOTHING + "Ordinary prompts stay far below the limit.",
        detector="Equal scores above 65,504 give uniform weights.",
        cure="Accumulate products and run the softmax in fp32, whatever the inputs are.",
        source="NVIDIA/TensorRT-LLM#18044, ROCm/hip-ep#120, ultralytics/ultralytics#24990",
        detect=_detector(_huge_scores, "Keep scores in fp32."),
        measure=lambda: _error(_huge_scores),
    ),
    _kernel_fault(
        "strides_assumed",
        "strides_of",
        _assumed_strides,
        symptom="Right in the unit test, wrong in the engine, where K and V are slices of one "
        "buffer or heads come before tokens.",
        smallest_input="K and V as slices of a fused buffer: the output must equal the one of "
        "contiguous copies.",
        looks_like=NOTHING + "The reads stay inside the buffer.",
        detector="Strided views and contiguous copies give the same output.",
        cure="Pass the tensor's own strides to the kernel.",
        source="thu-ml/SageAttention#386, vllm-project/vllm#17362, vllm-project/vllm#42420",
        detect=_detector(_fused, "Take strides from the tensors."),
        measure=lambda: _error(_fused),
    ),
    _kernel_fault(
        "parts_averaged",
        "merge",
        _averaged,
        symptom="Long contexts are read badly; short ones, which need no split, are right.",
        smallest_input="9 tokens in two splits: the parts weigh exp(lse), not one half each.",
        looks_like=NOTHING + "With equal parts of a uniform softmax it is even right.",
        detector="Any number of splits gives the output of one split.",
        cure="Weigh each part by exp(lse minus the largest lse), and divide by the sum.",
        source="Dao-AILab/flash-attention#1647, tile-ai/tilelang#2010",
        detect=_detector(lambda: _case([30]), "Weigh parts by exp(lse)."),
        measure=lambda: _error(lambda: _case([30])),
    ),
    _kernel_fault(
        "block_id_upper_bound_unchecked",
        "check_block_tables",
        _lower_bound_only,
        symptom="A stale table reads another request's tokens, or another model's weights.",
        smallest_input="A pool of 4 blocks and the table [1, 4]: id 4 must be refused.",
        looks_like=NOTHING + "There is always something behind a pool.",
        detector="A table that names a block past the pool is refused by name.",
        cure="Compare ids with both ends on every read path, once a step.",
        source="microsoft/onnxruntime#32391, vllm-project/flash-attention#42",
        detect=_detect_foreign,
        measure=_foreign_block,
    ),
)
