"""Decoding over a paged cache: the loop of chapter 5, before there is a scheduler.

    decoder = PagedDecoder(model, num_blocks=64, block_size=16)
    decoder.generate(prompt_ids, 32)

One forward is: make room (BlockManager.grow), do the block copies it asks for, write K and V by
slot, read them by block table, and only then count the tokens as computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from itertools import accumulate

import torch

from kvlab.block_tables import BlockManager
from kvlab.blocks import NULL_BLOCK, BlockPool
from kvlab.generate import PromptTooLong, Step, max_outputs, prompt_of
from kvlab.model import Decoder
from kvlab.paged_attention import PagedAttention
from kvlab.paged_cache import PagedKVCache
from kvlab.prefix import PrefixHit
from kvlab.sequence import Sequence, SequenceError

__all__ = ["PagedDecoder", "paged_generate"]


class PagedDecoder:
    """A model with a paged cache and the tables over it.

    num_blocks   blocks of the pool, the null block included
    options      of BlockManager: prefix_caching, full_hit, sliding_window
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        layout: str = "NHD",
        **options,
    ) -> None:
        self.model = model
        self.manager = BlockManager(BlockPool(num_blocks, block_size), **options)
        self.cache = PagedKVCache(
            model.spec, num_blocks, block_size, model.dtype, model.device, layout
        )
        self.owed_copies: list[tuple[int, int]] = []
        self.num_requests = 0
        self.num_forwards = 0
        self.num_tokens_computed = 0

    def sequence(self, prompt_ids: Seq[int], **fields) -> Sequence:
        """A new request, with a name of its own. Its prefix is looked up at the first forward."""
        prompt = prompt_of(self.model.spec, prompt_ids)
        self.num_requests += 1
        return Sequence(f"request {self.num_requests}", prompt, **fields)

    @torch.inference_mode()
    def forward(self, work: Seq[tuple[Sequence, int]], *, all_rows: bool = False) -> torch.Tensor:
        """Compute the next tokens of some sequences in one ragged batch.

        work       (sequence, number of its tokens to compute)
        all_rows   logits of every row, [tokens, vocab], instead of one row per sequence

        A sequence that has not started is started here, so its count is of the tokens after the
        prefix hit. Raises OutOfBlocks before anything of the failing sequence is touched, or
        StaleHit where making room for one evicted what another was to reuse: count again. Raises
        SequenceError before anything at all for a count that is not 1 to the tokens left, and
        PromptTooLong for positions that the model does not have.
        """
        hits = self._check(work)
        device = self.model.device
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        counts: list[int] = []
        for (seq, num_new), hit in zip(work, hits, strict=True):
            if hit is None:
                self.owed_copies += self.manager.grow(seq, num_new)
            else:
                self.owed_copies += self.manager.start(seq, num_new, hit)
            self.cache.copy_blocks(self.owed_copies)
            start = seq.num_computed_tokens
            tokens += seq.token_ids[start : start + num_new]
            positions += range(start, start + num_new)
            slots += self.manager.slot_mapping(seq, start, start + num_new)
            counts.append(num_new)
        ends = [0, *accumulate(counts)]
        width = max(len(seq.block_table) for seq, _ in work)
        tables = [[*seq.block_table, *[NULL_BLOCK] * width][:width] for seq, _ in work]
        attend = PagedAttention(
            self.model.spec,
            self.cache,
            slot_mapping=torch.tensor(slots, device=device),
            block_tables=torch.tensor(tables, device=device),
            seq_lens=torch.tensor([s.num_computed_tokens + n for s, n in work], device=device),
            query_start_loc=torch.tensor(ends, device=device),
        )
        last_rows = torch.tensor(ends[1:], device=device) - 1
        logits = self.model.forward(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            attend,
            rows=None if all_rows else last_rows,
        )
        for seq, num_new in work:
            self.manager.mark_computed(seq, num_new)
        self.num_forwards += 1
        self.num_tokens_computed += ends[-1]
        return logits

    def _check(self, work: Seq[tuple[Sequence, int]]) -> list[PrefixHit | None]:
        """The hit that each count is based on; None for a sequence that has started."""
        names = [seq.request_id for seq, _ in work]
        if not names or len(set(names)) < len(names):
            raise SequenceError(f"sequences {names} given; expected one or more, each of them once")
        hits = [self._hit(seq) for seq, _ in work]
        limit = self.model.spec.max_position_embeddings
        for (seq, num_new), hit in zip(work, hits, strict=True):
            done = seq.num_computed_tokens + (hit.num_tokens if hit else 0)
            left = seq.num_tokens - done
            if not 1 <= num_new <= left:
                raise SequenceError(
                    f"{seq!r}: {num_new} tokens to compute given, expected 1 to {left}. Only a "
                    f"token that has no K and V yet gives logits: append() one first"
                )
            if limit is not None and done + num_new > limit:
                raise PromptTooLong(
                    f"{seq!r}: {num_new} tokens to compute given, but the model's positions end "
                    f"at {limit - 1}; expected at most {limit - done} more"
                )
        return hits

    def _hit(self, seq: Sequence) -> PrefixHit | None:
        """What the cache holds of a sequence that has not started; None once it has."""
        started = seq.request_id in self.manager.sequences
        return None if started else self.manager.match_prefix(seq)

    def prefill(self, seq: Sequence, chunk_size: int | None = None) -> torch.Tensor:
        """Compute all known tokens of seq but those in the prefix cache; the last row's logits.

        chunk_size   tokens per forward; all at once by default

        Raises SequenceError where no token is left to compute: every caller samples from the
        logits, and a sequence that is computed to its last token has none to give.
        """
        hit = self._hit(seq)
        done = seq.num_computed_tokens + (hit.num_tokens if hit else 0)
        while True:
            left = seq.num_tokens - done
            num_new = left if chunk_size is None else min(chunk_size, left)
            logits = self.forward([(seq, num_new)])[-1]
            done = seq.num_computed_tokens
            if done == seq.num_tokens:
                return logits

    def generate(
        self,
        prompt_ids: Seq[int],
        max_new_tokens: int,
        *,
        eos: int | Collection[int] | None = None,
        on_step: Callable[[Step], None] | None = None,
        chunk_size: int | None = None,
        **fields,
    ) -> list[int]:
        """Greedy decoding of one request, as generate.cached_generate. Releases its blocks.

        fields   of Sequence: adapter, cache_salt, prompt_logprobs ...
        """
        seq = self.sequence(prompt_ids, **fields)
        limit = self.model.spec.max_position_embeddings
        budget = max_outputs(limit, seq.num_tokens, max_new_tokens)
        stops = {eos} if isinstance(eos, int) else set(eos or ())
        if budget < 1:
            return []
        try:
            logits = self.prefill(seq, chunk_size)
            while True:
                seq.append(int(logits.argmax(-1)))
                if on_step:
                    known = seq.num_computed_tokens
                    fed = torch.tensor([[known - 1]])
                    t = seq.num_output_tokens - 1
                    on_step(Step(t, known, fed, logits, 1, seq.last_token_id))
                if seq.last_token_id in stops or seq.num_output_tokens == budget:
                    return seq.output_token_ids
                logits = self.forward([(seq, 1)])[-1]
        finally:
            self.manager.release(seq)


def paged_generate(
    model: Decoder,
    prompt_ids: Seq[int],
    max_new_tokens: int,
    *,
    block_size: int = 16,
    eos: int | Collection[int] | None = None,
    on_step: Callable[[Step], None] | None = None,
    chunk_size: int | None = None,
) -> list[int]:
    """Greedy decoding of one prompt over a pool that is just large enough."""
    prompt = prompt_of(model.spec, prompt_ids)
    limit = model.spec.max_position_embeddings
    num_tokens = len(prompt) + max(max_outputs(limit, len(prompt), max_new_tokens), 0)
    decoder = PagedDecoder(model, 2 + -(-num_tokens // block_size), block_size)
    return decoder.generate(prompt, max_new_tokens, eos=eos, on_step=on_step, chunk_size=chunk_size)
