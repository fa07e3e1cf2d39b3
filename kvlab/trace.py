"""One step as plain values: what the widget draws, what tests read, what a reader prints.

The engine and the simulation write the same record, so a picture of the one explains the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict

from kvlab.batch import Batch
from kvlab.request import Request
from kvlab.scheduler import Schedule, ScheduledRequest, Scheduler


def share_kind(entry: ScheduledRequest) -> str:
    """prefill, decode, verify (a decode with drafts) or recompute (after a preemption)."""
    if entry.num_recomputed:
        return "recompute"
    if entry.start >= entry.request.num_prompt_tokens:
        return "verify" if entry.draft_token_ids else "decode"
    return "prefill"


def share_record(entry: ScheduledRequest) -> dict:
    """One request's share. Take it before update(): it reads what is known now."""
    return {
        "id": entry.request_id,
        "kind": share_kind(entry),
        "start": entry.start,
        "tokens": entry.num_tokens,
        "seq_len": entry.seq_len,
        "known": entry.request.num_tokens,
        "cached": entry.num_cached,
        "recomputed": entry.num_recomputed,
        "drafts": len(entry.draft_token_ids),
        "samples": entry.samples,
        "limited_by": str(entry.limited_by) if entry.limited_by else None,
        "blocks": list(entry.block_ids),
    }


def step_record(schedule: Schedule, batch: Batch, scheduler: Scheduler) -> dict:
    """A step's decisions and its batch as JSON values. Take it before update()."""
    pool = scheduler.manager.pool
    return {
        "step": schedule.step,
        "mode": str(batch.mode),
        "budget": schedule.budget,
        "used": schedule.num_scheduled_tokens,
        "free_blocks": pool.num_free_blocks,
        "usable_blocks": pool.num_usable_blocks,
        "shares": [share_record(entry) for entry in schedule.scheduled],
        "reasons": {name: str(reason) for name, reason in schedule.reasons.items()},
        "preempted": list(schedule.preempted),
        "batch": batch_record(batch),
        "outputs": {},
    }


def batch_record(batch: Batch) -> dict:
    """The ragged batch as plain lists, without the token ids' own meaning."""
    record = asdict(batch)
    record["mode"] = str(batch.mode)
    return record


def add_outputs(record: dict, outputs: Mapping[str, Seq[int]]) -> None:
    """Note what the step sampled, once update() has said what was kept."""
    record["outputs"] = {name: list(tokens) for name, tokens in outputs.items() if tokens}


def request_record(request: Request) -> dict:
    """A request's story in numbers: steps are engine steps, tokens are counts."""
    return {
        "id": request.request_id,
        "prompt": request.num_prompt_tokens,
        "outputs": request.num_output_tokens,
        "status": str(request.status),
        "finish_reason": request.finish_reason,
        "added_step": request.added_step,
        "first_step": request.first_step,
        "finish_step": request.finish_step,
        "hit_tokens": request.num_hit_tokens,
        "preemptions": request.num_preemptions,
        "dropped_tokens": request.num_dropped_tokens,
        "recomputed_tokens": request.num_recomputed_tokens,
        "resumed_tokens": request.num_resumed_tokens,
        "draft_tokens": request.num_draft_tokens,
        "accepted_tokens": request.num_accepted_tokens,
        "head_delay": request.head_delay,
        "skips": request.num_skips,
    }
