"""The detectors: what must always hold, looked at in every step.

    watch_positions   positions[-1] == seq_lens - 1, ascending by one
    watch_tables      the cos and sin in use equal float64 ones computed from the spec
    watch_rotation    the first layer's q and k, as attention gets them, equal R(position) W x
    watch_heads       query head j reads KV head j // group; masks are aligned bottom right
    watch_cache       what is read back is what was written, no more and no less
    watch_size        the cache holds h_kv heads and the bytes that the cost model plans
    watch_rollback    a reset leaves nothing, drop_last(k) leaves k fewer
    watch_pool        the pool's rules after every operation, and a private block for every write
    watch_slots       a position is written where the block table leads
    watch_copies      a copied block equals its source, K and V in every layer
    watch_steps       the scheduler's rules around every engine step

Each is a context manager. Inside it a wrong step raises FaultDetected before it does harm.
None of them looks at logits: several of the faults leave the logits as they are. What cannot be
seen in every step is looked at on a small input: check_growing_keys, check_last_row, at_most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from itertools import product
from typing import Any, NoReturn

import torch

import kvlab.attention as attention_module
from kvlab import costs
from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.batch import Batch
from kvlab.cache import ContiguousKVCache, KVCache
from kvlab.engine import ModelRunner
from kvlab.errors import KvlabError
from kvlab.faults.drift import ChangedAttend
from kvlab.faults.registry import FaultDetected, Opener, Place, watched
from kvlab.faults.scenes import tiny_model
from kvlab.generate import naive_generate
from kvlab.integrity import check_schedule, check_scheduler, table_findings
from kvlab.model import Decoder
from kvlab.paged import PagedAttention, PagedKVCache
from kvlab.request import Request
from kvlab.rope import check_positions, rope_inv_freq
from kvlab.scheduler import Schedule, Scheduler
from kvlab.tables import BlockManager

FORWARD: Place = (Decoder, "forward")


def detected(message: str) -> NoReturn:
    """What a detector does when it fires."""
    raise FaultDetected(message)


@contextmanager
def reported(advice: str = "") -> Iterator[None]:
    """A named error of kvlab's own checks, reported as a fault that a detector found."""
    try:
        yield
    except KvlabError as error:
        raise FaultDetected(f"{error}{advice}") from error


def live(*at: Place) -> Callable[[Callable], Opener]:
    """Decorator: the wrapper below becomes () -> context manager that watches the places."""

    def decorate(wrapper: Callable) -> Opener:
        @functools.wraps(wrapper)
        def watch() -> AbstractContextManager[None]:
            return watched(*((place, wrapper) for place in at))

        return watch

    return decorate


def before_forward(check: Callable[[Decoder, torch.Tensor, Any], None]) -> Opener:
    """Decorator: check(model, positions, attend) becomes a watch over every forward."""

    @live(FORWARD)
    @functools.wraps(check)
    def forward(original, model, token_ids, positions, attend, *rest, **options):
        check(model, positions, attend)
        return original(model, token_ids, positions, attend, *rest, **options)

    return forward


def at_most(limit: float, figure: Callable[[], float], says: str) -> Callable[[int], None]:
    """A detector without a live form: it takes one figure, and fires above the limit."""

    def run(steps: int = 8) -> None:
        if (value := figure()) > limit:
            detected(says.format(value))

    return run


# --- the plain loop ---------------------------------------------------------------------------


def check_growing_keys(steps: int) -> None:
    """K of old tokens must stay as it is, in every layer, when a token is added."""
    model, before, now = tiny_model(), list[torch.Tensor](), list[torch.Tensor]()

    def keep(layer, query, key, value):
        now.append(key)
        return query, key, value

    attend = ChangedAttend(UncachedAttention(model.spec), keep)
    for length in range(3, 3 + steps):
        before, now = now, []
        ids = torch.tensor([[(7 * i) % 50 for i in range(length)]])
        model.forward(ids, torch.arange(length)[None], attend)
        for layer, (old, new) in enumerate(zip(before, now, strict=False)):
            if not torch.allclose(old, new[:, : length - 1], atol=1e-4):
                detected(
                    f"layer {layer}: K of the first {length - 1} tokens changed when one more was "
                    "added, expected the same values: a token may see no later token"
                )


def check_last_row(steps: int) -> None:
    """The sampled token must be the best one of a forward that computes the last row alone."""
    model, ids = tiny_model(), [3, 1, 4, 1, 5]
    for _ in range(steps):
        sampled, positions = naive_generate(model, ids, 1)[0], torch.arange(len(ids))[None]
        attend = UncachedAttention(model.spec)
        last = model.forward(torch.tensor([ids]), positions, attend, rows="last").argmax()
        if sampled != int(last):
            detected(
                f"after {len(ids)} tokens the loop sampled {sampled}, the last row alone says "
                f"{int(last)}: the next token is in the row of the last token"
            )
        ids.append(sampled)


