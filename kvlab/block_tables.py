"""Block tables: which block holds which positions of which sequence.

    position -> block_table[position // bs] -> block id -> slot = block id * bs + position % bs

BlockManager moves sequences through their life: match_prefix and start, grow before each
forward, mark_computed after it, fork, truncate_to, preempt, release. One rule makes sharing
safe: a block may be written only while one sequence holds it and no hash names it. grow() sees
to that (copy on write) and returns the (src, dst) block copies which the cache must do first.
"""

from __future__ import annotations

from kvlab.blocks import NULL_BLOCK, BlockPool, OutOfBlocks, blocks_for, is_whole
from kvlab.integrity import check_integrity, findings
from kvlab.prefix import HashFunction, PrefixHit, PrefixStats, hash_block
from kvlab.prefix_cache import PrefixCache, StaleHit
from kvlab.sequence import Sequence, SequenceError
from kvlab.slots import SlotOutOfRange, slot_of


class BlockManager:
    """Block tables over one BlockPool.

    prefix_caching   publish full computed blocks and look prompts up
    full_hit         a prompt that is cached to its last token still needs one token computed.
                     "block": give up its last block and compute block_size tokens again.
                     "token": keep it, compute one token, copy the block if others hold it.
    sliding_window   free blocks once no later token can see them (for models whose layers all
                     slide); their table entries become the null block
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        prefix_caching: bool = True,
        full_hit: str = "block",
        sliding_window: int | None = None,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.sliding_window = sliding_window
        self.prefix = PrefixCache(
            pool,
            enabled=prefix_caching,
            full_hit=full_hit,
            sliding_window=sliding_window,
            hash_function=hash_function,
        )
        self.sequences: dict[str, Sequence] = {}  # every sequence that holds blocks

    # -- admission ----------------------------------------------------------------------

    @property
    def stats(self) -> PrefixStats:
        return self.prefix.stats

    def match_prefix(self, seq: Sequence) -> PrefixHit:
        """What is cached of seq's tokens, at least one token left to compute. A look only."""
        return self.prefix.match(seq)

    def start(
        self, seq: Sequence, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> list[tuple[int, int]]:
        """Admit a sequence: hold its cached prefix and make room for the next tokens.

        All or nothing; counts the hit in stats. Returns the block copies to do before writing.
        Raises OutOfBlocks, StaleHit (hit given, but the cache has changed since), SequenceError.
        """
        if seq.block_table or seq.num_computed_tokens:
            raise SequenceError(f"{seq!r} has started already: use grow()")
        current = self.match_prefix(seq)
        if hit is not None and hit != current:
            raise StaleHit(f"{hit} was matched, {current} is there now: match again")
        self._check_room(seq, num_new_tokens, current)
        self.pool.ref(i for i in current.block_ids if i != NULL_BLOCK)
        seq.block_table = list(current.block_ids)
        seq.num_computed_tokens = seq.num_cached_tokens = current.num_tokens
        seq.num_published_blocks = current.num_tokens // self.block_size
        self.sequences[seq.request_id] = seq
        try:
            copies = self.grow(seq, num_new_tokens)
        except BaseException:
            self.release(seq)  # all or nothing, whatever it was
            raise
        self.prefix.record(seq, current)
        return copies

    def num_blocks_needed(
        self, seq: Sequence, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> int:
        """Blocks that leave the free list if the next `num_new_tokens` are given room.

        New blocks, copies on write, and the blocks of `hit` that nobody holds at the moment:
        those stand in the free list, so they must not be counted as free a second time.
        """
        table = list(hit.block_ids) if hit else seq.block_table
        computed = hit.num_tokens if hit else seq.num_computed_tokens
        refs = [self.pool.blocks[i].ref_count for i in table]
        revived = sum(i != NULL_BLOCK and not r for i, r in zip(table, refs)) if hit else 0
        if num_new_tokens == 0:
            return revived
        num_blocks = blocks_for(computed + num_new_tokens, self.block_size)
        others = 0 if hit else 1
        shared = sum(r > others for r in refs[computed // self.block_size : num_blocks])
        return max(0, num_blocks - len(table)) + shared + revived

    def num_tokens_that_fit(self, seq: Sequence, hit: PrefixHit | None = None) -> int:
        """How many more tokens of seq the free blocks have room for. In tokens, not blocks."""
        spare = self.pool.num_free_blocks - self.num_blocks_needed(seq, 1, hit)
        if spare < 0:
            return 0
        table_len = len(hit.block_ids if hit else seq.block_table)
        computed = hit.num_tokens if hit else seq.num_computed_tokens
        covered = max(table_len, blocks_for(computed + 1, self.block_size))
        return (covered + spare) * self.block_size - computed

    # -- one step -----------------------------------------------------------------------

    def grow(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Make positions [computed, computed + num_new_tokens) writable, all or nothing.

        Returns the (src, dst) block copies that the cache must do before the write.
        Raises OutOfBlocks, SequenceError.
        """
        self._check_room(seq, num_new_tokens)
        if num_new_tokens == 0:
            return []
        self.sequences[seq.request_id] = seq
        stop = blocks_for(seq.num_computed_tokens + num_new_tokens, self.block_size)
        copies = []
        for i in range(seq.num_computed_tokens // self.block_size, min(stop, len(seq.block_table))):
            src = seq.block_table[i]
            if self.pool.blocks[src].ref_count == 1:
                self.pool.forget(src)  # about to be rewritten: its hash would become a lie
                continue
            [dst] = self.pool.allocate(1)
            seq.block_table[i] = dst
            self.pool.free([src])
            if i * self.block_size < seq.num_computed_tokens:
                copies.append((src, dst))
        seq.block_table += self.pool.allocate(max(0, stop - len(seq.block_table)))
        return copies

    def mark_computed(self, seq: Sequence, num_tokens: int) -> None:
        """K and V of the next `num_tokens` tokens are written: count them, publish full blocks.

        Call it after the forward and never before. A block whose twin is published already is
        given back and the twin is shared. Raises SequenceError, SlotOutOfRange.
        """
        computed = seq.num_computed_tokens + num_tokens
        if not is_whole(num_tokens, 0) or computed > seq.num_tokens:
            raise SequenceError(
                f"{seq!r}: {num_tokens} more tokens marked computed, {seq.num_uncomputed_tokens} "
                "are known; append sampled tokens before marking them"
            )
        if computed > len(seq.block_table) * self.block_size:
            raise SlotOutOfRange(f"{seq!r} has no room for {computed} tokens: call grow() first")
        seq.num_computed_tokens = computed
        self.prefix.publish(seq)
        if self.sliding_window is not None:
            self._drop_outside_window(seq, self.sliding_window)

    def slot(self, seq: Sequence, position: int) -> int:
        """The slot of one position of seq."""
        return slot_of(seq.block_table, self.block_size, position)

    def slot_mapping(self, seq: Sequence, start: int, stop: int) -> list[int]:
        """The slots of positions [start, stop): where the forward writes K and V."""
        return [self.slot(seq, position) for position in range(start, stop)]

    # -- sharing and going back ---------------------------------------------------------

    def fork(self, seq: Sequence, request_id: str) -> Sequence:
        """A copy of seq that shares all its computed blocks. Whoever writes first copies."""
        if request_id in self.sequences:
            raise SequenceError(f"request id {request_id!r} is in use: give the fork its own name")
        self._check_holder(seq)
        child = seq.copy(request_id)
        child.block_table = seq.block_table[: blocks_for(seq.num_computed_tokens, self.block_size)]
        self.pool.ref(i for i in child.block_table if i != NULL_BLOCK)
        if child.block_table:
            self.sequences[request_id] = child
        return child

    def truncate_to(self, seq: Sequence, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens and release the blocks past them.

        Raises SequenceError for too many tokens, or where a window freed what the next one reads.
        """
        self._check_holder(seq)
        if not (is_whole(num_tokens, 0) and num_tokens <= seq.num_tokens):
            raise SequenceError(f"{seq!r} cannot be cut to {num_tokens} tokens")
        computed = min(seq.num_computed_tokens, num_tokens)
        if self.sliding_window is not None:
            first = max(0, computed - self.sliding_window + 1) // self.block_size
            if NULL_BLOCK in seq.block_table[first : blocks_for(computed, self.block_size)]:
                raise SequenceError(
                    f"{seq!r} cannot go back to {num_tokens} tokens: the window's earlier blocks "
                    "are freed; release it and compute it again"
                )
        keep = blocks_for(num_tokens, self.block_size)
        self.pool.free(i for i in seq.block_table[keep:] if i != NULL_BLOCK)
        seq.cut(num_tokens)
        del seq.block_table[keep:]
        del seq.block_keys[num_tokens // self.block_size :]
        seq.num_computed_tokens = computed
        seq.num_published_blocks = min(seq.num_published_blocks, computed // self.block_size)
        if not seq.block_table:
            self.release(seq)

    def drop_last(self, seq: Sequence, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens (at most all of them)."""
        if not is_whole(num_tokens, 0):
            raise SequenceError(f"{num_tokens!r} tokens to drop: expected 0 or more")
        self.truncate_to(seq, max(0, seq.num_tokens - num_tokens))

    def release(self, seq: Sequence) -> None:
        """Give all blocks back. The full ones stay cached until they are handed out again."""
        self._check_holder(seq)
        self.pool.free(i for i in seq.block_table if i != NULL_BLOCK)
        seq.block_table = []
        seq.num_computed_tokens = seq.num_published_blocks = 0
        if self.sequences.get(seq.request_id) is seq:
            del self.sequences[seq.request_id]

    def preempt(self, seq: Sequence) -> None:
        """Release a running sequence's blocks; it keeps its tokens and computes them again."""
        self.release(seq)
        seq.num_preemptions += 1

    def findings(self) -> list[str]:
        """Every broken invariant, in words. Empty when all is well."""
        return findings(self.pool, list(self.sequences.values()), self.sliding_window)

    def check_integrity(self) -> None:
        """Raise PoolCorrupt with every finding."""
        check_integrity(self.pool, list(self.sequences.values()), self.sliding_window)

    def _check_holder(self, seq: Sequence) -> None:
        """Another pool's ids name blocks of somebody else here."""
        if seq.block_table and self.sequences.get(seq.request_id) is not seq:
            raise SequenceError(f"{seq!r} holds no blocks of this pool: ask the manager it is of")

    def _check_room(self, seq: Sequence, num_new: int, hit: PrefixHit | None = None) -> None:
        if self.sequences.get(seq.request_id, seq) is not seq:
            raise SequenceError(f"another request is called {seq.request_id!r}: names are unique")
        self._check_holder(seq)
        if not is_whole(num_new, 0):
            raise SequenceError(f"{seq!r}: room for {num_new!r} tokens wanted, expected 0 or more")
        needed = self.num_blocks_needed(seq, num_new, hit)
        if needed > self.pool.num_free_blocks:
            raise OutOfBlocks(needed, self.pool.num_free_blocks)

    def _drop_outside_window(self, seq: Sequence, window: int) -> None:
        for i in range(max(0, seq.num_computed_tokens - window + 1) // self.block_size):
            if seq.block_table[i] != NULL_BLOCK:
                self.pool.free([seq.block_table[i]])
                seq.block_table[i] = NULL_BLOCK
