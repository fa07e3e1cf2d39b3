"""Faults of many requests: paged blocks, the decode kernel, the scheduler and its batch.

Each function is the wrong one, under the name of its fault. `at` is where it answers while the
fault is on; data/faults.toml says what a user sees of it, and what the right answer is.

The kernel's faults stand in its steps written in torch, so that they can be seen on any machine;
tests hold those steps equal to the Triton kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

import kvlab.batch as batch_module
import kvlab.engine as engine_module
import kvlab.sampling as sampling_module
from kvlab import tables
from kvlab.blocks import BlockPool
from kvlab.faults import detectors, scenes
from kvlab.faults.registry import Place, bug
from kvlab.kernels import reference as kernel_steps
from kvlab.paged import PagedKVCache
from kvlab.request import Status
from kvlab.scheduler import Schedule, Scheduler, SchedulerStats
from kvlab.tables import BlockManager, PrefixStats

# --- paged blocks: who holds one, who may write into it, who may find it again ----------------


def paged_bug(at: Place, scene: Callable, watch: Callable = detectors.watch_pool) -> Callable:
    """A fault whose scene plays on a tiny model to detect it, on the checkpoint to measure it."""
    return bug(at=at, run=scenes.repeated(scene), measure=scenes.kl_of(scene), watch=watch)


def figure_bug(at: Place, figure: Callable[[], float], says: str, limit: float = 0) -> Callable:
    """A fault that one figure both detects and measures."""
    return bug(at=at, run=detectors.at_most(limit, figure, says), measure=figure)


@figure_bug(
    (PagedKVCache, "check_slots"),
    scenes.slots_overwritten,
    "{:.0f} slot(s) changed that no row of the batch was meant for",
)
def negative_slot_taken_as_index(original, cache, slot_mapping):
    return original(cache, [slot % cache.num_slots for slot in slot_mapping])


@paged_bug((BlockPool, "ref"), scenes.sharer_outlives_owner)
def sharers_not_counted(original, pool, block_ids):
    original(pool, [i for i in block_ids if pool.blocks[i].ref_count == 0])


@paged_bug((BlockManager, "start"), scenes.twins)
def published_before_computed(original, manager, request, num_new_tokens, *hit):
    copies = original(manager, request, num_new_tokens, *hit)
    computed = request.num_computed_tokens
    manager.mark_computed(request, num_new_tokens)
    request.num_computed_tokens = computed
    return copies


@paged_bug((BlockPool, "_drop_prefix"), scenes.reused_block)
def prefix_map_not_cleaned(original, pool, block_id):
    pass


@paged_bug((BlockManager, "grow"), scenes.forks)
def copy_on_write_skipped(original, manager, request, num_new_tokens):
    for shared, fresh in original(manager, request, num_new_tokens):
        manager.pool.ref([shared])
        manager.pool.free([fresh])
        request.block_table[request.block_table.index(fresh)] = shared
    return []


@figure_bug(
    (BlockManager, "fork"),
    scenes.empty_blocks_shared,
    "{:.0f} block(s) shared in which no token has K and V",
)
def reserved_blocks_shared(original, manager, request, request_id):
    child = original(manager, request, request_id)
    ahead = request.block_table[len(child.block_table) :]
    manager.pool.ref(ahead)
    child.block_table += ahead
    return child


@paged_bug((PagedKVCache, "copy_block"), scenes.forks, detectors.watch_copies)
def block_copy_keys_only(original, cache, src, dst):
    for layer in range(cache.spec.num_layers):
        cache.key_cache(layer)[dst] = cache.key_cache(layer)[src]


@paged_bug((tables, "slot_of"), scenes.small_blocks, detectors.watch_slots)
def block_size_hard_coded(original, block_table, block_size, position):
    return original(block_table, 16, position)


@figure_bug(
    (tables, "tags_between"),
    scenes.foreign_hit_tokens,
    "{:.0f} tokens of adapter 'X' are handed to a request with salt 'X'",
)
def extra_keys_untagged(original, *arguments, **options):
    return [tag[1:] for tag in original(*arguments, **options)]


@figure_bug(
    (PrefixStats, "record"),
    scenes.hit_rate_of_a_lonely_request,
    "hit rate {:.2f} although no two requests share anything",
)
def rereads_counted_as_hits(original, stats, queried, hit, *, resumed):
    original(stats, queried, hit, resumed=False)


# --- the decode kernel: offsets, masks, strides, precision and the merge ----------------------


def kernel_bug(step: str, make: Callable[[], scenes.Case], advice: str) -> Callable:
    """A fault of one step of the kernel, seen in how far one case's output is off."""
    says = "the output differs from float64 by {:.3g}, expected under 1e-4. "
    return figure_bug(
        (kernel_steps, step), functools.partial(scenes.kernel_error, make), says + advice, 1e-4
    )


@figure_bug(
    (kernel_steps, "kv_offset"),
    scenes.wrapped_offset,
    "block 65,536 of 32,768 elements starts at 2,147,483,648; the offset came out otherwise. "
    "Widen block ids to 64 bits before the product, not after it.",
)
def offset_in_32_bits(original, block_id, slot, head, strides):
    return original(block_id.int(), slot.int(), head, strides)


