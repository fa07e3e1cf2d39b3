"""Exercises of chapter 5: addresses and room, who may share a block, and who goes first."""

from __future__ import annotations

from kvlab.blocks import BlockPool, PrefixKey, blocks_for, slot_of
from kvlab.notebook.exercises import choice, function, number, value
from kvlab.notebook.pool_waste import paged_waste

_TABLE, _BLOCK, _POSITION = [7, 3, 12], 16, 37
_SLOT = slot_of(_TABLE, _BLOCK, _POSITION)
_OFFSET = _POSITION % _BLOCK

_LENGTHS = [5, 32, 33, 100]
_WASTE = paged_waste(_LENGTHS, _BLOCK)

_CASES = [
    (computed, new, held, size)
    for size in (1, 4, 16)
    for computed in (0, 1, size - 1, size, size + 1, 3 * size)
    for new in (1, size, size + 1, 5 * size)
    for held in (blocks_for(computed, size), blocks_for(computed, size) + 2)
]


def _new_blocks(computed: int, new: int, held: int, size: int) -> int:
    return max(0, blocks_for(computed + new, size) - held)


#: 5.4: why the second request may not read the first one's block 1 (of 4 tokens); "" where it may
_SHARING = {
    "same tokens, other outputs": "",
    "same first 8 tokens, then others": "",
    "same tokens, sampled at another temperature": "",
    "same tokens, another adapter": "an adapter changes the projections, so K and V differ",
    "same tokens, another salt": "a salt is there to keep tenants apart",
    "block 1 equal, block 0 different": "K and V of block 1 depend on every token before it",
    "same 8 tokens after 4 others": "other tokens stand before them, and their positions differ",
    "same 8 image tokens, another image": "the placeholders are equal, the image behind them "
    "is not",
}
SHARING_OPTIONS = tuple(_SHARING)


def _eviction_order() -> list[int]:
    """What a pool of 5 hands out after A's blocks [1, 2, 3] and then B's [4, 5] were released."""
    pool = BlockPool(6, 4)
    a, b = pool.allocate(3), pool.allocate(2)
    for block_id in (*a, *b):
        pool.publish(block_id, PrefixKey(bytes([block_id]), (block_id,) * 4))
    pool.free(a)
    pool.free(b)
    return [pool.allocate(1)[0] for _ in range(5)]


