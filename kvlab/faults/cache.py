"""Faults of the contiguous cache: what is written, what is kept, what is read back."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import kvlab.model as model_module
from kvlab import costs
from kvlab.attention import CachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.faults import checks
from kvlab.faults.describe import NOTHING, cache_fault, detector, mean_kl
from kvlab.faults.drift import (
    cached_logits,
    checkpoint,
    compare,
    right_logits,
    text_ids,
    tiny_model,
)
from kvlab.faults.registry import FaultDetected, register
from kvlab.faults.seams import ChangedAttend, replaced
from kvlab.model import Decoder


def _write_unrotated() -> AbstractContextManager[None]:
    """K goes into the cache as the projection made it; attention reads it as if rotated."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        cos, sin = model.rope.rows(positions)

        def turned_back(layer, query, key, value):
            return query, model_module.apply_rope(key, cos, -sin), value

        return original(model, token_ids, positions, ChangedAttend(attend, turned_back), rows)

    return replaced(Decoder, "forward", forward)


@contextmanager
def _expanded():
    """The cache is made for h heads, and K and V are repeated before they are written."""

    def init(original, cache, spec, *arguments, **options):
        layers = tuple(replace(layer, num_kv_heads=spec.num_heads) for layer in spec.layers)
        original(cache, replace(spec, layers=layers), *arguments, **options)

    def call(original, attend, layer, query, key, value):
        group = attend.cache.keys[layer].shape[1] // key.shape[2]
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        return original(attend, layer, query, key, value)

    with ExitStack() as stack:
        stack.enter_context(replaced(ContiguousKVCache, "__init__", init))
        stack.enter_context(replaced(CachedAttention, "__call__", call))
        yield


def _reshaped() -> AbstractContextManager[None]:
    """[b, t, h, d] taken for [b, h, t, d]: the same bytes under other strides."""

    def write(original, cache, layer, key, value):
        batch, num_new, heads, width = key.shape
        key, value = (x.reshape(batch, heads, num_new, width).transpose(1, 2) for x in (key, value))
        original(cache, layer, key, value)

    return replaced(ContiguousKVCache, "write", write)


def _zero_is_falsy() -> AbstractContextManager[None]:
    """`if length: ...` around the cut: a cut to nothing cuts nothing."""

    def truncate_to(original, cache, length):
        if length:
            original(cache, length)

    return replaced(ContiguousKVCache, "truncate_to", truncate_to)


def _whole_allocation() -> AbstractContextManager[None]:
    def read(original, cache, layer):
        return cache.keys[layer], cache.values[layer]

    return replaced(ContiguousKVCache, "read", read)


def _run_slack(steps: int = 8) -> None:
    ids = [(7 * i) % 50 for i in range(6 + steps)]
    cached_logits(tiny_model(), ids, 6, slack=8)


def _detect_rollback(steps: int = 8) -> None:
    """The cases of the report on a 3-token cache, then a reset after a run."""
    with checks.watch_rollback():
        model = tiny_model()
        for action, given, right in (
            ("truncate_to", 0, 0), ("drop_last", 5, 0), ("drop_last", 0, 3), ("drop_last", 2, 1),
        ):  # fmt: skip
            cache = ContiguousKVCache(model.spec, 1, 8)
            cache.advance(3)
            getattr(cache, action)(given)
            if cache.length != right:
                raise FaultDetected(
                    f"{action}({given}) on 3 tokens left {cache.length}, expected {right}"
                )
        cache = ContiguousKVCache(model.spec, 1, 6 + steps)
        cached_logits(model, [(7 * i) % 50 for i in range(6 + steps)], 6, kv_cache=cache)
        cache.reset()


def _excess_bytes() -> float:
    """Allocated bytes over planned bytes, minus one, for the checkpoint's cache."""
    spec = checkpoint().spec
    cache = ContiguousKVCache(spec, 1, 64)
    return cache.nbytes / costs.kv_bytes(spec, 64, 4) - 1


