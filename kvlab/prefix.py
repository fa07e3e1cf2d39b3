"""When may two requests share a block? Hashes of full blocks, and how long a hit is.

A block of K and V depends on every token before it, so its name must too: the hash of block i
covers the hash of block i - 1, the block's own tokens, and whatever else changed its K and V
(adapter, salt, images). Two requests share a block exactly when all of that is equal.

The chain of hashes follows vLLM's design (v1/core/kv_cache_utils.py); a hit here also compares
the tokens of the whole chain, so that a hash collision is a miss and never another request's text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

#: What the first block of every chain has for a parent hash.
ROOT_HASH = b""


@dataclass(frozen=True, eq=False)
class PrefixKey:
    """The full identity of one full block: its hash, its tokens, and the block before it.

    Two keys are equal when every block of the two chains is, token by token. Hashes are compared
    first, and chains that meet in one object are not followed further, so this is quick.
    """

    block_hash: bytes
    parent: PrefixKey | None = field(repr=False)  # a chain can be thousands of blocks long
    token_ids: tuple[int, ...]
    extra: tuple[tuple[str | int, ...], ...] = ()

    def __eq__(self, other: object) -> bool:
        one: PrefixKey | None = self
        two = other if isinstance(other, PrefixKey) else None
        while one is not None and two is not None and one is not two:
            if (one.block_hash, one.token_ids, one.extra) != (
                two.block_hash,
                two.token_ids,
                two.extra,
            ):
                return False
            one, two = one.parent, two.parent
        return one is two

    def __hash__(self) -> int:
        return hash(self.block_hash)


HashFunction = Callable[[bytes, tuple[int, ...], tuple], bytes]


def hash_block(parent_hash: bytes, token_ids: tuple[int, ...], extra: tuple) -> bytes:
    """SHA-256 of a full block, chained to its parent.

    The text that is hashed is JSON, so lengths, types and borders are unambiguous: ("a", "bc")
    and ("ab", "c") differ, and so do 1 and "1".
    """
    text = json.dumps([parent_hash.hex(), list(token_ids), extra], separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def extra_keys(
    start: int,
    stop: int,
    adapter: str | None = None,
    cache_salt: str | None = None,
    multimodal: Iterable[tuple[str, int, int]] = (),
) -> tuple[tuple[str | int, ...], ...]:
    """What besides tokens shapes the K and V of positions [start, stop), each tagged by source.

    The tags keep an adapter called "X" apart from a salt "X". An image enters every block that
    it overlaps, with its place in that block, because all images share one placeholder token.

    >>> extra_keys(0, 4, adapter="X") == extra_keys(0, 4, cache_salt="X")
    False
    """
    keys: list[tuple[str | int, ...]] = []
    if adapter is not None:
        keys.append(("adapter", adapter))
    if cache_salt is not None:
        keys.append(("salt", cache_salt))
    for content_id, first, length in multimodal:
        if first < stop and first + length > start:
            last = min(first + length, stop) - 1
            keys.append(("multimodal", content_id, first - start, last - start))
    return tuple(keys)


@dataclass(frozen=True)
class PrefixHit:
    """What the cache already holds of a sequence: blocks in table order, and usable tokens."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass
class PrefixStats:
    """Hits, in tokens, counted once per admitted request.

    A request that comes back after a preemption finds its own blocks again. That is not
    sharing, so those tokens are counted in the reread_ fields and leave hit_rate alone.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    reread_queried_tokens: int = 0
    reread_tokens: int = 0
    skipped_requests: int = 0

    def record(self, queried: int, hit: int, *, resumed: bool) -> None:
        if resumed:
            self.reread_queried_tokens += queried
            self.reread_tokens += hit
        else:
            self.queried_tokens += queried
            self.hit_tokens += hit

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that another request had already computed."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def longest_full_hit(cached: Seq[bool], max_blocks: int) -> int:
    """Blocks a full-attention layer can reuse: all up to the first hole.

    >>> longest_full_hit([True, True, False, True, True], 5)
    2
    """
    num_blocks = 0
    while num_blocks < min(max_blocks, len(cached)) and cached[num_blocks]:
        num_blocks += 1
    return num_blocks


def sliding_hit_is_valid(
    cached: Seq[bool], num_blocks: int, window: int, block_size: int, *, exact: bool = False
) -> bool:
    """Can a sliding layer start after `num_blocks` cached blocks? Only the last window matters.

    By default the last `window` tokens must be there. The next token needs one fewer, since the
    window counts the token itself: exact=True asks for window - 1.
    """
    needed_tokens = window - 1 if exact else window
    first = max(0, num_blocks - -(-needed_tokens // block_size))
    return all(cached[i] for i in range(first, num_blocks))


def longest_sliding_hit(
    cached: Seq[bool], max_blocks: int, window: int, block_size: int, *, exact: bool = False
) -> int:
    """Blocks a sliding layer can skip: an early hole does no harm, a late one does.

    >>> longest_sliding_hit([True, True, False, True, True], 5, window=2, block_size=1)
    5
    """
    num_blocks = min(max_blocks, len(cached))
    while num_blocks and not sliding_hit_is_valid(
        cached, num_blocks, window, block_size, exact=exact
    ):
        num_blocks -= 1
    return num_blocks


def longest_hybrid_hit(
    cached_full: Seq[bool],
    cached_sliding: Seq[bool],
    max_blocks: int,
    window: int,
    block_size: int,
) -> int:
    """Blocks that both kinds of layer can skip: they must start at the same token.

    Any prefix of a full hit is a full hit, so the sliding side searches below it.
    """
    limit = longest_full_hit(cached_full, max_blocks)
    return longest_sliding_hit(cached_sliding, limit, window, block_size)
