"""Random lives of sequences over one small pool, checked after every single operation.

Each rule is one operation a serving engine does, or one it must refuse. After each: every
integrity rule holds, and reading every sequence back through its table gives exactly what was
written. A refused operation must leave everything as it was.

KVLAB_LONG=1 runs at least 100,000 operations; the default is a quick share of the same.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis.strategies as st
import pytest
from block_model import make, snapshot
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlab.blocks import BlockPool
from kvlab.errors import BlockError, OutOfBlocks, RequestError
from kvlab.integrity import check_tables
from kvlab.notebook.policies import HeadFirst
from kvlab.request import Request

LONG = os.environ.get("KVLAB_LONG") == "1"
NUM_OPERATIONS = 100_000 if LONG else 2_500
DONE: Counter[str] = Counter()

# Heads of one common text, then a few tokens of their own: many prompts share a prefix.
TEXT = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 2, 1, 0, 0]
tokens = st.builds(
    lambda head, tail: TEXT[:head] + tail,
    st.integers(0, len(TEXT)),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
pick = st.integers(0, 10_000)


class Lives(RuleBasedStateMachine):
    """Sequences that come, grow, share, roll back and go."""

    @initialize(
        num_usable=st.integers(2, 24),
        block_size=st.integers(1, 5),
        full_hit=st.sampled_from(["block", "token"]),
        window=st.sampled_from([None, None, None, 1, 3, 7]),
        pool=st.sampled_from([BlockPool, BlockPool, BlockPool, HeadFirst]),
    )
    def begin(self, num_usable, block_size, full_hit, window, pool):
        self.manager, self.cache = make(
            num_usable, block_size, full_hit, pool, sliding_window=window
        )
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def chosen(self, index: int) -> Request:
        return self.live[index % len(self.live)]

    def refused(self, error: type[Exception], call, *arguments) -> None:
        before = snapshot(self.manager)
        with pytest.raises(error):
            call(*arguments)
        assert snapshot(self.manager) == before

    def attempt(self, call, *arguments):
        """The copies that the call returns, or None if the pool had no room."""
        before = snapshot(self.manager)
        try:
            return call(*arguments)
        except OutOfBlocks as error:
            assert f"{self.manager.pool.num_free_blocks} free" in str(error)
            assert snapshot(self.manager) == before
            return None

    # -- what engines do ----------------------------------------------------------------

    def admit(self, seq: Request, chunk: int) -> None:
        hit = self.manager.match_prefix(seq)
        assert hit.num_tokens < seq.num_tokens
        num_new = min(chunk, seq.num_tokens - hit.num_tokens)
        fits = self.manager.num_tokens_that_fit(seq, hit)
        copies = self.attempt(self.manager.start, seq, num_new, hit)
        assert (copies is not None) == (num_new <= fits)
        if copies is None:
            self.waiting.append(seq)
            return
        DONE["hit"] += hit.num_tokens > 0
        DONE["copy"] += len(copies)
        self.live.append(seq)
        self.cache.compute(seq, num_new, copies)

    @rule(toks=tokens, chunk=st.integers(1, 14), adapter=st.sampled_from([(), (), (("adapter", "X"),)]))
    def arrive(self, toks, chunk, adapter):
        DONE["allocate"] += 1
        self.admit(Request(self.name(), toks, tags=adapter), chunk)

    @rule(toks=tokens, logprobs=st.booleans(), salt=st.sampled_from([(), (("salt", "X"),)]))
    def arrive_with_options(self, toks, logprobs, salt):
        DONE["allocate"] += 1
        seq = Request(self.name(), toks, prompt_logprobs=logprobs, tags=salt)
        self.admit(seq, len(toks))

    @precondition(lambda self: self.waiting)
    @rule(chunk=st.integers(1, 14))
    def retry(self, chunk):
        DONE["retry"] += 1
        self.admit(self.waiting.pop(0), chunk)

    @precondition(lambda self: self.live)
    @rule(index=pick, token=st.integers(0, 2))
    def fork_and_part(self, index, token):
        """Beam search: two copies of one sequence, each with a next token of its own."""
        DONE["fork"] += 1
        seq = self.chosen(index)
        child = self.manager.fork(seq, self.name())
        self.live.append(child)
        for writer, offset in ((child, 0), (seq, 1)):
            writer.append((token + offset) % 3)
            copies = self.attempt(self.manager.grow, writer, writer.num_uncomputed_tokens)
            if copies is not None:
                DONE["copy"] += len(copies)
                self.cache.compute(writer, writer.num_uncomputed_tokens, copies)

    @precondition(lambda self: self.live)
    @rule(index=pick, num_new=st.integers(1, 6), token=st.integers(0, 2))
    def append(self, index, num_new, token):
        """A decode step, or the next chunk of a prompt."""
        DONE["append"] += 1
        seq = self.chosen(index)
        if not seq.num_uncomputed_tokens:
            seq.append(token)
        num_new = min(num_new, seq.num_uncomputed_tokens)
        fits = self.manager.num_tokens_that_fit(seq)
        copies = self.attempt(self.manager.grow, seq, num_new)
        assert (copies is not None) == (num_new <= fits)
        if copies is not None:
            DONE["copy"] += len(copies)
            self.cache.compute(seq, num_new, copies)

    @precondition(lambda self: self.live)
    @rule(index=pick, drafts=st.integers(1, 4), accepted=st.integers(0, 4))
    def speculate(self, index, drafts, accepted):
        """Room for drafts is taken; only the accepted ones are ever counted as computed."""
        DONE["speculate"] += 1
        seq = self.chosen(index)
        copies = self.attempt(self.manager.grow, seq, seq.num_uncomputed_tokens + drafts)
        if copies is None:
            return
        for token in range(min(accepted, drafts)):
            seq.append(token % 3)
        self.cache.compute(seq, seq.num_uncomputed_tokens, copies)

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def fork(self, index):
        DONE["fork"] += 1
        seq = self.chosen(index)
        self.live.append(self.manager.fork(seq, self.name()))

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def free(self, index):
        DONE["free"] += 1
        self.manager.release(self.live.pop(index % len(self.live)))

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def preempt(self, index):
        DONE["preempt"] += 1
        seq = self.live.pop(index % len(self.live))
        self.manager.preempt(seq)
        self.waiting.append(seq)

    @precondition(lambda self: self.live)
    @rule(index=pick, num_tokens=st.integers(0, 30))
    def truncate(self, index, num_tokens):
        DONE["truncate"] += 1
        seq = self.chosen(index)
        before = snapshot(self.manager)
        try:
            self.manager.truncate_to(seq, min(num_tokens, seq.num_tokens))
        except RequestError:
            assert self.manager.sliding_window is not None
            assert snapshot(self.manager) == before
            return
        if not seq.num_tokens:
            self.live.remove(seq)

    @rule(num_blocks=st.integers(1, 3))
    def evict(self, num_blocks):
        """Somebody else takes blocks and leaves: cached ones among them are gone."""
        DONE["evict"] += 1
        pool = self.manager.pool
        taken = self.attempt(pool.allocate, min(num_blocks, pool.num_free_blocks))
        assert all(pool.blocks[i].prefix is None for i in taken)
        pool.free(taken)

    # -- what must be refused -----------------------------------------------------------

    @rule(index=pick, kind=st.integers(0, 8))
    def misuse(self, index, kind):
        DONE["misuse"] += 1
        pool, manager = self.manager.pool, self.manager
        free = list(pool.free_list)
        empty = [i for i in free if pool.blocks[i].prefix is None]
        if kind == 0:
            self.refused(OutOfBlocks, pool.allocate, pool.num_free_blocks + 1)
        elif kind == 1 and free:
            self.refused(BlockError, pool.free, [free[index % len(free)]])
        elif kind == 2 and empty:
            self.refused(BlockError, pool.ref, [empty[index % len(empty)]])
        elif kind == 3:
            held = [b.block_id for b in pool.blocks if b.ref_count]
            self.refused(BlockError, pool.free, [*held, pool.num_blocks + index])
        elif kind == 4:
            self.refused(BlockError, pool.ref, [-1 - index])
        elif self.live:
            seq = self.chosen(index)
            room = len(seq.block_table) * manager.block_size
            if kind == 5:
                self.refused(BlockError, manager.slot_mapping, seq, room, room + index + 1)
            elif kind == 6:
                self.refused(AssertionError, manager.fork, seq, seq.request_id)
            elif kind == 7:
                self.refused(RequestError, manager.truncate_to, seq, seq.num_tokens + 1)
            elif any(seq.block_table):
                table = [i for i in seq.block_table if i]
                twice = table * (1 + max(pool.blocks[i].ref_count for i in table))
                self.refused(BlockError, pool.free, twice)

    # -- what must hold -----------------------------------------------------------------

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "manager"):
            return
        DONE["operations"] += 1
        check_tables(self.manager)
        pool = self.manager.pool
        held = {i for seq in self.live for i in seq.block_table if i}
        assert len(held) + pool.num_free_blocks == pool.num_usable_blocks
        for seq in self.live:
            self.cache.check(seq)


def run_machine(num_operations: int, max_examples: int, step_count: int, first_seed: int) -> None:
    DONE.clear()
    round_seed = first_seed
    while DONE["operations"] < num_operations:
        run_state_machine_as_test(
            seed(round_seed)(Lives),
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=step_count,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        round_seed += 1


def test_no_operation_breaks_the_pool():
    run_machine(NUM_OPERATIONS, max_examples=40, step_count=60, first_seed=1)
    kinds = ("allocate", "append", "fork", "free", "truncate", "hit", "evict", "copy", "misuse")
    assert all(DONE[kind] > 0 for kind in kinds), DONE
    print(dict(DONE))