EXERCISES = [
    number("5.1", "From position to slot",
        f"A sequence has the block table {_TABLE}, with blocks of {_BLOCK} tokens. In which slot "
        f"of the pool are K and V of position {_POSITION}?",
        _SLOT,
        (_POSITION, "that is the position; the sequence's blocks lie anywhere in the pool"),
        (_TABLE[_POSITION // _BLOCK], "that is the block; a slot is one token's room in it"),
        (_TABLE[1] * _BLOCK + _OFFSET, f"the table is counted from 0: entry {_POSITION} // "
         f"{_BLOCK} is the third"),
        (_TABLE[2] * _BLOCK + _POSITION, "inside the block only the offset counts, the position "
         "modulo the block size"),
        (_TABLE[0] * _BLOCK + _POSITION, "blocks of one sequence are not neighbours: only the "
         "first block size of tokens lies in the first block"),
        ((_TABLE[2] - 1) * _BLOCK + _OFFSET, "block ids are counted from 0 (block 0 is the null "
         "block), so nothing is subtracted"),
        (_TABLE[2] + _OFFSET, "a block id is not a slot: multiply it by the block size"),
        (_SLOT + 1, "offsets are counted from 0"),
        otherwise="entry = position // block size, slot = table[entry] x block size + position % "
        "block size",
        hint="Divide the position by the block size: the quotient finds the block, the remainder "
        "the place in it.",
    ),
    number("5.2", "Slots that hold nothing",
        f"Four requests hold {', '.join(map(str, _LENGTHS))} tokens, in blocks of {_BLOCK}. How "
        "many slots are taken and hold no token?",
        _WASTE.wasted_slots,
        (_WASTE.wasted_slots + _BLOCK, f"{_LENGTHS[1]} is a multiple of {_BLOCK}: its last block "
         "is full, and there is no other"),
        (sum(n % _BLOCK for n in _LENGTHS), "that counts the tokens in the last blocks; the empty "
         "slots are the rest of those blocks"),
        (_WASTE.taken_slots, "those are all the slots that are taken; most of them hold tokens"),
        (4 * _BLOCK * blocks_for(max(_LENGTHS), _BLOCK) - sum(_LENGTHS), "each request holds the "
         "blocks of its own length, not those of the longest"),
        (-(-sum(_LENGTHS) // _BLOCK) * _BLOCK - sum(_LENGTHS), "two requests cannot share a "
         "half-full block: round up each one"),
        (4 * (_BLOCK - 1), "that is the worst case; look at each length"),
        (4 * (_BLOCK - 1) / 2, "that is the average over all lengths; these are given"),
        otherwise="round each length up to whole blocks, and subtract the length",
        hint="Only the last block of a request can have room left. How much, for each of the four?",
    ),
    function("5.3", "When is a new block needed?",
        "Write blocks_needed(computed, new, held, block_size): a sequence has K and V of "
        "`computed` tokens, holds `held` blocks, and wants to write `new` more tokens. How many "
        "blocks must be allocated?",
        _new_blocks,
        (lambda computed, new, held, size: blocks_for(computed + new, size) - blocks_for(computed,
         size), "does not use the blocks that are held already"),
        (lambda computed, new, held, size: blocks_for(computed + new, size), "counts all blocks, "
         "also those that are held already"),
        (lambda *c: _new_blocks(*c) - 1, "is one short: the last tokens would land past the table"),
        (lambda *c: _new_blocks(*c) + 1, "is one too many: a block that is exactly full "
         "needs no successor"),
        otherwise="is not right; how many blocks hold computed + new tokens?",
        cases=_CASES,
        signs=[
            (lambda got, *_: isinstance(got, float), "is not whole: a part of a block cannot be "
             "taken; round up"),
            (lambda got, *_: not isinstance(got, int), "is no number of blocks"),
            (lambda got, *_: got < 0, "is negative: blocks held ahead of time are kept, not owed"),
        ],
        prefix="for computed={case[0]}, new={case[1]}, held={case[2]}, block_size={case[3]}: "
        "{got!r} ",
        hint="Count the blocks that hold computed + new tokens, and compare with what is held.",
    ),
    choice("5.4", "Who may share?",
        "Request 1 has computed two blocks of 4 tokens. In which situations may request 2 read the "
        "second of them? (Block 0 and block 1 are places in a request's table, not ids of the "
        "pool.) Give a set, out of: " + "; ".join(_SHARING),
        {name for name, why_not in _SHARING.items() if not why_not},
        why=_SHARING,
        names="the situations; copy their names",
        left_out="{count} more: what is sampled, or comes later, leaves earlier K and V alone",
        hint="Chapter 2's list: K and V must come out the same. What goes into them?",
    ),
    value("5.5", "Who goes first?",
        "A pool of 5 blocks. Request A ends and releases its blocks [1, 2, 3], then B its blocks "
        "[4, 5]. All five are published. In which order are they handed out again?",
        _eviction_order(),
        (lambda ids: sorted(ids) != [1, 2, 3, 4, 5], "each of the blocks 1 to 5 is handed out "
         "once"),
        ([1, 2, 3, 4, 5], "head first: once block 1 is gone, 2 and 3 can never be hit again, yet "
         "they still take room"),
        (lambda ids: set(ids[:2]) == {4, 5}, "B was used last and is likelier to come back: "
         "A goes first"),
        (lambda ids: set(ids[:3]) != {1, 2, 3}, "finish with the chain that was released first "
         "before touching the other"),
        (lambda ids: ids[:3] != [3, 2, 1], "inside A the tail goes first: every block of a chain "
         "needs the ones before it"),
        otherwise="A is right; the same holds inside B, tail first",
        expected="give a list of five block ids",
        read=lambda ids: [int(i) for i in ids],
        hint="Which block can be dropped at the smallest loss? A chain can only be hit from its "
        "head on.",
    ),
]
