"""Mistakes of accounting that stood in public tools and texts, each beside the right formula.

Every one gives a plausible number. A counter or an allocation tells them from the truth; chapter 8
evaluates them next to what torch counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab import costs
from kvlab.specs import ModelSpec

CONTEXT = 96  # tokens of the prefill, and context of the cached step, that are looked at
STEP, PREFILL = "FLOPs of a cached step", "FLOPs of a prefill"
STREAMED, KEPT = "weights streamed", "KV bytes per token"


@dataclass(frozen=True)
class Mistake:
    """A wrong formula for one quantity of right_answers.

    caught_by  what shows it: the counter, the allocation, or the loaded weights
    source     a public report
    """

    name: str
    quantity: str
    caught_by: str
    source: str
    compute: Callable[[ModelSpec], float]


def right_answers(spec: ModelSpec) -> dict[str, int]:
    """The exact value of every quantity, for one sequence."""
    return {
        STEP: costs.forward_flops(spec, 1, CONTEXT, 1),
        PREFILL: costs.forward_flops(spec, CONTEXT, CONTEXT, 1),
        STREAMED: costs.streamed_params(spec),
        KEPT: costs.kv_bytes_per_token(spec),
    }


MISTAKES = (
    Mistake(
        "causal half taken off a decode step", STEP,
        "the counter", "AI-Hypercomputer/maxtext#1972",
        lambda s: right_answers(s)[STEP] - costs.attention_flops_cached_step(s, CONTEXT) / 2,
    ),
    Mistake(
        "a multiply-add counted once", STEP,
        "the counter", "NVIDIA/Megatron-LM#831",
        lambda spec: right_answers(spec)[STEP] / 2,
    ),
    Mistake(
        "masked pairs charged to a causal kernel", PREFILL,
        "the pairs that the mask keeps", "verl-project/verl#4959",
        lambda spec: costs.masked_forward_flops(spec, CONTEXT, CONTEXT, 1),
    ),
    Mistake(
        "output head charged at every token of a prefill", PREFILL,
        "the counter", "pytorch/torchtitan#280",
        lambda spec: costs.forward_flops(spec, CONTEXT, CONTEXT, CONTEXT),
    ),
    Mistake(
        "embedding lookup counted as a product", STREAMED,
        "the matrices held", "pytorch/torchtitan#280",
        lambda spec: costs.streamed_params(spec) + costs.embedding_params(spec),
    ),
    Mistake(
        "tied output head left out", STREAMED,
        "the matrices held", "tenstorrent/tt-metal#50114",
        lambda spec: costs.streamed_params(spec) - costs.embedding_params(spec),
    ),
    Mistake(
        "cache sized by query heads", KEPT,
        "the allocation", "vllm-project/vllm#29736",
        lambda spec: costs.kv_bytes_per_token(spec) * spec.num_heads // spec.num_kv_heads,
    ),
    Mistake(
        "K kept, V forgotten", KEPT,
        "the allocation", "KolosalAI/model-memory-calculator#2",
        lambda spec: costs.kv_bytes_per_token(spec) // 2,
    ),
)  # fmt: skip
