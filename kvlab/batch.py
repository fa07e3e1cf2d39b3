"""The ragged batch: one step's tokens of all requests in one flat row, and how to find them again.

Requests that scheduled 2, 5 and 3 tokens become ten rows:

    req_indices       0 0 1 1 1 1 1 2 2 2      whose token a row is
    query_pos         0 1 0 1 2 3 4 0 1 2      the how-many-th of this step
    positions         num_computed + query_pos
    query_start_loc   0 2 7 10                 where each request's rows begin
    seq_lens          num_computed + 2, 5, 3   how much context each request has

query_start_loc and seq_lens are two things because the query (this step's tokens) and the
context (all tokens so far) differ in length. Only lists here, so that it also runs in the page;
the engine turns them into tensors. Names follow vLLM's v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

from kvlab.blocks import NULL_BLOCK, slot_of
from kvlab.errors import WrongPosition
from kvlab.scheduler import Schedule

#: The slot that a cache write skips.
PADDING_SLOT = -1


class ForwardMode(StrEnum):
    """SGLang's names for what the query lengths already say."""

    EXTEND = "extend"  # every request brings several tokens: prompts
    DECODE = "decode"  # every request brings one
    MIXED = "mixed"
    IDLE = "idle"  # no request at all


def forward_mode(num_scheduled: Sequence[int]) -> ForwardMode:
    """The name of a step, read off the query lengths alone.

    A prompt of one token, or a last chunk of one, is a DECODE: for the kernel it is the same work.
    """
    counts = [count for count in num_scheduled if count]  # who brings nothing shapes nothing
    if not counts:
        return ForwardMode.IDLE
    singles = sum(count == 1 for count in counts)
    if singles == len(counts):
        return ForwardMode.DECODE
    return ForwardMode.EXTEND if singles == 0 else ForwardMode.MIXED


def request_indices(num_scheduled: Sequence[int]) -> list[int]:
    """[2, 5, 3] -> [0,0,1,1,1,1,1,2,2,2]."""
    return [index for index, count in enumerate(num_scheduled) for _ in range(count)]


def cumulative(num_scheduled: Sequence[int]) -> list[int]:
    """[2, 5, 3] -> [2, 7, 10]. query_start_loc is this with a 0 in front."""
    return list(accumulate(num_scheduled))


def query_positions(num_scheduled: Sequence[int]) -> list[int]:
    """[2, 5, 3] -> [0,1,0,1,2,3,4,0,1,2]: row number minus where the request's rows begin."""
    starts = [0, *cumulative(num_scheduled)]
    rows = request_indices(num_scheduled)
    return [row - starts[request] for row, request in enumerate(rows)]


def token_positions(num_computed: Sequence[int], num_scheduled: Sequence[int]) -> list[int]:
    """The position of every row: what its request had computed, plus query_pos."""
    rows = request_indices(num_scheduled)
    offsets = query_positions(num_scheduled)
    return [num_computed[request] + offset for request, offset in zip(rows, offsets, strict=True)]


def context_lengths(num_computed: Sequence[int], num_scheduled: Sequence[int]) -> list[int]:
    """seq_lens: context of each request once this step's K and V are written."""
    return [done + count for done, count in zip(num_computed, num_scheduled, strict=True)]


def slots(
    positions: Sequence[int],
    req_indices: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
) -> list[int]:
    """slot_mapping: block_table[position // block_size] * block_size + position % block_size.

    Raises BlockError for a position that its request's table does not cover.
    """
    return [
        slot_of(block_tables[request], block_size, position)
        for position, request in zip(positions, req_indices, strict=True)
    ]


def padded_position(seq_len: int) -> int:
    """The position of a padding row: seq_len - 1, but never negative (SGLang: clamp_position)."""
    return max(seq_len - 1, 0)


@dataclass(frozen=True)
class Batch:
    """The model's input of one step. T rows of tokens, R requests; padding comes last.

    token_ids, req_indices, query_pos, positions, slot_mapping   [T]
    cu_num_scheduled [R], query_start_loc [R + 1], seq_lens [R], block_tables [R][blocks]
    logits_rows      rows of T whose logits are sampled, request by request
    num_actual_tokens, num_reqs   without padding
    """

    request_ids: list[str]
    token_ids: list[int]
    req_indices: list[int]
    cu_num_scheduled: list[int]
    query_pos: list[int]
    positions: list[int]
    query_start_loc: list[int]
    seq_lens: list[int]
    slot_mapping: list[int]
    block_tables: list[list[int]]
    logits_rows: list[int]
    num_reqs: int
    num_actual_tokens: int
    mode: ForwardMode

    @property
    def max_query_len(self) -> int:
        starts = self.query_start_loc
        return max((stop - start for start, stop in pairwise(starts)), default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)

    def check(self) -> None:
        """The positions detector: each request's last position is its seq_len minus one."""
        for index in range(self.num_reqs):
            last = self.positions[self.query_start_loc[index + 1] - 1]
            if last != self.seq_lens[index] - 1:
                raise WrongPosition(
                    f"{self.request_ids[index]}: last position {last}, context "
                    f"{self.seq_lens[index]}; expected {self.seq_lens[index] - 1}"
                )


def build_batch(schedule: Schedule, pad_to: int = 0) -> Batch:
    """Lay the scheduled tokens out in one row.

    pad_to   a fixed number of requests, as a captured CUDA graph wants it. The rows that are
             added carry token 0 at position 0, context 0, slot -1 and the null block: they are
             computed and thrown away, and touch no request's memory.
    """
    entries = schedule.scheduled
    counts = [entry.num_tokens for entry in entries]
    computed = [entry.start for entry in entries]
    tables = [list(entry.block_ids) for entry in entries]
    rows, positions = request_indices(counts), token_positions(computed, counts)
    ends = cumulative(counts)
    padding = max(pad_to - len(entries), 0)
    assert not pad_to or len(entries) <= pad_to, f"pad_to={pad_to} with {len(entries)} requests"
    assert not padding or set(counts) <= {1}, f"padding is for DECODE steps, not for {counts}"
    num_tokens = sum(counts)
    pad_ends = [num_tokens + i + 1 for i in range(padding)]
    return Batch(
        request_ids=[entry.request_id for entry in entries],
        token_ids=[token for entry in entries for token in entry.token_ids] + [0] * padding,
        req_indices=rows + [len(entries) + i for i in range(padding)],
        cu_num_scheduled=ends + pad_ends,
        query_pos=query_positions(counts) + [0] * padding,
        positions=positions + [padded_position(0)] * padding,
        query_start_loc=[0, *ends, *pad_ends],
        seq_lens=context_lengths(computed, counts) + [0] * padding,
        slot_mapping=slots(positions, rows, tables, schedule.block_size) + [PADDING_SLOT] * padding,
        block_tables=tables + [[NULL_BLOCK]] * padding,
        logits_rows=[
            row
            for entry, end in zip(entries, ends, strict=True)
            for row in range(end - entry.num_logits_rows, end)
        ],
        num_reqs=len(entries),
        num_actual_tokens=num_tokens,
        mode=forward_mode(counts),
    )
