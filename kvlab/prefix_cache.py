"""Finding a sequence's prefix among the published blocks, and publishing its own.

PrefixCache sits on a BlockPool: the pool holds the map hash -> block, this file knows which hash
a sequence's block has, how much of a hit may be used, and when a block may be published.
"""

from __future__ import annotations

from kvlab.blocks import NULL_BLOCK, BlockError, BlockPool, blocks_for, is_whole
from kvlab.prefix import (
    ROOT_HASH,
    HashFunction,
    PrefixHit,
    PrefixKey,
    PrefixStats,
    extra_keys,
    hash_block,
    longest_full_hit,
    longest_sliding_hit,
)
from kvlab.sequence import Sequence

FULL_HIT_RULES = ("block", "token")


class StaleHit(BlockError):
    """A prefix hit no longer holds: blocks changed hands since match_prefix()."""


class PrefixCache:
    """Lookup and publication of full computed blocks. See BlockManager for the options."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        enabled: bool = True,
        full_hit: str = "block",
        sliding_window: int | None = None,
        hash_function: HashFunction = hash_block,
    ) -> None:
        if full_hit not in FULL_HIT_RULES:
            raise BlockError(f"full_hit={full_hit!r}: choose one of {FULL_HIT_RULES}")
        if sliding_window is not None and not is_whole(sliding_window, 1):
            raise BlockError(
                f"sliding_window={sliding_window!r}: expected None, or 1 (the token itself) or more"
            )
        self.pool = pool
        self.block_size = pool.block_size
        self.enabled = enabled
        self.full_hit = full_hit
        self.sliding_window = sliding_window
        self.hash_function = hash_function
        self.stats = PrefixStats()

    def match(self, seq: Sequence) -> PrefixHit:
        """What is cached of seq's tokens. A look only: nothing is held or counted.

        At least one token is always left to compute, since only a forward gives logits.
        A request that wants prompt log-probabilities reads nothing: a skipped row has none.
        """
        if not self.enabled or seq.prompt_logprobs or seq.num_computed_tokens:
            return PrefixHit()
        limit = seq.num_tokens if self.full_hit == "token" else seq.num_tokens - 1
        ids = [self._lookup(seq, i) for i in range(limit // self.block_size)]
        present = [block_id is not None for block_id in ids]
        first = 0
        if self.sliding_window is None:
            num_blocks = longest_full_hit(present, len(ids))
        else:
            window = self.sliding_window
            num_blocks = longest_sliding_hit(present, len(ids), window, self.block_size)
            first = max(0, num_blocks - blocks_for(window, self.block_size))
        table = [NULL_BLOCK] * first + [i for i in ids[first:num_blocks] if i is not None]
        return PrefixHit(tuple(table), min(num_blocks * self.block_size, seq.num_tokens - 1))

    def record(self, seq: Sequence, hit: PrefixHit) -> None:
        """Count an admitted request's lookup."""
        if seq.prompt_logprobs:
            self.stats.skipped_requests += 1
        elif self.enabled:
            resumed = seq.num_preemptions > 0
            self.stats.record(seq.num_tokens, hit.num_tokens, resumed=resumed)

    def publish(self, seq: Sequence) -> None:
        """Publish seq's full computed blocks, in order.

        A block whose twin is published already is given back, and the twin shared instead. Where
        a hash belongs to other tokens (a collision), the sequence stays private from there on.
        """
        if not self.enabled:
            return
        while (i := seq.num_published_blocks) < seq.num_computed_tokens // self.block_size:
            block_id = seq.block_table[i]
            if block_id != NULL_BLOCK:
                key = self.key(seq, i)
                twin = self.pool.lookup(key)
                if twin is None:
                    if not self.pool.publish(block_id, key):
                        return
                elif twin != block_id:
                    self.pool.ref([twin])
                    seq.block_table[i] = twin
                    self.pool.free([block_id])
            seq.num_published_blocks += 1

    def key(self, seq: Sequence, i: int) -> PrefixKey:
        """Identity of seq's full block i. Keys are kept on the sequence and only extended."""
        for j in range(len(seq.block_keys), i + 1):
            parent = seq.block_keys[j - 1] if j else None
            content = self._content(seq, j)
            parent_hash = parent.block_hash if parent else ROOT_HASH
            block_hash = self.hash_function(parent_hash, *content)
            seq.block_keys.append(PrefixKey(block_hash, parent, *content))
        return seq.block_keys[i]

    def _lookup(self, seq: Sequence, i: int) -> int | None:
        """The published twin of seq's block i. On a hit seq takes over the twin's key object.

        Chains that share objects are compared in one step instead of block by block.
        """
        block_id = self.pool.lookup(self.key(seq, i))
        if block_id is not None and i == len(seq.block_keys) - 1:
            seq.block_keys[i] = self.pool.blocks[block_id].prefix or seq.block_keys[i]
        return block_id

    def _content(self, seq: Sequence, i: int) -> tuple[tuple[int, ...], tuple]:
        start, stop = i * self.block_size, (i + 1) * self.block_size
        extra = extra_keys(start, stop, seq.adapter, seq.cache_salt, seq.multimodal)
        return tuple(seq.token_ids[start:stop]), extra
