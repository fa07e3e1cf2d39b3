"""What must be true of pool, map and tables after every operation, and what is broken if not.

    every usable block is in use or in the free list, and never both
    a block's ref_count is the number of table entries that name it
    hash -> block and block -> hash are the same relation
    a published block's tokens are those of every sequence that reads it

A finding names the block, the sequence and the two numbers that disagree, so that a reader who
breaks the pool by hand can see which rule spoke.
"""

from __future__ import annotations

from collections import Counter

from kvlab.blocks import NULL_BLOCK, BlockPool, PoolCorrupt, blocks_for
from kvlab.sequence import Sequence


def findings(
    pool: BlockPool, sequences: list[Sequence], sliding_window: int | None = None
) -> list[str]:
    """Every broken invariant, in words; empty when all is well.

    sequences must be all that hold blocks of this pool, or a held block looks lost.
    """
    found = _pool_findings(pool)
    held = Counter(i for seq in sequences for i in seq.block_table if i != NULL_BLOCK)
    for block in pool.blocks[1:]:
        if block.ref_count != held[block.block_id]:
            found.append(
                f"block {block.block_id}: ref_count {block.ref_count}, but "
                f"{held[block.block_id]} table entr{'y' if held[block.block_id] == 1 else 'ies'}"
            )
    for seq in sequences:
        found += _sequence_findings(pool, seq, sliding_window)
    return found + _sharing_findings(pool, sequences)


def check_integrity(
    pool: BlockPool, sequences: list[Sequence], sliding_window: int | None = None
) -> None:
    """Raise PoolCorrupt if anything is broken."""
    found = findings(pool, sequences, sliding_window)
    if found:
        raise PoolCorrupt(found)


def _pool_findings(pool: BlockPool) -> list[str]:
    found = []
    null = pool.blocks[NULL_BLOCK]
    if NULL_BLOCK in pool.free_list or null.ref_count or null.prefix:
        found.append("the null block (0) is free, held or published; it must stay apart")
    for block_id in pool.free_list:
        if not 0 <= block_id < pool.num_blocks:
            found.append(f"free list: id {block_id} is outside the pool of {pool.num_blocks}")
    for block in pool.blocks[1:]:
        i, free = block.block_id, block.block_id in pool.free_list
        if block.ref_count < 0:
            found.append(f"block {i}: ref_count {block.ref_count} is negative")
        if free and block.ref_count > 0:
            found.append(f"block {i}: in the free list and held {block.ref_count} time(s)")
        if not free and block.ref_count == 0:
            found.append(f"block {i}: lost, held by nobody and not in the free list")
        key = block.prefix
        if key is not None and pool.cached.get(key.block_hash) != i:
            found.append(f"block {i}: carries a hash, but the map does not lead back to it")
        if key is not None and len(key.token_ids) != pool.block_size:
            found.append(f"block {i}: published with {len(key.token_ids)} tokens, not full")
    for block_hash, i in pool.cached.items():
        key = pool.blocks[i].prefix if 0 < i < pool.num_blocks else None
        if key is None or key.block_hash != block_hash:
            found.append(
                f"prefix map: hash {block_hash.hex()[:8]} leads to block {i}, "
                "which does not carry it"
            )
    in_use = sum(block.ref_count > 0 for block in pool.blocks[1:])
    if in_use + pool.num_free_blocks != pool.num_usable_blocks:
        found.append(
            f"{in_use} blocks in use + {pool.num_free_blocks} free is not "
            f"{pool.num_usable_blocks} usable"
        )
    return found


def _sequence_findings(pool: BlockPool, seq: Sequence, window: int | None) -> list[str]:
    found, bs, name = [], pool.block_size, seq.request_id
    computed, table = seq.num_computed_tokens, seq.block_table
    for index, i in enumerate(table):
        if not 0 <= i < pool.num_blocks:
            found.append(
                f"{name}: table entry {index} is {i}, outside the pool of {pool.num_blocks}"
            )
    twice = [i for i, times in Counter(table).items() if times > 1 and i != NULL_BLOCK]
    found += [f"{name}: block {i} stands in its table more than once" for i in twice]
    if computed > seq.num_tokens:
        found.append(f"{name}: {computed} tokens computed, only {seq.num_tokens} known")
    if len(table) < blocks_for(computed, bs):
        found.append(f"{name}: {computed} tokens computed, but the table has {len(table)} blocks")
    first = 0 if window is None else max(0, computed - window + 1) // bs
    if NULL_BLOCK in table[first:]:
        found.append(f"{name}: a null block stands where tokens are still read")
    if seq.num_published_blocks * bs > computed:
        found.append(
            f"{name}: {seq.num_published_blocks} blocks published, only {computed} tokens computed"
        )
    for index, i in enumerate(table[: blocks_for(computed, bs)]):
        key = pool.blocks[i].prefix if 0 < i < pool.num_blocks else None
        known = tuple(seq.token_ids[index * bs : min((index + 1) * bs, computed)])
        if key is not None and key.token_ids[: len(known)] != known:
            found.append(
                f"{name}: block {i} is published for tokens {key.token_ids}, but its "
                f"table reads it for {known}"
            )
    return found


def _sharing_findings(pool: BlockPool, sequences: list[Sequence]) -> list[str]:
    """Two tables may name one block only for the same tokens at the same place."""
    found: list[str] = []
    bs = pool.block_size
    first_reader: dict[int, tuple[Sequence, int]] = {}
    for seq in sequences:
        for index, i in enumerate(seq.block_table):
            if i == NULL_BLOCK:
                continue
            other, place = first_reader.setdefault(i, (seq, index))
            if other is seq:
                continue
            n = min(seq.num_computed_tokens, other.num_computed_tokens, (index + 1) * bs)
            if place != index or seq.token_ids[:n] != other.token_ids[:n]:
                found.append(
                    f"block {i}: shared by {other.request_id} (place {place}) and "
                    f"{seq.request_id} (place {index}), which hold different tokens"
                )
    return found
