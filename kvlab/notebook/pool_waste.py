"""How much of a KV pool holds no token: reserving each request's maximum, or paging it.

Everything is counted in slots (one slot: one token in every layer), so that the figures hold for
any model. Multiply by costs.kv_bytes_per_token for bytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvlab.blocks import blocks_for
from kvlab.notebook import require


@dataclass(frozen=True)
class Waste:
    """Slots taken and slots that hold a token, of a set of resident requests."""

    taken_slots: int
    used_slots: int

    @property
    def wasted_slots(self) -> int:
        return self.taken_slots - self.used_slots

    @property
    def wasted_share(self) -> float:
        """Wasted slots over taken slots; 0 where nothing is taken."""
        return self.wasted_slots / self.taken_slots if self.taken_slots else 0.0


def reserved_waste(num_tokens: Seq[int], max_len: int) -> Waste:
    """Each request holds max_len slots from its start, whatever it uses of them.

    >>> reserved_waste([100, 300], max_len=1000).wasted_slots
    1600
    """
    longest = max(num_tokens, default=0)
    require(longest <= max_len, f"a request of {longest} tokens, longer than max_len {max_len}")
    return Waste(max_len * len(num_tokens), sum(num_tokens))


def paged_waste(num_tokens: Seq[int], block_size: int) -> Waste:
    """Each request holds whole blocks; only its last one can be partly empty.

    >>> [paged_waste([n], 16).wasted_slots for n in (1, 16, 17, 257)]
    [15, 0, 15, 15]
    """
    blocks = sum(blocks_for(n, block_size) for n in num_tokens)
    return Waste(blocks * block_size, sum(num_tokens))


def expected_waste_per_request(block_size: int) -> float:
    """Mean empty slots of a last block, if every length modulo block_size is equally likely.

    The last block holds 1 .. block_size tokens, so 0 .. block_size - 1 slots stay empty.
    """
    return (block_size - 1) / 2


def num_that_fit_reserved(num_slots: int, max_len: int) -> int:
    """Requests admitted at once when each reserves max_len slots."""
    return num_slots // max_len


def num_that_fit_paged(num_slots: int, block_size: int, num_tokens: Seq[int]) -> int:
    """Requests, in the given order, whose present tokens fit into the pool's whole blocks."""
    free, admitted = num_slots // block_size, 0
    for n in num_tokens:
        free -= blocks_for(n, block_size)
        if free < 0:
            break
        admitted += 1
    return admitted
