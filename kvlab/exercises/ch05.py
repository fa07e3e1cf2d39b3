"""Exercises of chapter 5: addresses and room; sharing is in ch05_sharing.py. No torch."""

from __future__ import annotations

from typing import Any

from kvlab.blocks import blocks_for, slot_of
from kvlab.exercises import Exercise, Wrong, ch05_sharing, number, register
from kvlab.paging import paged_waste

_TABLE, _BLOCK, _POSITION = [7, 3, 12], 16, 37
_SLOT = slot_of(_TABLE, _BLOCK, _POSITION)
_OFFSET = _POSITION % _BLOCK

register(
    Exercise(
        id="5.1",
        title="From position to slot",
        question=(
            f"A sequence has the block table {_TABLE}, with blocks of {_BLOCK} tokens. In which "
            f"slot of the pool are K and V of position {_POSITION}?"
        ),
        check=number(
            _SLOT,
            [
                (_POSITION, "that is the position; the sequence's blocks lie anywhere in the pool"),
                (
                    _TABLE[_POSITION // _BLOCK],
                    "that is the block; a slot is one token's room in it",
                ),
                (
                    _TABLE[1] * _BLOCK + _OFFSET,
                    f"the table is counted from 0: entry {_POSITION} // {_BLOCK} is the third",
                ),
                (
                    _TABLE[2] * _BLOCK + _POSITION,
                    "inside the block only the offset counts, the position modulo the block size",
                ),
                (
                    _TABLE[0] * _BLOCK + _POSITION,
                    "blocks of one sequence are not neighbours: only "
                    "the first block size of tokens lies in the first block",
                ),
                (
                    (_TABLE[2] - 1) * _BLOCK + _OFFSET,
                    "block ids are counted from 0 (block 0 is the "
                    "null block), so nothing is subtracted",
                ),
                (_TABLE[2] + _OFFSET, "a block id is not a slot: multiply it by the block size"),
                (_SLOT + 1, "offsets are counted from 0"),
            ],
            "entry = position // block size, slot = table[entry] x block size + position % block "
            "size",
        ),
        solution=_SLOT,
        hint="Divide the position by the block size: the quotient finds the block, the remainder "
        "the place in it.",
    )
)

_LENGTHS = [5, 32, 33, 100]
_WASTED = paged_waste(_LENGTHS, _BLOCK).wasted_slots

register(
    Exercise(
        id="5.2",
        title="Slots that hold nothing",
        question=(
            f"Four requests hold {', '.join(map(str, _LENGTHS))} tokens, in blocks of {_BLOCK}. "
            "How many slots are taken and hold no token?"
        ),
        check=number(
            _WASTED,
            [
                (
                    _WASTED + _BLOCK,
                    f"{_LENGTHS[1]} is a multiple of {_BLOCK}: its last block is "
                    "full, and there is no other",
                ),
                (
                    sum(n % _BLOCK for n in _LENGTHS),
                    "that counts the tokens in the last blocks; "
                    "the empty slots are the rest of those blocks",
                ),
                (
                    paged_waste(_LENGTHS, _BLOCK).taken_slots,
                    "those are all the slots that are taken; most of them hold tokens",
                ),
                (
                    4 * _BLOCK * blocks_for(max(_LENGTHS), _BLOCK) - sum(_LENGTHS),
                    "each request holds the blocks of its own length, not those of the longest",
                ),
                (
                    -(-sum(_LENGTHS) // _BLOCK) * _BLOCK - sum(_LENGTHS),
                    "two requests cannot share a half-full block: round up each one",
                ),
                (4 * (_BLOCK - 1), "that is the worst case; look at each length"),
                (4 * (_BLOCK - 1) / 2, "that is the average over all lengths; these are given"),
            ],
            "round each length up to whole blocks, and subtract the length",
        ),
        solution=_WASTED,
        hint="Only the last block of a request can have room left. How much, for each of the four?",
    )
)

_CASES = [
    (computed, new, held, size)
    for size in (1, 4, 16)
    for computed in (0, 1, size - 1, size, size + 1, 3 * size)
    for new in (1, size, size + 1, 5 * size)
    for held in (blocks_for(computed, size), blocks_for(computed, size) + 2)
]


def _new_blocks(computed: int, new: int, held: int, size: int) -> int:
    return max(0, blocks_for(computed + new, size) - held)


def _check_new_blocks(answer: Any) -> None:
    """5.3 asks for a function of (computed, new, held, block_size)."""
    if not callable(answer):
        raise Wrong("define a function of (computed, new, held, block_size) and pass it")
    for case in _CASES:
        computed, new, held, size = case
        try:
            got = answer(*case)
        except Exception as error:
            raise Wrong(f"for {case} it raised {type(error).__name__}: {error}") from None
        right = _new_blocks(*case)
        if got == right:
            continue
        told = f"for computed={computed}, new={new}, held={held}, block_size={size}: {got!r} "
        if isinstance(got, float):
            raise Wrong(told + "is not whole: a part of a block cannot be taken; round up")
        if not isinstance(got, int):
            raise Wrong(told + "is no number of blocks")
        if got < 0:
            raise Wrong(told + "is negative: blocks held ahead of time are kept, not owed")
        if held > blocks_for(computed, size) and got == blocks_for(computed + new, size) - (
            blocks_for(computed, size)
        ):
            raise Wrong(told + "does not use the blocks that are held already")
        if got == blocks_for(computed + new, size):
            raise Wrong(told + "counts all blocks, also those that are held already")
        if got == right - 1:
            raise Wrong(told + "is one short: the last tokens would land past the table")
        if got == right + 1:
            raise Wrong(told + "is one too many: a block that is exactly full needs no successor")
        raise Wrong(told + "is not right; how many blocks hold computed + new tokens?")


register(
    Exercise(
        id="5.3",
        title="When is a new block needed?",
        question=(
            "Write blocks_needed(computed, new, held, block_size): a sequence has K and V of "
            "`computed` tokens, holds `held` blocks, and wants to write `new` more tokens. How "
            "many blocks must be allocated?"
        ),
        check=_check_new_blocks,
        solution=_new_blocks,
        hint="Count the blocks that hold computed + new tokens, and compare with what is held.",
    )
)

for _exercise in ch05_sharing.EXERCISES:
    register(_exercise)
