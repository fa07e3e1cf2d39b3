"""Block tables: which block holds which positions of which request, and who shares blocks.

    position -> block_table[position // bs] -> block id -> slot = block id * bs + position % bs

BlockManager moves requests through their life: match_prefix and start, grow before each
forward, mark_computed after it, fork, truncate_to, preempt, release. One rule makes sharing
safe: a block may be written only while one request holds it and no hash names it. grow() sees
to that (copy on write) and returns the (src, dst) block copies which the cache must do first.

K and V of a block depend on every token before it, so its name must too: the hash of block i
covers the hash of block i - 1 and the block's own tokens. Two requests share a block exactly when
all of that is equal. The chain follows vLLM's design (v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlab.blocks import NULL_BLOCK, BlockPool, PrefixKey, blocks_for, slot_of
from kvlab.errors import BlockError, OutOfBlocks, RequestError, whole
from kvlab.request import Request

#: What the first block of every chain has for a parent hash.
ROOT_HASH = b""


def hash_block(parent_hash: bytes, token_ids: Sequence[int], tags: Sequence[tuple] = ()) -> bytes:
    """SHA-256 of a full block, chained to its parent.

    The text that is hashed is JSON, so lengths, types and borders are unambiguous: ("a", "bc")
    and ("ab", "c") differ, and so do 1 and "1".
    """
    text = json.dumps([parent_hash.hex(), list(token_ids), list(tags)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def tags_between(tags: Sequence[tuple], start: int, stop: int) -> list[tuple]:
    """What besides tokens shapes K and V of positions [start, stop).

    A tag is (kind, name), or (kind, name, first, length) for what lies at some positions only: an
    image enters every block that it overlaps, with its place there, because all images share one
    placeholder token. The kind keeps an adapter called "X" apart from a salt "X".

    >>> tags_between([("adapter", "X"), ("image", "cat", 5, 2)], 4, 8)
    [('adapter', 'X'), ('image', 'cat', 1, 2)]
    """
    found: list[tuple] = []
    for kind, name, *place in tags:
        if not place:
            found.append((kind, name))
        elif place[0] < stop and place[0] + place[1] > start:
            last = min(place[0] + place[1], stop) - 1
            found.append((kind, name, place[0] - start, last - start))
    return found


@dataclass(frozen=True)
class PrefixHit:
    """What the cache already holds of a request: blocks in table order, and usable tokens."""

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


def longest_full_hit(cached: Sequence[bool]) -> int:
    """Blocks a full-attention layer can reuse: all up to the first hole.

    >>> longest_full_hit([True, True, False, True, True])
    2
    """
    return [*cached, False].index(False)


def longest_sliding_hit(cached: Sequence[bool], window: int, block_size: int) -> int:
    """Blocks a sliding layer can skip: an early hole does no harm, one in the last window does.

    The last `window` tokens must be there, as in vLLM; the next token would do with one fewer,
    since the window counts the token itself.

    >>> longest_sliding_hit([True, True, False, True, True], window=2, block_size=1)
    5
    """
    needed = blocks_for(window, block_size)
    num_blocks = len(cached)
    while not all(cached[max(0, num_blocks - needed) : num_blocks]):
        num_blocks -= 1
    return num_blocks


def longest_hybrid_hit(
    cached_full: Sequence[bool], cached_sliding: Sequence[bool], window: int, block_size: int
) -> int:
    """Blocks that both kinds of layer can skip: they must start at the same token.

    Any prefix of a full hit is a full hit, so the sliding side searches below it.
    """
    limit = longest_full_hit(cached_full)
    return longest_sliding_hit(cached_sliding[:limit], window, block_size)


class BlockManager:
    """Block tables over one BlockPool.

    prefix_caching   publish full computed blocks and look prompts up
    sliding_window   free blocks once no later token can see them (for models whose layers all
                     slide); their table entries become the null block
    """

    def __init__(
        self, pool: BlockPool, *, prefix_caching: bool = True, sliding_window: int | None = None
    ) -> None:
        if sliding_window is not None:
            whole("sliding_window, the token itself included,", sliding_window, 1, BlockError)
        self.pool, self.block_size = pool, pool.block_size
        self.prefix_caching, self.sliding_window = prefix_caching, sliding_window
        self.stats = PrefixStats()
        self.requests: dict[str, Request] = {}  # every request that holds blocks

    # -- admission ----------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixHit:
        """What is cached of the request's tokens. A look only: nothing is held or counted.

        At least one token is always left to compute, since only a forward gives logits.
        """
        if not self.prefix_caching or request.prompt_logprobs or request.num_computed_tokens:
            return PrefixHit()
        num_full = self.reusable_tokens(request) // self.block_size
        ids = [self.pool.lookup(self.key(request, i)) for i in range(num_full)]
        present = [block_id is not None for block_id in ids]
        first, window = 0, self.sliding_window
        if window is None:
            num_blocks = longest_full_hit(present)
        else:
            num_blocks = longest_sliding_hit(present, window, self.block_size)
            first = max(0, num_blocks - blocks_for(window, self.block_size))
        table = [NULL_BLOCK] * first + [i for i in ids[first:num_blocks] if i is not None]
        return PrefixHit(tuple(table), min(num_blocks * self.block_size, request.num_tokens - 1))

    def reusable_tokens(self, request: Request) -> int:
        """Tokens whose blocks may be taken from the cache: all but the one to compute.

        So a prompt that is cached to its last token gives up its last block and computes
        block_size tokens again. Another rule is a subclass with another number here.
        """
        return request.num_tokens - 1

    def start(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> list[tuple[int, int]]:
        """Admit a request: hold its cached prefix and make room for the next tokens.

        All or nothing; counts the hit in stats. Returns the block copies to do before writing.
        Raises OutOfBlocks; BlockError where the cache has changed since `hit` was matched.
        """
        assert not request.block_table, f"{request!r} has started already: use grow()"
        current = self.match_prefix(request)
        if hit is not None and hit != current:
            raise BlockError(f"{hit} was matched, {current} is there now: match again")
        self._check_room(request, num_new_tokens, current)
        self.pool.ref(i for i in current.block_ids if i != NULL_BLOCK)
        self.requests[request.request_id] = request
        request.block_table = list(current.block_ids)
        request.num_computed_tokens = request.num_found_tokens = current.num_tokens
        request.num_published_blocks = current.num_tokens // self.block_size
        if request.prompt_logprobs:
            self.stats.skipped_requests += 1
        elif self.prefix_caching:
            resumed = request.num_preemptions > 0
            self.stats.record(request.num_tokens, current.num_tokens, resumed=resumed)
        return self.grow(request, num_new_tokens)

    def num_blocks_needed(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> int:
        """Blocks that leave the free list if the next `num_new_tokens` are given room.

        New blocks, copies on write, and the blocks of `hit` that nobody holds at the moment:
        those stand in the free list, so they must not be counted as free a second time.
        """
        table = list(hit.block_ids) if hit else request.block_table
        computed = hit.num_tokens if hit else request.num_computed_tokens
        refs = [self.pool.blocks[i].ref_count for i in table]
        revived = sum(i != NULL_BLOCK and not r for i, r in zip(table, refs)) if hit else 0
        if num_new_tokens == 0:
            return revived
        num_blocks = blocks_for(computed + num_new_tokens, self.block_size)
        others = 0 if hit else 1
        shared = sum(r > others for r in refs[computed // self.block_size : num_blocks])
        return max(0, num_blocks - len(table)) + shared + revived

    def num_tokens_that_fit(self, request: Request, hit: PrefixHit | None = None) -> int:
        """How many more tokens the free blocks have room for. In tokens, not blocks."""
        spare = self.pool.num_free_blocks - self.num_blocks_needed(request, 1, hit)
        if spare < 0:
            return 0
        table_len = len(hit.block_ids if hit else request.block_table)
        computed = hit.num_tokens if hit else request.num_computed_tokens
        covered = max(table_len, blocks_for(computed + 1, self.block_size))
        return (covered + spare) * self.block_size - computed

    # -- one step -----------------------------------------------------------------------

    def grow(self, request: Request, num_new_tokens: int) -> list[tuple[int, int]]:
        """Make positions [computed, computed + num_new_tokens) writable, all or nothing.

        Returns the (src, dst) block copies that the cache must do before the write.
        Raises OutOfBlocks.
        """
        self._check_room(request, num_new_tokens)
        self.requests[request.request_id] = request
        table, computed, bs = request.block_table, request.num_computed_tokens, self.block_size
        stop = blocks_for(computed + num_new_tokens, bs) if num_new_tokens else 0
        copies = []
        for i in range(computed // bs, min(stop, len(table))):
            src = table[i]
            if self.pool.blocks[src].ref_count == 1:
                self.pool.forget(src)  # about to be rewritten: its hash would become a lie
                continue
            [table[i]] = self.pool.allocate(1)
            self.pool.free([src])
            if i * bs < computed:
                copies.append((src, table[i]))
        table += self.pool.allocate(max(0, stop - len(table)))
        return copies

    def mark_computed(self, request: Request, num_tokens: int) -> None:
        """K and V of the next `num_tokens` tokens are written: count them, publish full blocks.

        Call it after the forward and never before. Raises RequestError for tokens that are not
        known or have no room.
        """
        computed = request.num_computed_tokens + num_tokens
        room = min(request.num_tokens, len(request.block_table) * self.block_size)
        if not request.num_computed_tokens <= computed <= room:
            raise RequestError(
                f"{request!r}: {num_tokens} more tokens marked computed; expected at most "
                f"{room - request.num_computed_tokens}: append() sampled tokens and grow() first"
            )
        request.num_computed_tokens = computed
        if self.prefix_caching:
            self._publish(request)
        if self.sliding_window is not None:
            for i in range(max(0, computed - self.sliding_window + 1) // self.block_size):
                if request.block_table[i] != NULL_BLOCK:
                    self.pool.free([request.block_table[i]])
                    request.block_table[i] = NULL_BLOCK

    def _publish(self, request: Request) -> None:
        """Publish full computed blocks, in order; a twin that is published already is shared."""
        while (i := request.num_published_blocks) < request.num_computed_tokens // self.block_size:
            block_id = request.block_table[i]
            if block_id != NULL_BLOCK:
                key = self.key(request, i)
                twin = self.pool.lookup(key)
                if twin is None:
                    if not self.pool.publish(block_id, key):
                        return  # the hash belongs to other tokens: private from here on
                elif twin != block_id:
                    self.pool.ref([twin])
                    request.block_table[i] = twin
                    self.pool.free([block_id])
            request.num_published_blocks += 1

    def key(self, request: Request, i: int) -> PrefixKey:
        """What full block i is found by. Keys are kept on the request and only extended."""
        keys, bs = request.block_keys, self.block_size
        for j in range(len(keys), i + 1):
            tokens = tuple(request.token_ids[j * bs : (j + 1) * bs])
            tags = tags_between(request.tags, j * bs, (j + 1) * bs)
            parent_hash = keys[j - 1].block_hash if j else ROOT_HASH
            keys.append(PrefixKey(hash_block(parent_hash, tokens, tags), tokens))
        return keys[i]

    def slot_mapping(self, request: Request, start: int, stop: int) -> list[int]:
        """The slots of positions [start, stop): where the forward writes K and V."""
        return [slot_of(request.block_table, self.block_size, p) for p in range(start, stop)]

    # -- sharing and going back ---------------------------------------------------------

    def fork(self, request: Request, request_id: str) -> Request:
        """A copy that shares all computed blocks. Whoever writes first copies."""
        assert request_id not in self.requests, f"request id {request_id!r} is in use"
        self._check_holder(request)
        child = request.copy(request_id)
        num_blocks = blocks_for(request.num_computed_tokens, self.block_size)
        child.block_table = request.block_table[:num_blocks]
        self.pool.ref(i for i in child.block_table if i != NULL_BLOCK)
        if child.block_table:
            self.requests[request_id] = child
        return child

    def truncate_to(self, request: Request, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens and release the blocks past them.

        Raises RequestError for too many tokens, or where a window freed what the next one reads.
        """
        self._check_holder(request)
        keep = blocks_for(whole("tokens to keep", num_tokens), self.block_size)
        computed = min(request.num_computed_tokens, num_tokens)
        window = self.sliding_window or computed + 1
        first = max(0, computed - window + 1) // self.block_size
        needed = request.block_table[first : blocks_for(computed, self.block_size)]
        if num_tokens > request.num_tokens or NULL_BLOCK in needed:
            raise RequestError(
                f"{request!r} cannot be cut to {num_tokens} tokens: it has no more than "
                f"{request.num_tokens}, and of those a window has passed none are left; release it "
                f"and compute it again"
            )
        self.pool.free(i for i in request.block_table[keep:] if i != NULL_BLOCK)
        request.cut(num_tokens)
        del request.block_table[keep:]
        del request.block_keys[num_tokens // self.block_size :]
        request.num_computed_tokens = computed
        full = computed // self.block_size
        request.num_published_blocks = min(request.num_published_blocks, full)
        if not request.block_table:
            self.release(request)

    def drop_last(self, request: Request, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens (at most all of them)."""
        drop = whole("tokens to drop", num_tokens)
        self.truncate_to(request, max(0, request.num_tokens - drop))

    def release(self, request: Request) -> None:
        """Give all blocks back. The full ones stay cached until they are handed out again."""
        self._check_holder(request)
        self.pool.free(i for i in request.block_table if i != NULL_BLOCK)
        request.block_table = []
        request.num_computed_tokens = request.num_published_blocks = 0
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]

    def preempt(self, request: Request) -> None:
        """Release a running request's blocks; it keeps its tokens and computes them again."""
        self.release(request)
        request.num_preemptions += 1

    def reset(self, requests: Iterable[Request]) -> None:
        """Every block free and empty: what they hold is not trusted, and these compute it again."""
        for request in requests:
            request.block_table = []
            request.num_computed_tokens = request.num_published_blocks = 0
        self.requests = {}
        self.pool = type(self.pool)(self.pool.num_blocks, self.block_size)

    def _check_holder(self, request: Request) -> None:
        """Another pool's ids name blocks of somebody else here."""
        is_here = self.requests.get(request.request_id) is request
        assert is_here or not request.block_table, f"{request!r} holds no blocks of this pool"

    def _check_room(self, request: Request, num_new: int, hit: PrefixHit | None = None) -> None:
        is_own = self.requests.get(request.request_id, request) is request
        assert is_own, f"another request is called {request.request_id!r}: names are unique"
        self._check_holder(request)
        needed = self.num_blocks_needed(request, whole("tokens to make room for", num_new), hit)
        if needed > self.pool.num_free_blocks:
            raise OutOfBlocks(
                f"{request!r}: {needed} block(s) needed for {num_new} more tokens, "
                f"{self.pool.num_free_blocks} free: preempt or finish a request, or make the pool "
                f"larger (nothing was changed)"
            )
