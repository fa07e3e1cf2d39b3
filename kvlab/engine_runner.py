"""From a Batch of lists to logits: tensors, one forward over the ragged row, a paged cache.

The model sees [num_tokens] ids with their positions, and every weight is read once for all
requests. Only attention knows who is who: through query_start_loc, seq_lens and block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.backends import choose_backend
from kvlab.batch import NULL_BLOCK, Batch
from kvlab.model import Decoder
from kvlab.paged_attention import PagedAttention
from kvlab.paged_cache import PagedKVCache


class ModelRunner:
    """One model and its pool of K and V.

    num_blocks   blocks of the pool, the null block included
    attention    which paged attention to run; by default what kvlab.backends chooses here
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        attention: type[PagedAttention] | None = None,
    ) -> None:
        self.model = model
        self.attention = attention or choose_backend(str(model.device)).attention
        self.cache = PagedKVCache(model.spec, num_blocks, block_size, model.dtype, model.device)

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the rows that are sampled, [len(batch.logits_rows), vocab]."""
        device = self.model.device
        attend = self.attention(
            self.model.spec,
            self.cache,
            slot_mapping=_tensor(batch.slot_mapping, device),
            block_tables=block_table_tensor(batch.block_tables, device),
            seq_lens=_tensor(batch.seq_lens, device),
            query_start_loc=_tensor(batch.query_start_loc, device),
        )
        return self.model.forward(
            _tensor(batch.token_ids, device),
            _tensor(batch.positions, device),
            attend,
            rows=_tensor(batch.logits_rows, device),
        )


def _tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


def block_table_tensor(
    block_tables: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Ragged tables as one rectangle [R, most blocks]; the null block fills the ends."""
    width = max((len(table) for table in block_tables), default=0)
    rows = [[*table, *[NULL_BLOCK] * (width - len(table))] for table in block_tables]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(rows), width)
