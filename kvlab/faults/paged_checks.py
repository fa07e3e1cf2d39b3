"""Detectors for paged blocks: live ones that stand in every step, and small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product

import torch

from kvlab.blocks import BlockPool
from kvlab.faults.drift import tiny_model
from kvlab.faults.registry import FaultDetected
from kvlab.faults.seams import watched
from kvlab.paged import PagedAttention, PagedKVCache
from kvlab.request import Request
from kvlab.tables import BlockManager

#: Everything that changes tables, counters or the map.
OPERATIONS = ("start", "grow", "mark_computed", "fork", "truncate_to", "release")


@contextmanager
def watch_pool() -> Iterator[None]:
    """check_integrity() after every operation of every BlockManager, and the room of a step."""

    def checked(original, manager, *arguments, **options):
        result = original(manager, *arguments, **options)
        found = manager.findings()
        if found:
            raise FaultDetected(f"{len(found)} broken rule(s) of the pool: {'; '.join(found)}")
        return result

    def room(original, manager, seq, num_new_tokens):
        """After grow, every block about to be written has one holder and no hash."""
        result = checked(original, manager, seq, num_new_tokens)
        start, stop = seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens
        for position in range(start, stop):
            block = manager.pool.blocks[seq.block_table[position // manager.block_size]]
            if block.ref_count != 1 or block.prefix is not None:
                raise FaultDetected(
                    f"{seq.request_id} is about to write position {position} into block "
                    f"{block.block_id}, held {block.ref_count} time(s)"
                    f"{' and published' if block.prefix else ''}: expected a private block"
                )
        return result

    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(watched(BlockManager, name, room if name == "grow" else checked))
        yield


@contextmanager
def watch_slots() -> Iterator[None]:
    """Write side against read side: each row's slot is the one its block table leads to."""

    def init(original, attend, spec, cache, **batch):
        tables, starts = batch["block_tables"], batch["query_start_loc"].tolist()
        for r, seq_len in enumerate(batch["seq_lens"].tolist()):
            for row in range(starts[r], starts[r + 1]):
                position = seq_len - starts[r + 1] + row
                entry, offset = divmod(position, cache.block_size)
                read = int(tables[r, entry]) * cache.block_size + offset
                written = int(batch["slot_mapping"][row])
                if written not in (read, -1):
                    raise FaultDetected(
                        f"position {position} of sequence {r} is written to slot {written} and "
                        f"read from slot {read}"
                    )
        original(attend, spec, cache, **batch)

    with watched(PagedAttention, "__init__", init):
        yield


@contextmanager
def watch_copies() -> Iterator[None]:
    """After a block copy, K and V of both blocks agree in every layer."""

    def copy_blocks(original, cache, owed):
        copies = list(owed)
        original(cache, owed)
        for (src, dst), layer in product(copies, range(cache.spec.num_layers)):
            for name, pool in (("K", cache.key_cache(layer)), ("V", cache.value_cache(layer))):
                if not torch.equal(pool[src], pool[dst]):
                    raise FaultDetected(
                        f"block {src} was copied to {dst}, but {name} of layer {layer} differs"
                    )

    with watched(PagedKVCache, "copy_blocks", copy_blocks):
        yield


def slots_overwritten() -> float:
    """Slots that changed although no row was meant for them: 8 blocks of 16, slots [3, -1]."""
    spec = tiny_model().spec
    cache = PagedKVCache(spec, 8, 16)
    cache.key_cache(0).fill_(9.0)
    rows = torch.ones(2, spec.num_kv_heads, spec.head_dim)
    cache.write(0, rows, rows, [3, -1])
    changed = (cache.key_cache(0).flatten(0, 1) != 9.0).any(-1).any(-1)
    return float(changed.sum() - 1)


def detect_padding_write(steps: int = 8) -> None:
    extra = slots_overwritten()
    if extra:
        raise FaultDetected(f"{extra:.0f} slot(s) changed that no row of the batch was meant for")


def foreign_hit_tokens() -> float:
    """Tokens that salt "X" finds of what adapter "X" computed; must be 0."""
    manager = BlockManager(BlockPool(8, 4))
    first = Request("adapter", list(range(9)), adapter="X")
    manager.start(first, 9)
    manager.mark_computed(first, 9)
    second = Request("salt", list(range(9)), cache_salt="X")
    return float(manager.match_prefix(second).num_tokens)


def detect_foreign_hit(steps: int = 8) -> None:
    tokens = foreign_hit_tokens()
    if tokens:
        raise FaultDetected(
            f"{tokens:.0f} tokens of adapter 'X' are handed to a request with salt 'X'"
        )


def hit_rate_of_a_lonely_request() -> float:
    """One request of 64 tokens, preempted once and resumed; the rate must be 0."""
    manager = BlockManager(BlockPool(8, 16))
    seq = Request("lonely", list(range(64)))
    manager.start(seq, 64)
    manager.mark_computed(seq, 64)
    seq.append(64)
    manager.preempt(seq)
    manager.start(seq, 1)
    return manager.stats.hit_rate


def detect_inflated_rate(steps: int = 8) -> None:
    rate = hit_rate_of_a_lonely_request()
    if rate:
        raise FaultDetected(f"hit rate {rate:.2f} although no two requests share anything")
