"""What must hold around every step, checked from outside: tests, faults and chapters use it.

    check_tables(manager)                                            after every operation
    schedule = scheduler.schedule();  check_schedule(scheduler, schedule)
    scheduler.update(schedule, out);  check_scheduler(scheduler)

A finding names the block, the request and the two numbers that disagree, so that a reader who
breaks the pool by hand can see which rule spoke. The engine itself never looks here.
"""

from __future__ import annotations

from collections import Counter

from kvlab.blocks import NULL_BLOCK, BlockPool, blocks_for
from kvlab.errors import IntegrityError
from kvlab.request import Request, Status
from kvlab.scheduler import Schedule, Scheduler
from kvlab.tables import BlockManager


def check_tables(manager: BlockManager) -> None:
    """Raise IntegrityError if anything about the pool and its tables is broken."""
    _raise("the pool", table_findings(manager))


def check_schedule(scheduler: Scheduler, schedule: Schedule) -> None:
    """Between schedule() and the forward. Raises IntegrityError."""
    _raise("the step", schedule_findings(scheduler, schedule))


def check_scheduler(scheduler: Scheduler) -> None:
    """After update(). Raises IntegrityError, also for the pool's own rules."""
    _raise("the step", scheduler_findings(scheduler))
    check_tables(scheduler.manager)


def _raise(what: str, findings: list[str]) -> None:
    if findings:
        raise IntegrityError(what, findings)


# --- the pool and its tables ------------------------------------------------------------------


def table_findings(manager: BlockManager) -> list[str]:
    """Every broken rule of the pool and of the tables over it, in words; empty when all is well."""
    pool, requests = manager.pool, list(manager.requests.values())
    found = _pool_findings(pool)
    held = Counter(i for request in requests for i in request.block_table if i != NULL_BLOCK)
    for block in pool.blocks[1:]:
        if block.ref_count != held[block.block_id]:
            found.append(
                f"block {block.block_id}: ref_count {block.ref_count}, but "
                f"{held[block.block_id]} table entr{'y' if held[block.block_id] == 1 else 'ies'}"
            )
    for request in requests:
        found += _request_findings(pool, request, manager.sliding_window)
    return found + _sharing_findings(pool, requests)


def _pool_findings(pool: BlockPool) -> list[str]:
    found = []
    null = pool.blocks[NULL_BLOCK]
    if NULL_BLOCK in pool.free_list or null.ref_count or null.prefix:
        found.append("the null block (0) is free, held or published; it must stay apart")
    for block_id in pool.free_list:
        if not 0 <= block_id < pool.num_blocks:
            found.append(f"free list: id {block_id} is outside the pool of {pool.num_blocks}")
    for block in pool.blocks[1:]:
        i, free = block.block_id, block.block_id in pool.free_list
        if block.ref_count < 0:
            found.append(f"block {i}: ref_count {block.ref_count} is negative")
        if free and block.ref_count > 0:
            found.append(f"block {i}: in the free list and held {block.ref_count} time(s)")
        if not free and block.ref_count == 0:
            found.append(f"block {i}: lost, held by nobody and not in the free list")
        key = block.prefix
        if key is not None and pool.cached.get(key.block_hash) != i:
            found.append(f"block {i}: carries a hash, but the map does not lead back to it")
        if key is not None and len(key.token_ids) != pool.block_size:
            found.append(f"block {i}: published with {len(key.token_ids)} tokens, not full")
    for block_hash, i in pool.cached.items():
        key = pool.blocks[i].prefix if 0 < i < pool.num_blocks else None
        if key is None or key.block_hash != block_hash:
            found.append(
                f"prefix map: hash {block_hash.hex()[:8]} leads to block {i}, "
                "which does not carry it"
            )
    in_use = sum(block.ref_count > 0 for block in pool.blocks[1:])
    if in_use + pool.num_free_blocks != pool.num_usable_blocks:
        found.append(
            f"{in_use} blocks in use + {pool.num_free_blocks} free is not "
            f"{pool.num_usable_blocks} usable"
        )
    return found


