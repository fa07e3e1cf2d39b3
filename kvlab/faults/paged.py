"""Faults of paged blocks: who holds a block, who may write into it, who may find it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from kvlab import tables
from kvlab.blocks import BlockPool, blocks_for
from kvlab.faults import paged_checks as checks
from kvlab.faults import paged_scenes as scenes
from kvlab.faults.describe import NATS, NOTHING
from kvlab.faults.drift import tiny_model
from kvlab.faults.registry import Fault, register
from kvlab.faults.seams import replaced
from kvlab.paged import CheckedSlots, PagedKVCache
from kvlab.tables import BlockManager, PrefixStats

INTEGRITY = "check_integrity() after every operation: it names the block and both owners."


def _python_index() -> AbstractContextManager[None]:
    def check_slots(original, cache, slot_mapping):
        slots = torch.as_tensor(slot_mapping, dtype=torch.long) % cache.num_slots
        return CheckedSlots(len(slots), slots, None, cache.block_size)

    return replaced(PagedKVCache, "check_slots", check_slots)


def _sharers_not_counted() -> AbstractContextManager[None]:
    def ref(original, pool, block_ids):
        original(pool, [i for i in block_ids if pool.blocks[i].ref_count == 0])

    return replaced(BlockPool, "ref", ref)


def _published_early() -> AbstractContextManager[None]:
    def start(original, manager, seq, num_new_tokens, hit=None):
        copies = original(manager, seq, num_new_tokens, hit)
        computed, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
        manager.prefix.publish(seq)
        seq.num_computed_tokens = computed
        return copies

    return replaced(BlockManager, "start", start)


def _map_not_cleaned() -> AbstractContextManager[None]:
    return replaced(BlockPool, "_drop_prefix", lambda original, pool, block_id: None)


def _written_in_place() -> AbstractContextManager[None]:
    def grow(original, manager, seq, num_new_tokens):
        stop = blocks_for(seq.num_computed_tokens + num_new_tokens, manager.block_size)
        seq.block_table += manager.pool.allocate(max(0, stop - len(seq.block_table)))
        manager.sequences[seq.request_id] = seq
        return []

    return replaced(BlockManager, "grow", grow)


def _keys_only() -> AbstractContextManager[None]:
    def copy_block(original, cache, src, dst):
        for layer in range(cache.spec.num_layers):
            cache.key_cache(layer)[dst] = cache.key_cache(layer)[src]

    return replaced(PagedKVCache, "copy_block", copy_block)


def _sixteen() -> AbstractContextManager[None]:
    def slot_of(original, block_table, block_size, position):
        return original(block_table, 16, position)

    return replaced(tables, "slot_of", slot_of)


def _untagged() -> AbstractContextManager[None]:
    def extra_keys(original, *arguments, **options):
        return tuple(key[1:] for key in original(*arguments, **options))

    return replaced(tables, "extra_keys", extra_keys)


def _all_are_hits() -> AbstractContextManager[None]:
    def record(original, stats, queried, hit, *, resumed):
        original(stats, queried, hit, resumed=False)

    return replaced(PrefixStats, "record", record)


def _detector(
    scene: Callable, watch: Callable[[], AbstractContextManager] = nullcontext
) -> Callable[..., None]:
    """Play the scene on a tiny model, over and over for about `steps` steps, under a watch."""

    def detect(steps: int = 8) -> None:
        with watch():
            for _ in range(max(1, steps // 8)):
                scene(tiny_model())

    return detect


def paged_fault(name: str, scene: Callable, watch: Callable, **fields) -> Fault:
    """A fault whose scene plays on a tiny model to detect it, on the checkpoint to measure it."""
    return Fault(
        name=name, layer="paged", detect=_detector(scene, watch), watch=watch,
        **{"measure": scenes.kl_of(scene), "unit": NATS, "threshold": 1e-2,
           "looks_like": NOTHING, "detector": INTEGRITY, **fields},
    )  # fmt: skip


register(
    Fault(
        name="negative_slot_taken_as_index",
        layer="paged",
        symptom="One request's oldest or newest token is now and then somebody else's, and only "
        "while the batch is padded.",
        smallest_input="8 blocks of 16, slot_mapping [3, -1]: slot 127 must not change. As a "
        "Python index -1 is the last slot, so the padding row lands there.",
        looks_like=NOTHING + "The last slot is in use only when the pool is nearly full.",
        detector="Fill the pool with a mark, write a padded batch, count the slots that lost it.",
        cure="Drop rows with a negative slot before the scatter; refuse slots past the pool.",
        source="vllm-project/vllm#43810, vllm-project/vllm#13922",
        switch=_python_index,
        detect=checks.detect_padding_write,
        measure=checks.slots_overwritten,
        unit="slots written that nobody asked for",
        threshold=0.5,
    ),
    paged_fault(
        "sharers_not_counted",
        scenes.sharer_outlives_owner,
        checks.watch_pool,
        symptom="When one of two requests with a common prefix ends, the other's text turns into "
        "a third request's.",
        smallest_input="A holds blocks 1 and 2, B shares them, A ends: both must stay in use. Not "
        "counted, they are free, and C's first allocation gets them.",
        cure="Every table entry is one reference; a block is free when the last holder leaves.",
        source="vllm-project/vllm#42571, vllm-project/vllm#42612",
        switch=_sharers_not_counted,
    ),
    paged_fault(
        "published_before_computed",
        scenes.twins,
        checks.watch_pool,
        symptom="Of two equal prompts that arrive together, the second answers nonsense. One "
        "after the other, both are right.",
        smallest_input="Two equal 8-token prompts, block 4, one step: the twin must find 0 cached "
        "tokens. It finds 4, in blocks where nothing is written yet.",
        cure="Publish a block's hash after the forward that filled it, and only full blocks.",
        source="ROCm/ATOM#902, Wenyueh/MinivLLM#98",
        switch=_published_early,
    ),
    paged_fault(
        "prefix_map_not_cleaned",
        scenes.reused_block,
        checks.watch_pool,
        symptom="A prompt that was served before comes back with another prompt's context, once "
        "the pool has been full in between.",
        smallest_input="Block 2, pool of 2 blocks: X = [1, 2, 3], then Y = [7, 8, 9, 10], then X: "
        "0 cached tokens. The map still leads X to a block that holds Y.",
        cure="Take the hash off the map before the block is handed out again.",
        source="GeeeekExplorer/nano-vllm#163, vllm-project/vllm#4761",
        switch=_map_not_cleaned,
    ),
    paged_fault(
        "copy_on_write_skipped",
        scenes.forks,
        checks.watch_pool,
        symptom="Two samples of one prompt read each other's first tokens; with one sample all "
        "is well.",
        smallest_input="5 tokens, block 4, fork, each appends one token: block 1 must be copied "
        "once. Not copied, the second write lands on the first.",
        cure="Write only into a block that one table holds and no hash names; else copy it.",
        source="vllm-project/vllm#417, xLLM-AI/xllm#1984",
        switch=_written_in_place,
    ),
    paged_fault(
        "block_copy_keys_only",
        scenes.forks,
        checks.watch_copies,
        symptom="After a fork one of the two samples drifts: it looks in the right places and "
        "finds nothing there.",
        smallest_input="Copy block 2 to block 4: K and V of block 4 must equal those of block 2, "
        "in every layer. With [2, blocks] taken for [blocks, 2] only one of the two is copied.",
        detector="After each copy, both pools of every layer agree in source and destination.",
        cure="Copy by named pools, K and V, and test both; never by a bare first index.",
        source="vllm-project/vllm#17362",
        switch=_keys_only,
    ),
    paged_fault(
        "block_size_hard_coded",
        scenes.small_blocks,
        checks.watch_slots,
        symptom="Right with blocks of 16, nonsense with any other block size from the first token.",
        smallest_input="Block size 8, position 9, table [5, 2]: slot 17. With 16 wired in, the "
        "write goes to slot 89 and the read still looks at 17.",
        detector="The write side's slots equal those that the read side works out from the table.",
        cure="One function turns positions into slots, with the pool's block size.",
        source="GeeeekExplorer/nano-vllm commit 55c64e7, vllm-project/vllm-gaudi#1323",
        switch=_sixteen,
    ),
    Fault(
        name="extra_keys_untagged",
        layer="paged",
        symptom="A request reads K and V that were made with another adapter, or another "
        "tenant's, if the names happen to be equal.",
        smallest_input='A has adapter "X" and no salt, B has salt "X" and no adapter, the same '
        "tokens: B must find 0 cached tokens.",
        looks_like=NOTHING,
        detector="Look a prompt up under a salt that is spelled as the other request's adapter.",
        cure="Tag every extra key with the source that it comes from, then hash tags and values.",
        source="vllm-project/vllm#44701",
        switch=_untagged,
        detect=checks.detect_foreign_hit,
        measure=checks.foreign_hit_tokens,
        unit="tokens shared between an adapter and a salt",
        threshold=0.5,
    ),
    Fault(
        name="rereads_counted_as_hits",
        layer="paged",
        symptom="A hit rate that rises with the load, on traffic without any common prefix.",
        smallest_input="One request of 64 tokens, preempted once: the hit rate must be 0, and 64 "
        "tokens re-read.",
        looks_like="Nothing: outputs are right. Capacity is planned on a hit rate that is not one.",
        detector="Preempt the only request there is; the hit rate across requests stays 0.",
        cure="Count what a resumed request finds of its own in a field of its own.",
        source="vllm-project/vllm#25780",
        switch=_all_are_hits,
        detect=checks.detect_inflated_rate,
        measure=checks.hit_rate_of_a_lonely_request,
        unit="hit rate without any sharing",
        threshold=0.1,
    ),
)
