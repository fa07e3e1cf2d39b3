"""Faults of the engine step: who runs, what counts as computed, and what a preemption keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import kvlab.batch as batch_module
import kvlab.engine as engine_module
import kvlab.sampling as sampling_module
from kvlab.faults.describe import NOTHING
from kvlab.faults.registry import Fault, register
from kvlab.faults.seams import replaced
from kvlab.faults.step_checks import watch_steps
from kvlab.faults.step_scenes import (
    budget_ratio,
    detect,
    false_hits,
    later_ones_first,
    passing,
    wrong_share,
)
from kvlab.scheduler import Schedule, Scheduler, SchedulerStats

# -- switches -----------------------------------------------------------------------------


def _budget_not_spent() -> AbstractContextManager[None]:
    def serve(original, plan, *arguments, **named):
        budget = plan.budget
        original(plan, *arguments, **named)
        plan.budget = budget

    return replaced(Schedule, "serve", serve)


def _outputs_lost() -> AbstractContextManager[None]:
    def preempt(original, scheduler, victim, plan):
        original(scheduler, victim, plan)
        victim.cut(victim.num_prompt_tokens)

    return replaced(Scheduler, "_preempt", preempt)


def _place_lost() -> AbstractContextManager[None]:
    def preempt(original, scheduler, victim, plan):
        victim.order = scheduler._num_added
        scheduler._num_added += 1
        original(scheduler, victim, plan)

    return replaced(Scheduler, "_preempt", preempt)


def _samples_too_early() -> AbstractContextManager[None]:
    def serve(original, plan, *arguments, **named):
        original(plan, *arguments, **named)
        plan.scheduled[-1] = replace(plan.scheduled[-1], samples=True)

    return replaced(Schedule, "serve", serve)


def _positions_ahead() -> AbstractContextManager[None]:
    """The sampled token counts as computed: every decode row is one position too far."""

    def build(original, schedule, *arguments):
        batch = original(schedule, *arguments)
        counts = [entry.num_tokens for entry in schedule.scheduled]
        positions = [
            position + (counts[request] == 1 and position > 0)
            for position, request in zip(batch.positions, batch.req_indices)
        ]
        return replace(batch, positions=positions)

    return replaced(engine_module, "build_batch", build)


def _context_is_query() -> AbstractContextManager[None]:
    return replaced(
        batch_module, "context_lengths", lambda original, computed, counts: list(counts)
    )


def _all_drafts_kept() -> AbstractContextManager[None]:
    return replaced(sampling_module, "accept", lambda original, drafts, sampled: list(sampled))


def _own_blocks_are_hits() -> AbstractContextManager[None]:
    def record_hit(original, stats, request, num_tokens):
        request.num_hit_tokens += num_tokens
        stats.num_cached_tokens += num_tokens

    return replaced(SchedulerStats, "record_hit", record_hit)


def _passed_for_ever() -> AbstractContextManager[None]:
    return replaced(
        Scheduler,
        "_is_strict_behind",
        lambda original, scheduler, head: scheduler.config.head_of_line == "strict",
    )


def _fault(name: str, switch, measure, unit: str, threshold: float, **text) -> Fault:
    return Fault(
        name=name,
        layer="scheduler",
        switch=switch,
        detect=detect,
        watch=watch_steps,
        measure=measure,
        unit=unit,
        threshold=threshold,
        **text,
    )


_DIFFERENT = "share of requests whose tokens differ from running alone, tiny model"

register(
    _fault(
        "sampled_token_counted_as_computed",
        _positions_ahead,
        wrong_share(proposer=None),
        _DIFFERENT,
        0.2,
        symptom="Every decoded token is rotated one position too far. The first words after the "
        "prompt suffer most; after that the text is fluent again.",
        smallest_input="Prompt of 20 tokens, budget 8: (computed, scheduled) must be (0, 8), "
        "(8, 8), (16, 4), (20, 1); the fault says (21, 1).",
        looks_like=NOTHING + "Prefill is right, so a test of the first output passes.",
        detector="Before each forward: last position of every request == its seq_len - 1.",
        cure="Count a token as computed when its K and V are written, one step after it is "
        "sampled.",
        source="GeeeekExplorer/nano-vllm, commits 8d63a98 to 25794a1",
    ),
    _fault(
        "context_is_query_length",
        _context_is_query,
        wrong_share(proposer=None),
        _DIFFERENT,
        0.2,
        symptom="The model forgets its prompt: each decode step attends to one token only.",
        smallest_input="A request with 5 tokens computed and 1 scheduled: seq_lens must be [6] "
        "beside query_start_loc [0, 1]; the fault says [1].",
        looks_like=NOTHING + "Pure prefill steps are right, because there both are equal.",
        detector="Before each forward: last position of every request == its seq_len - 1.",
        cure="Keep two tensors: query_start_loc from this step's tokens, seq_lens from all tokens.",
        source="no public report known: derived from the two lengths of a ragged batch",
    ),
    _fault(
        "half_a_prompt_is_sampled",
        _samples_too_early,
        wrong_share(proposer=None),
        _DIFFERENT,
        0.2,
        symptom="Prompts longer than one chunk get a stray token in their middle and answer "
        "something else.",
        smallest_input="Prompt of 20 tokens, budget 8: nothing may be sampled after the first 8.",
        looks_like=NOTHING + "Only long prompts, or a busy engine, show it.",
        detector="After schedule(): a request samples exactly when its context reaches its last "
        "known token.",
        cure="Take logits only for rows whose position is num_tokens - 1.",
        source="no public report known: derived from chunked prefill",
    ),
    _fault(
        "preemption_loses_outputs",
        _outputs_lost,
        wrong_share(proposer=None),
        _DIFFERENT,
        0.2,
        symptom="A stream starts again from the beginning in mid-sentence, and only under load.",
        smallest_input="Prompt 3, 5 outputs, preempted: it must come back as a prefill of 8 tokens "
        "with 5 outputs; the fault comes back with 3 and none.",
        looks_like=NOTHING + "With enough memory nobody is preempted.",
        detector="After every step: the outputs of each request only grow.",
        cure="Preempting resets num_computed_tokens and the block table, and nothing else.",
        source="GeeeekExplorer/nano-vllm#144, vllm-project/vllm-gaudi#524",
    ),
    _fault(
        "preempted_goes_to_the_end",
        _place_lost,
        later_ones_first,
        "requests that finish before an earlier one of the same length",
        0.5,
        symptom="Under load some requests take many times as long as others that came later.",
        smallest_input="Five equal requests in a pool for two: they must finish in order of "
        "arrival.",
        looks_like=NOTHING + "All outputs are right; only the order of finishing is not.",
        detector="After every step: a request's number in line is the one it got on arrival.",
        cure="Put the preempted request back by its arrival, not at the end of the line.",
        source="no public report known: derived from the first-come rule",
    ),
    _fault(
        "budget_not_spent",
        _budget_not_spent,
        budget_ratio,
        "most tokens in one step / budget",
        1.01,
        symptom="Steps grow far beyond the budget: latency spikes, or memory for activations "
        "runs out.",
        smallest_input="Budget 8, prompts of 5 and 5: the step must take 5 and 3.",
        looks_like="All outputs are right. One request alone never exceeds the budget.",
        detector="After schedule(): the shares add up to no more than the budget.",
        cure="Take every share from the budget at the moment it is given, prefix hits not counted.",
        source="sgl-project/mini-sglang#47, GeeeekExplorer/nano-vllm#207",
    ),
    _fault(
        "wrong_drafts_kept",
        _all_drafts_kept,
        wrong_share(),
        _DIFFERENT,
        0.2,
        symptom="Speculation changes the text: tokens behind a wrong guess are kept.",
        smallest_input="Drafts [4, 5, 6], sampled rows [4, 5, 9, 1]: keep [4, 5, 9]; the fault "
        "keeps all four.",
        looks_like=NOTHING + "It even looks faster: acceptance seems perfect.",
        detector="After update(): all outputs of a step but the last equal its drafts.",
        cure="Stop at the first row that differs from its draft; take the rest back.",
        source="vllm-project/vllm#42722",
    ),
    _fault(
        "own_blocks_counted_as_hits",
        _own_blocks_are_hits,
        false_hits,
        "tokens reported as hits although no two prompts share anything",
        0.5,
        symptom="The hit rate of the prefix cache goes up with the number of preemptions.",
        smallest_input="One request, preempted once after 64 of 64 tokens: 0 hits, 64 re-read.",
        looks_like="Outputs are right. The dashboard looks better the worse the load is.",
        detector="After update(): hits counted <= tokens that another request had computed.",
        cure="Count what a resumed request finds again in a field of its own.",
        source="vllm-project/vllm#25780",
    ),
    _fault(
        "head_is_passed_for_ever",
        _passed_for_ever,
        lambda: float(passing()),
        "steps that a heavy request stands first in line",
        20.0,
        symptom="A long prompt never starts while short ones keep coming.",
        smallest_input="Free blocks 10, a head that needs 12 and a stream of requests that need 2: "
        "each may pass, the head must not wait for all.",
        looks_like="Throughput and mean latency are fine; one request hangs.",
        detector="After schedule(): nobody is passed more often than max_head_skips allows.",
        cure="Let lighter requests pass a bounded number of times, then hold the line.",
        source="vllm-project/vllm#31731",
    ),
)