def _second_conversation() -> float:
    """Mean KL of a second text on a cache that was reset, against the same text alone."""
    model, ids = checkpoint().model, text_ids()
    cache = ContiguousKVCache(model.spec, 1, 160)
    cached_logits(model, ids[:48], 48, kv_cache=cache)
    cache.reset()
    second = ids[200:249]
    now = cached_logits(model, second[:48], 32, kv_cache=cache)
    return compare(right_logits(model, second[:48], 32), now, second[32:]).mean_kl


register(
    cache_fault(
        "write_before_rotate",
        checks.watch_rotation,
        mean_kl(),
        symptom="The model sees words without their order: fluent fragments, wrong from the "
        "first token.",
        smallest_input="One layer, two tokens: the score of token 1 on token 0 must change when "
        "a token is put between them; with unrotated K it does not change as it should.",
        looks_like=NOTHING + "Cache shapes, lengths and bytes are right.",
        detector="The first layer's q and k, as attention gets them, equal R(position) W x.",
        cure="Rotate, then write. Or cache unrotated K on purpose, and rotate all of it on read.",
        source="EleutherAI/gpt-neox#363, kvcache-ai/sglang#31, NeuraLegion/shainet#110",
        switch=_write_unrotated,
    ),
    cache_fault(
        "heads_expanded_before_write",
        checks.watch_size,
        _excess_bytes,
        symptom="Every answer is right; memory is h / h_kv times what was planned, and the "
        "longest context or the largest batch is that much smaller.",
        smallest_input="h = 8, h_kv = 2, 10 tokens, d_h = 4, float32: K is [1, 2, 10, 4] and a "
        "layer takes 640 B; expanded it is [1, 8, 10, 4] and 2,560 B.",
        looks_like=NOTHING + "Outputs are equal bit for bit.",
        detector="cache.shape[1] == h_kv, and nbytes equals the cost model's figure.",
        cure="Write K and V per KV head; fold the group into the query axis when reading.",
        source="FYYFU/HeadKV#3, meta-pytorch/torchtune#38",
        switch=_expanded,
        unit="bytes beyond the plan, as a share of the plan",
        threshold=0.5,
    ),
    cache_fault(
        "layout_confused",
        checks.watch_cache,
        mean_kl(num_steps=8),
        symptom="Long prompts are misread while one-token prompts and decode steps are right.",
        smallest_input="2 tokens, 2 heads, distinct constants: [b, t, h, d] reshaped to "
        "[b, h, t, d] puts token 0's head 1 where token 1's head 0 belongs.",
        looks_like=NOTHING + "The bytes are the same bytes, in the same number.",
        detector="The newest rows read back from the cache equal the ones written, head by head.",
        cure="transpose, never reshape, between layouts; take strides from the tensor.",
        source="vllm-project/vllm#17362, vllm-project/vllm#42420, thu-ml/SageAttention#386",
        switch=_reshaped,
    ),
    cache_fault(
        "stale_rollback",
        checks.watch_rollback,
        _second_conversation,
        symptom="A reused cache answers the new prompt with the old conversation in mind.",
        smallest_input="A cache of 3 tokens: cut to 0 must leave 0, the fault leaves 3.",
        looks_like=NOTHING + "The first conversation on every cache is right.",
        detector="Length after reset is 0, after drop_last(k) it is k fewer.",
        cure="Two names, truncate_to(n) and drop_last(k), instead of one signed number; compare "
        "with None, not with truth.",
        source="huggingface/transformers#47433, huggingface/transformers#47720",
        switch=_zero_is_falsy,
        detect=_detect_rollback,
    ),
    cache_fault(
        "unwritten_rows_read",
        checks.watch_cache,
        mean_kl(slack=64),
        symptom="Attention is diluted by rows of zeros; worse the more room is reserved.",
        smallest_input="max_len 14, 6 tokens written: attention must be given 6 rows, not 14.",
        looks_like=NOTHING + "Often the most likely token stays the same for a while.",
        detector="The rows that attention is given number cached + new.",
        cure="Read up to the length only, or mask the rest; a score of zero is not a mask.",
        source="meta-pytorch/gpt-fast#233",
        switch=_whole_allocation,
        detect=detector(checks.watch_cache, _run_slack),
    ),
)