@kernel_bug("merge", lambda: scenes.case_of(5, 0, 3), "Guard the merge of parts that saw no key.")
def empty_part_not_a_number(original, outs, lses):
    weights = torch.exp(lses - lses.max(dim=0).values)
    total = weights.sum(dim=0)
    return (outs * weights[..., None]).sum(dim=0) / total[..., None], torch.logsumexp(lses, 0)


@kernel_bug(
    "load_rows",
    lambda: scenes.case_of(13, unwritten=math.nan),
    "Load nothing for a masked position.",
)
def unwritten_slots_loaded(original, cache, offsets, visible):
    return original(cache, offsets, torch.ones_like(visible))


@kernel_bug("fold_tile", scenes.huge_scores_case, "Keep scores in fp32.")
def scores_in_fp16(original, top, total, acc, q, k, v, visible, scale):
    q, k = q.half(), k.half()
    scores = (q @ k.T).float()  # stored as fp16: anything above 65,504 is infinite
    q_like, k_like = torch.eye(len(scores)), scores.T.contiguous()
    return original(top, total, acc, q_like, k_like, v, visible, scale)


@kernel_bug("strides_of", scenes.fused_case, "Take strides from the tensors.")
def strides_assumed(original, cache):
    _, block_size, heads, dim = cache.shape
    return block_size * heads * dim, heads * dim, dim


@kernel_bug("merge", lambda: scenes.case_of(30), "Weigh parts by exp(lse).")
def parts_averaged(original, outs, lses):
    return outs.mean(dim=0), torch.logsumexp(lses, 0)


@figure_bug(
    (kernel_steps, "check_block_tables"),
    scenes.foreign_block_error,
    "a block id past the pool's 4 blocks was followed (the output moved by {:.3g}). Check ids "
    "against both ends, when a table is read as well as when it is written.",
)
def block_id_upper_bound_unchecked(original, tables, seq_lens, num_blocks, *rest, **options):
    return original(tables, seq_lens, 2**31, *rest, **options)


# --- the engine step: who runs, what counts as computed, what a preemption keeps --------------


def step_bug(at: Place, measure: Callable[[], float]) -> Callable:
    """A fault that the rules around every engine step detect, in one crowded run."""
    return bug(at=at, run=scenes.run_engine, measure=measure, watch=detectors.watch_steps)


@step_bug((engine_module, "build_batch"), scenes.wrong_share_undrafted)
def sampled_token_counted_as_computed(original, schedule, *arguments):
    """The sampled token counts as computed: every decode row is one position too far."""
    batch = original(schedule, *arguments)
    counts = [entry.num_tokens for entry in schedule.scheduled]
    positions = [
        position + (counts[request] == 1 and position > 0)
        for position, request in zip(batch.positions, batch.req_indices)
    ]
    return replace(batch, positions=positions)


@step_bug((batch_module, "context_lengths"), scenes.wrong_share_undrafted)
def context_is_query_length(original, num_computed, num_scheduled):
    return list(num_scheduled)


@step_bug((Schedule, "serve"), scenes.wrong_share_undrafted)
def half_a_prompt_is_sampled(original, plan, *arguments, **named):
    original(plan, *arguments, **named)
    plan.scheduled[-1] = replace(plan.scheduled[-1], num_known=0)


@step_bug((Scheduler, "preempt"), scenes.wrong_share_undrafted)
def preemption_loses_outputs(original, scheduler, victim, plan):
    original(scheduler, victim, plan)
    victim.cut(victim.num_prompt_tokens)


@step_bug((Scheduler, "preempt"), scenes.later_ones_first)
def preempted_goes_to_the_end(original, scheduler, victim, plan):
    last = max(scheduler.requests.values(), key=scheduler.place_in_line)
    victim.arrival, victim.order = last.arrival, last.order + 1
    original(scheduler, victim, plan)


@step_bug((Scheduler, "_clamp"), scenes.budget_ratio)
def budget_not_spent(original, scheduler, num_new, budget):
    return original(scheduler, num_new, scheduler.config.max_num_batched_tokens)


@step_bug((Scheduler, "_admit"), scenes.wrong_share_undrafted)
def share_fixed_before_the_hit(original, scheduler, request, schedule):
    """The share is cut from the whole text; what the cache holds is looked up when it starts."""
    share, reason = scheduler._clamp(request.num_tokens, schedule.budget_left)
    hit = scheduler.manager.match_prefix(request)
    if not hit.num_tokens or scheduler.manager.num_tokens_that_fit(request, hit) < share:
        return original(scheduler, request, schedule)
    schedule.block_copies += scheduler.manager.start(request, share, hit)
    request.status = Status.RUNNING
    schedule.serve(request, share, reason, num_cached=hit.num_tokens)
    return None


@step_bug((sampling_module, "accept"), scenes.wrong_share)
def wrong_drafts_kept(original, drafts, sampled):
    return list(sampled)


@step_bug((SchedulerStats, "record_hit"), scenes.false_hits)
def own_blocks_counted_as_hits(original, stats, request, num_tokens):
    preemptions, request.num_preemptions = request.num_preemptions, 0
    original(stats, request, num_tokens)
    request.num_preemptions = preemptions


@step_bug((scenes.PassThree, "may_pass"), scenes.steps_at_the_head)
def head_is_passed_for_ever(original, scheduler, head):
    return True