# --- positions and rotation -------------------------------------------------------------------


def seq_lens_of(attend: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """[batch] cached plus new tokens of a contiguous run, or None where it is not one."""
    if positions.dim() != 2:
        return None  # a ragged batch: watch_steps looks at it
    if hasattr(attend, "mask"):
        return attend.mask.sum(-1)
    attend = getattr(attend, "attend", attend)  # a counter around the real one
    if not hasattr(attend, "cache") and not isinstance(attend, UncachedAttention):
        return None
    cached = attend.cache.length if hasattr(attend, "cache") else 0
    return torch.full((positions.shape[0],), cached + positions.shape[1])


@before_forward
def watch_positions(model, positions, attend):
    """Every forward's positions against cached + new tokens, row by row."""
    lengths = seq_lens_of(attend, positions)
    if lengths is not None:
        with reported():
            check_positions(positions[:, -1:] if hasattr(attend, "mask") else positions, lengths)


def exact_angles(model: Decoder, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Angles [*positions, pairs] in float64 straight from the spec, and the attention factor."""
    inv_freq, factor = rope_inv_freq(model.spec.rope, model.rope.planned_len)
    return positions.double()[..., None] * inv_freq.double(), factor


@before_forward
def watch_tables(model, positions, attend):
    """The rows of cos and sin that this forward uses against the same rows in float64."""
    cos, sin = model.rope.rows(positions)
    angles, factor = exact_angles(model, positions)
    off = torch.maximum((cos - angles.cos() * factor).abs(), (sin - angles.sin() * factor).abs())
    if off.max() > 5e-3:  # a float32 angle of 8192 radians is good to 1e-3
        detected(
            f"the table's cos or sin is off by {off.max():.3g} at positions up to "
            f"{int(positions.max())}, expected at most 0.005 for rope_type "
            f"{model.spec.rope.rope_type!r}. Compute angles in float32, from the scaled "
            "frequencies, times the attention factor."
        )


def turned(model: Decoder, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """heads [*positions, h, d_h] turned by complex multiplication in float64, pairs half-split."""
    half = model.spec.rope.rotary_dim // 2
    angles, _ = exact_angles(model, positions)
    turn = torch.polar(torch.ones_like(angles), angles)[..., None, :]
    x = heads.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


def watch_rotation() -> AbstractContextManager[None]:
    """q and the newest k of layer 0 at the door of attention, against R(position) W x.

    W x is what layer 0 makes of the same tokens at position 0, where nothing turns.
    """
    expected: list[torch.Tensor] = []

    def forward(original, model, token_ids, positions, attend, *rest, **options):
        lengths = seq_lens_of(attend, positions)
        expected.clear()
        if lengths is not None and not hasattr(attend, "mask"):

            def keep(layer, query, key, value):
                own = lengths[:, None] - torch.arange(positions.shape[1], 0, -1)
                expected.append(turned(model, torch.cat((query, key), dim=2), own))
                return query

            first = copy(model)
            first.layers = model.layers[:1]
            original(first, token_ids, torch.zeros_like(positions), keep, rows="last")
        return original(model, token_ids, positions, attend, *rest, **options)

    def attention(original, query, key, value, **options):
        if expected and query.shape[:2] == expected[0].shape[:2]:
            right = expected.pop()
            got = torch.cat((query, key[:, :, -query.shape[1] :].transpose(1, 2)), dim=2)
            if got.shape == right.shape and (got - right).norm() > 0.02 * right.norm():
                detected(
                    "q and k of the first layer differ from R(position) W x by "
                    f"{float((got - right).norm() / right.norm()):.1%}, expected under 2 %. Rotate "
                    "q and k alike, by the token's own position, with the checkpoint's pairing, "
                    "before k is cached."
                )
        return original(query, key, value, **options)

    return watched((FORWARD, forward), ((attention_module, "attention"), attention))


# --- attention and the contiguous cache -------------------------------------------------------


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Ask attention which KV head each query head reads, and which keys each query sees.

    All scores are zero, so a query takes the plain average of what it sees; values are chosen
    so that the average tells: KV head i holds i, then key i holds a one in column i.
    """
    ask = attention_module.attention
    query = torch.zeros(1, 1, num_heads, 4)
    key = torch.zeros(1, num_kv_heads, 2, 4)
    label = torch.arange(float(num_kv_heads)).view(1, -1, 1, 1).expand(1, num_kv_heads, 2, 4)
    reads = ask(query, key, label.contiguous())[0, 0, :, 0].round().int().tolist()
    right = [head // (num_heads // num_kv_heads) for head in range(num_heads)]
    if reads != right:
        detected(
            f"query heads read KV heads {reads}, expected {right}: repeat each KV head for its "
            "group (0,0,1,1), do not tile them (0,1,0,1)"
        )
    for queries, keys, window in ((2, 5, None), (1, 5, None), (1, 5, 3)):
        one_hot = torch.eye(keys).view(1, 1, keys, keys)
        query, key = torch.zeros(1, queries, 1, 4), torch.zeros(1, 1, keys, 4)
        seen = ask(query, key, one_hot, window=window)[0, :, 0] > 1e-6
        mask = torch.ones(queries, keys).tril(keys - queries).bool()
        if window:
            mask &= torch.ones(queries, keys).triu(keys - queries - window + 1).bool()
        if not torch.equal(seen, mask):
            detected(
                f"{queries} queries on {keys} keys (window {window}) see {seen.int().tolist()}, "
                f"expected {mask.int().tolist()}: queries are the tail of the keys, and a window "
                "counts the query's own key"
            )


@before_forward
def watch_heads(model, positions, attend):
    """check_heads before every forward."""
    check_heads(model.spec.num_heads, model.spec.num_kv_heads)


@live((CachedAttention, "__call__"))
def watch_cache(original, attend, layer, query, key, value):
    """After each layer's attention: the cache has exactly length + q rows, the last q as given."""
    out = original(attend, layer, query, key, value)
    keys, values = attend.cache.read(layer)
    rows, expected = keys.shape[2], attend.cache.length + key.shape[1]
    if rows != expected:
        detected(
            f"layer {layer}: attention was given {rows} rows, expected {expected} "
            "(cached + new). Rows past the length were never written."
        )
    if keys.shape[1] == key.shape[2]:
        for name, stored, given in (("K", keys, key), ("V", values, value)):
            if not torch.equal(stored[:, :, -key.shape[1] :], given.transpose(1, 2)):
                detected(
                    f"layer {layer}: the newest {name} read back is not what was written: "
                    "transpose [b, t, h, d] to [b, h, t, d], do not reshape it"
                )
    return out


@before_forward
def watch_size(model, positions, attend):
    """The cache's shape and bytes against the cost model, at every forward."""
    cache = getattr(attend, "cache", None)
    if isinstance(cache, ContiguousKVCache):
        width = cache.keys[0].element_size()
        planned = cache.batch_size * costs.kv_bytes_per_token(model.spec, width) * cache.max_len
        if cache.nbytes != planned:
            detected(
                f"the cache has {cache.keys[0].shape[1]} heads and {cache.nbytes:,} bytes, "
                f"expected {model.spec.layers[0].num_kv_heads} heads and {planned:,} bytes: store "
                "K and V per KV head, expand on read"
            )


@live((KVCache, "reset"), (KVCache, "drop_last"))
def watch_rollback(original, cache, num_tokens=None):
    """The length after reset() and after drop_last(num_tokens)."""
    expected = 0 if num_tokens is None else max(cache.length - num_tokens, 0)
    original(cache, *(() if num_tokens is None else (num_tokens,)))
    if cache.length != expected:
        call = "reset" if num_tokens is None else f"drop_last({num_tokens})"
        detected(f"{call} left {cache.length} tokens, expected {expected}")


# --- paged blocks -----------------------------------------------------------------------------


def watch_pool() -> AbstractContextManager[None]:
    """The pool's own rules after every operation of every BlockManager, and the room of a step."""

    def checked(original, manager, *arguments, **options):
        result = original(manager, *arguments, **options)
        if found := table_findings(manager):
            detected(f"{len(found)} broken rule(s) of the pool: {'; '.join(found)}")
        return result

    def room(original, manager, request, num_new_tokens):
        """After grow, every block about to be written has one holder and no hash."""
        result = checked(original, manager, request, num_new_tokens)
        start = request.num_computed_tokens
        for position in range(start, start + num_new_tokens):
            block = manager.pool.blocks[request.block_table[position // manager.block_size]]
            if block.ref_count != 1 or block.prefix is not None:
                detected(
                    f"{request.request_id} is about to write position {position} into block "
                    f"{block.block_id}, held {block.ref_count} time(s)"
                    f"{' and published' if block.prefix else ''}: expected a private block"
                )
        return result

    operations = ("start", "mark_computed", "fork", "truncate_to", "release")
    return watched(
        ((BlockManager, "grow"), room), *(((BlockManager, name), checked) for name in operations)
    )


@live((PagedAttention, "__init__"))
def watch_slots(original, attend, spec, cache, **batch):
    """Write side against read side: each row's slot is the one its block table leads to."""
    tables, starts = batch["block_tables"], batch["query_start_loc"]
    for r, seq_len in enumerate(batch["seq_lens"]):
        for row in range(starts[r], starts[r + 1]):
            position = seq_len - starts[r + 1] + row
            entry, offset = divmod(position, cache.block_size)
            read = tables[r][entry] * cache.block_size + offset
            written = batch["slot_mapping"][row]
            if written not in (read, -1):
                detected(
                    f"position {position} of sequence {r} is written to slot {written} and "
                    f"read from slot {read}"
                )
    original(attend, spec, cache, **batch)


@live((PagedKVCache, "copy_blocks"))
def watch_copies(original, cache, owed):
    """After a block copy, K and V of both blocks agree in every layer."""
    copies = list(owed)
    original(cache, owed)
    for (src, dst), layer in product(copies, range(cache.spec.num_layers)):
        for name, pool in (("K", cache.key_cache(layer)), ("V", cache.value_cache(layer))):
            if not torch.equal(pool[src], pool[dst]):
                detected(f"block {src} was copied to {dst}, but {name} of layer {layer} differs")


# --- the engine step --------------------------------------------------------------------------


def request_findings(scheduler: Scheduler, seen: dict[Request, tuple[int, list[int]]]) -> list[str]:
    """Orders never change; outputs only grow at their end; nobody is passed for ever.

    seen  place in line and outputs of each request when it was last looked at
    """
    found = []
    limit = getattr(scheduler, "max_head_skips", 0)
    for request in scheduler.requests.values():
        name, now = request.request_id, request.output_token_ids
        order, before = seen.get(request, (request.order, []))
        seen[request] = order, now
        if request.order != order:
            found.append(
                f"{name} was number {order} in line and is now {request.order}; a preempted "
                "request keeps its place"
            )
        if now[: len(before)] != before:
            found.append(
                f"{name} had {len(before)} outputs and has {len(now)}: those that were sampled "
                "must stay"
            )
        if request.num_skips > limit + scheduler.config.max_num_seqs:
            found.append(
                f"{name} was passed {request.num_skips} times; the bound is {limit} (and what "
                "one step admits)"
            )
    return found


def result_findings(
    scheduler: Scheduler, schedule: Schedule, kept: dict[str, list[int]]
) -> list[str]:
    """Kept drafts are those that the model agreed with; hits are what others had computed."""
    found = []
    for entry in schedule.scheduled:
        accepted = kept.get(entry.request_id, [])[:-1]
        if accepted != list(entry.draft_token_ids[: len(accepted)]):
            found.append(
                f"{entry.request_id} kept {accepted} of the drafts {list(entry.draft_token_ids)}: "
                f"whatever follows a wrong draft was computed from it"
            )
    counted, seen = scheduler.stats.num_cached_tokens, scheduler.manager.stats.hit_tokens
    if counted > seen:
        found.append(
            f"{counted} tokens counted as prefix hits, {seen} came from other requests; re-reading "
            f"one's own blocks after a preemption is no hit"
        )
    return found


def watch_steps() -> AbstractContextManager[None]:
    """Every rule around every step of whatever runs inside.

    after schedule()    budget, shares, reasons, order; nobody is passed for ever
    before the forward  each request's last position is its context minus one
    after update()      queues and pool; outputs only grow; kept drafts are what was sampled;
                        prefix hits are only counted for what others had computed
    """
    seen: dict[Request, tuple[int, list[int]]] = {}

    def expect_none(found: list[str]) -> None:
        if found:
            detected("; ".join(found))

    def schedule(original, scheduler, *rest):
        made = original(scheduler, *rest)
        with reported():
            check_schedule(scheduler, made)
        expect_none(request_findings(scheduler, seen))
        return made

    def update(original, scheduler, made, *rest):
        kept = original(scheduler, made, *rest)
        expect_none(result_findings(scheduler, made, kept))
        with reported():
            check_scheduler(scheduler)
        expect_none(request_findings(scheduler, seen))
        return kept

    def run(original, runner, batch: Batch, *arguments):
        with reported(". Position and seq_len are made from the tokens computed before the step"):
            batch.check()
        return original(runner, batch, *arguments)

    return watched(
        ((Scheduler, "schedule"), schedule),
        ((Scheduler, "update"), update),
        ((ModelRunner, "run"), run),
    )
