"""Exercises 5.4 and 5.5: who may share a block, and who goes first. Standard library only."""

from __future__ import annotations

from typing import Any

from kvlab.blocks import BlockPool, PrefixKey
from kvlab.exercises import Exercise, Wrong

#: name -> may the second request read the first one's block 1 (of 4 tokens)? and why not
_SHARING = {
    "same tokens, other outputs": (True, ""),
    "same first 8 tokens, then others": (True, ""),
    "same tokens, sampled at another temperature": (True, ""),
    "same tokens, another adapter": (
        False, "an adapter changes the projections, so K and V differ",
    ),
    "same tokens, another salt": (False, "a salt is there to keep tenants apart"),
    "block 1 equal, block 0 different": (
        False, "K and V of block 1 depend on every token before it",
    ),
    "same 8 tokens after 4 others": (
        False, "other tokens stand before them, and their positions differ",
    ),
    "same 8 image tokens, another image": (
        False, "the placeholder tokens are equal, the image behind them is not",
    ),
}  # fmt: skip
SHARING_OPTIONS = tuple(_SHARING)


def _check_sharing(answer: Any) -> None:
    """5.4 asks for the set of situations in which block 1 may be shared."""
    if isinstance(answer, str):
        answer = {answer}
    try:
        chosen = set(answer)
    except TypeError:
        raise Wrong("give a set of the situations' names") from None
    unknown = chosen - set(_SHARING)
    if unknown:
        raise Wrong(f"{sorted(map(str, unknown))[0]!r} is none of the situations; copy their names")
    for name, (allowed, why) in _SHARING.items():
        if name in chosen and not allowed:
            raise Wrong(f"{name!r}: {why}")
    if missing := [
        name for name, (allowed, _) in _SHARING.items() if allowed and name not in chosen
    ]:
        raise Wrong(
            f"{len(missing)} more: what is sampled, or comes later, leaves earlier K and V alone"
        )


def _eviction_order() -> list[int]:
    """What a pool of 5 hands out after A's blocks [1, 2, 3] and then B's [4, 5] were released."""
    pool = BlockPool(6, 4)
    a, b = pool.allocate(3), pool.allocate(2)
    for block_id in (*a, *b):
        key = PrefixKey(bytes([block_id]), None, (block_id,) * 4)
        pool.publish(block_id, key)
    pool.free(a)
    pool.free(b)
    return [pool.allocate(1)[0] for _ in range(5)]


_ORDER = _eviction_order()


def _check_order(answer: Any) -> None:
    """5.5 asks for five block ids in the order in which they are handed out."""
    try:
        given = [int(i) for i in answer]
    except (TypeError, ValueError):
        raise Wrong("give a list of five block ids") from None
    if given == _ORDER:
        return
    if sorted(given) != sorted(_ORDER):
        raise Wrong("each of the blocks 1 to 5 is handed out once")
    if given == [1, 2, 3, 4, 5]:
        raise Wrong(
            "head first: once block 1 is gone, 2 and 3 can never be hit again, yet they "
            "still take room"
        )
    if set(given[:2]) == {4, 5}:
        raise Wrong("B was used last, so it is the likelier to come back: A goes first")
    if set(given[:3]) != {1, 2, 3}:
        raise Wrong("finish with the chain that was released first before touching the other")
    if given[:3] != [3, 2, 1]:
        raise Wrong("inside A the tail goes first: every block of a chain needs the ones before it")
    raise Wrong("A is right; the same holds inside B, tail first")


EXERCISES = (
    Exercise(
        id="5.4",
        title="Who may share?",
        question=(
            "Request 1 has computed two blocks of 4 tokens. In which situations may request 2 read "
            "the second of them? (Block 0 and block 1 are places in a request's table, not ids of "
            "the pool.) Give a set, out of: " + "; ".join(_SHARING)
        ),
        check=_check_sharing,
        solution={name for name, (allowed, _) in _SHARING.items() if allowed},
        hint="Chapter 2's list: K and V must come out the same. What goes into them?",
    ),
    Exercise(
        id="5.5",
        title="Who goes first?",
        question=(
            "A pool of 5 blocks. Request A ends and releases its blocks [1, 2, 3], then B its "
            "blocks [4, 5]. All five are published. In which order are they handed out again?"
        ),
        check=_check_order,
        solution=_ORDER,
        hint="Which block can be dropped at the smallest loss? A chain can only be hit from its "
        "head on.",
    ),
)
