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
    compute: Callable[[ModelSpec], float]
    caught_by: str
    source: str


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
        "causal half taken off a decode step",
        STEP,
        lambda spec: (
            right_answers(spec)[STEP] - costs.attention_flops_cached_step(spec, CONTEXT) / 2
        ),
        "the counter",
        "AI-Hypercomputer/maxtext#1972",
    ),
    Mistake(
        "a multiply-add counted once",
        STEP,
        lambda spec: right_answers(spec)[STEP] / 2,
        "the counter",
        "NVIDIA/Megatron-LM#831",
    ),
    Mistake(
        "masked pairs charged to a causal kernel",
        PREFILL,
        lambda spec: costs.masked_forward_flops(spec, CONTEXT, CONTEXT, 1),
        "the pairs that the mask keeps",
        "verl-project/verl#4959",
    ),
    Mistake(
        "output head charged at every token of a prefill",
        PREFILL,
        lambda spec: costs.forward_flops(spec, CONTEXT, CONTEXT, CONTEXT),
        "the counter",
        "pytorch/torchtitan#280",
    ),
    Mistake(
        "embedding lookup counted as a product",
        STREAMED,
        lambda spec: costs.streamed_params(spec) + costs.embedding_params(spec),
        "the matrices held",
        "pytorch/torchtitan#280",
    ),
    Mistake(
        "tied output head left out",
        STREAMED,
        lambda spec: costs.streamed_params(spec) - costs.embedding_params(spec),
        "the matrices held",
        "tenstorrent/tt-metal#50114",
    ),
    Mistake(
        "cache sized by query heads",
        KEPT,
        lambda spec: costs.kv_bytes_per_token(spec) * spec.num_heads // spec.num_kv_heads,
        "the allocation",
        "vllm-project/vllm#29736",
    ),
    Mistake(
        "K kept, V forgotten",
        KEPT,
        lambda spec: costs.kv_bytes_per_token(spec) // 2,
        "the allocation",
        "KolosalAI/model-memory-calculator#2",
    ),
)