def _request_findings(pool: BlockPool, request: Request, window: int | None) -> list[str]:
    found, bs, name = [], pool.block_size, request.request_id
    computed, table = request.num_computed_tokens, request.block_table
    for index, i in enumerate(table):
        if not 0 <= i < pool.num_blocks:
            found.append(
                f"{name}: table entry {index} is {i}, outside the pool of {pool.num_blocks}"
            )
    twice = [i for i, times in Counter(table).items() if times > 1 and i != NULL_BLOCK]
    found += [f"{name}: block {i} stands in its table more than once" for i in twice]
    if computed > request.num_tokens:
        found.append(f"{name}: {computed} tokens computed, only {request.num_tokens} known")
    if len(table) < blocks_for(computed, bs):
        found.append(f"{name}: {computed} tokens computed, but the table has {len(table)} blocks")
    first = 0 if window is None else max(0, computed - window + 1) // bs
    if NULL_BLOCK in table[first:]:
        found.append(f"{name}: a null block stands where tokens are still read")
    if request.num_published_blocks * bs > computed:
        found.append(
            f"{name}: {request.num_published_blocks} blocks published, only {computed} tokens "
            f"computed"
        )
    for index, i in enumerate(table[: blocks_for(computed, bs)]):
        key = pool.blocks[i].prefix if 0 < i < pool.num_blocks else None
        known = tuple(request.token_ids[index * bs : min((index + 1) * bs, computed)])
        if key is not None and key.token_ids[: len(known)] != known:
            found.append(
                f"{name}: block {i} is published for tokens {key.token_ids}, but its "
                f"table reads it for {known}"
            )
    return found


def _sharing_findings(pool: BlockPool, requests: list[Request]) -> list[str]:
    """Two tables may name one block only for the same tokens at the same place."""
    found: list[str] = []
    first_reader: dict[int, tuple[Request, int]] = {}
    for request in requests:
        for index, i in enumerate(request.block_table):
            if i == NULL_BLOCK:
                continue
            other, place = first_reader.setdefault(i, (request, index))
            if other is request:
                continue
            end = (index + 1) * pool.block_size
            n = min(request.num_computed_tokens, other.num_computed_tokens, end)
            if place != index or request.token_ids[:n] != other.token_ids[:n]:
                found.append(
                    f"block {i}: shared by {other.request_id} (place {place}) and "
                    f"{request.request_id} (place {index}), which hold different tokens"
                )
    return found


# --- the step ---------------------------------------------------------------------------------


def schedule_findings(scheduler: Scheduler, schedule: Schedule) -> list[str]:
    """Every broken rule of one step's decisions, in words."""
    found = []
    used, budget = schedule.num_scheduled_tokens, schedule.budget
    running, most = scheduler.running, scheduler.config.max_num_seqs
    if used > budget:
        found.append(f"{used} tokens scheduled, the budget is {budget}")
    if len(running) > most:
        found.append(f"{len(running)} run, max_num_seqs is {most}")
    served = [entry.request_id for entry in schedule.scheduled]
    if len(set(served)) != len(served):
        found.append(f"somebody is served twice: {served}")
    for request_id in scheduler.requests:
        if (request_id in served) == (request_id in schedule.reasons):
            found.append(f"{request_id} needs tokens or a reason, exactly one of them")
    for entry in schedule.scheduled:
        name, num_drafts = entry.request_id, len(entry.draft_token_ids)
        if entry.num_tokens < 1:
            found.append(f"{name} is scheduled with {entry.num_tokens} tokens")
        if len(entry.token_ids) != entry.num_tokens:
            found.append(f"{name}: {len(entry.token_ids)} ids for {entry.num_tokens} tokens")
        if entry.seq_len - num_drafts > entry.request.num_tokens:
            found.append(f"{name}: context {entry.seq_len}, only {entry.request.num_tokens} known")
        if entry.samples != (entry.seq_len - num_drafts == entry.request.num_tokens):
            found.append(f"{name}: samples={entry.samples} before its last token is reached")
        if blocks_for(entry.seq_len, schedule.block_size) > len(entry.block_ids):
            found.append(f"{name}: no block for position {entry.seq_len - 1}")
    if not schedule.scheduled and running:
        found.append(f"{len(running)} requests run and nobody is served")
    return found + _waiting_findings(scheduler)


def scheduler_findings(scheduler: Scheduler) -> list[str]:
    """Every broken rule of the queues, in words."""
    found = []
    for request in scheduler.running:
        if request.num_computed_tokens > request.num_tokens - 1:
            found.append(
                f"{request.request_id}: {request.num_computed_tokens} computed of "
                f"{request.num_tokens} known; an unfinished request has at least one to go"
            )
        if request.num_output_tokens >= request.max_new_tokens:
            found.append(f"{request.request_id} has all its outputs and still runs")
    for request in scheduler.requests.values():
        if request.status not in (Status.WAITING, Status.RUNNING, Status.PREEMPTED):
            found.append(f"{request.request_id} is {request.status} and still in line")
    holders = set(scheduler.manager.requests) - {r.request_id for r in scheduler.running}
    if holders:
        found.append(f"blocks are held by requests that do not run: {sorted(holders)}")
    return found + _waiting_findings(scheduler)


def _waiting_findings(scheduler: Scheduler) -> list[str]:
    return [
        f"{request.request_id} waits and holds {len(request.block_table)} blocks"
        for request in scheduler.waiting
        if request.block_table or request.num_computed_tokens
    ]
