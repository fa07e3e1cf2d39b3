"""The greedy loops, one chapter after the other: all of them write the same text.

    naive    step t feeds all s = p + t tokens and keeps the last row of logits        chapter 1
    cached   step t feeds one token, at position s - 1, and reads the rest from a cache         2
    padded   the same for several prompts in one rectangle, filled up on the left               4
    paged    the same over blocks that requests share, before there is a scheduler              5

Convention: prefill samples the first output; each decode forward samples one more. So n
forwards after prefill give n + 1 outputs, and the last output is never fed back.

Context length: a model with max_position_embeddings = C has positions 0 .. C - 1, and no
forward goes past C - 1. The last output needs no forward of its own, so a prompt of p tokens
yields at most C - p + 1 outputs; a loop asked for more stops there. (An engine that counts
the last output too, as vLLM does with max_model_len, gives C - p.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from kvlab.attention import CachedAttention, UncachedAttention, layer_windows
from kvlab.blocks import BlockPool, blocks_for
from kvlab.cache import ContiguousKVCache
from kvlab.errors import CacheError, RequestError, whole
from kvlab.model import Attend, Decoder
from kvlab.paged import PagedAttention, PagedKVCache
from kvlab.request import Request, check_vocabulary, token_row
from kvlab.rope import next_positions, padded_positions
from kvlab.specs import ModelSpec
from kvlab.tables import BlockManager, PrefixHit


@dataclass(frozen=True)
class Step:
    """What one forward did. t = 0 is the prefill, t = 1, 2, ... the decode steps.

    seq_len    s, tokens known to the model in this forward
    positions  [1, q] of the tokens that were fed
    logits     [vocab], the row that was sampled from
    num_rows   rows of logits computed; all but one are thrown away
    token_id   the sampled token, which the next forward feeds
    """

    t: int
    seq_len: int
    positions: torch.Tensor
    logits: torch.Tensor
    num_rows: int
    token_id: int


def prompt_of(spec: ModelSpec, prompt_ids: Sequence[int]) -> list[int]:
    """The prompt as a list of its own. Raises RequestError unless it is a row of spec's tokens."""
    tokens = token_row(prompt_ids)
    check_vocabulary(tokens, spec.vocab_size)
    limit = spec.max_position_embeddings
    if not tokens or (limit is not None and len(tokens) > limit):
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; expected between 1 and the model's context "
            f"length of {limit}"
        )
    return tokens


def max_outputs(context_length: int | None, prompt_len: int, max_new_tokens: int) -> int:
    """Outputs a loop may produce: the last one is never fed back, so it needs no position."""
    budget = whole("max_new_tokens", max_new_tokens)
    return budget if context_length is None else min(budget, context_length - prompt_len + 1)


def stops_of(eos: int | Collection[int] | None) -> frozenset[int]:
    """The ids that end a run: none, one or several."""
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, Collection) else frozenset({eos})


@torch.inference_mode()
def naive_generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    eos: int | Collection[int] | None = None,
    on_step: Callable[[Step], None] | None = None,
    attend: Attend | None = None,
) -> list[int]:
    """Greedy decoding with no cache: one full forward, and all its rows of logits, per token.

    eos      one id or several that end the run (the id itself is returned too)
    on_step  called after every forward
    attend   in place of UncachedAttention, to count or to break something

    Returns the output ids, without the prompt.
    """
    prompt = prompt_of(model.spec, prompt_ids)
    budget = max_outputs(model.spec.max_position_embeddings, len(prompt), max_new_tokens)
    stops, outputs = stops_of(eos), []
    attend = attend or UncachedAttention(model.spec)
    tokens = torch.tensor([prompt], device=model.device)
    for t in range(budget):
        seq_len = tokens.shape[1]
        positions = torch.arange(seq_len, device=model.device).view(1, -1)
        logits = model.forward(tokens, positions, attend)  # [1, s, vocab]
        token = logits[:, -1].argmax(-1, keepdim=True)
        outputs.append(int(token))
        if on_step:
            on_step(Step(t, seq_len, positions, logits[0, -1], logits.shape[1], outputs[-1]))
        if outputs[-1] in stops:
            break
        tokens = torch.cat((tokens, token), dim=1)
    return outputs


@torch.inference_mode()
def cached_generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    eos: int | Collection[int] | None = None,
    on_step: Callable[[Step], None] | None = None,
    cache: ContiguousKVCache | None = None,
    chunk_size: int | None = None,
) -> list[int]:
    """Greedy decoding with a KV cache: the prompt once, then one token per forward.

    cache       an empty one to fill; by default one is allocated for exactly this run. A cache
                that already holds a prefix of the prompt is continued from there.
    chunk_size  feed the prompt in pieces of this many tokens; all at once by default

    Other arguments and the result are those of naive_generate. Nothing is allocated per step
    but the step's own activations: no mask, no positions, no copy of the cache.
    """
    prompt = prompt_of(model.spec, prompt_ids)
    prompt_len = len(prompt)
    budget = max_outputs(model.spec.max_position_embeddings, prompt_len, max_new_tokens)
    chunk = prompt_len if chunk_size is None else whole("chunk_size", chunk_size, 1, CacheError)
    if budget < 1:
        return []
    total = prompt_len + budget - 1  # the last output is never fed
    if cache is None:
        cache = ContiguousKVCache(model.spec, 1, total, model.dtype, model.device)
    elif len(cache.keys) != model.spec.num_layers or cache.dtype not in (None, model.dtype):
        raise CacheError(
            f"a cache of {len(cache.keys)} layers in {cache.dtype} given; expected the model's "
            f"{model.spec.num_layers} layers in {model.dtype}: make it from the model's spec"
        )
    attend, stops, outputs = CachedAttention(model.spec, cache), stops_of(eos), []
    positions = torch.arange(total, device=model.device).view(1, -1)
    tokens = torch.tensor([prompt], device=model.device)
    start = min(cache.length, prompt_len - 1)  # one token at least must be fed to sample from
    if cache.length > start:
        cache.truncate_to(start)
    while True:
        if start < prompt_len:
            stop = min(start + chunk, prompt_len)
            fed = tokens[:, start:stop]
        else:
            stop, fed = start + 1, tokens
        logits = model.forward(fed, positions[:, start:stop], attend, rows="last")  # [1, vocab]
        cache.advance(stop - start)
        start = stop
        if stop < prompt_len:
            continue
        tokens = logits.argmax(-1, keepdim=True)  # [1, 1], fed to the next forward as it is
        outputs.append(int(tokens))
        if on_step:
            where = positions[:, stop - fed.shape[1] : stop]
            on_step(Step(len(outputs) - 1, stop, where, logits[0], 1, outputs[-1]))
        if outputs[-1] in stops or len(outputs) == budget:
            return outputs


# --- several prompts in one rectangle -----------------------------------------------------------


def left_pad(
    prompts: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids and attention_mask, both [batch, longest]; the mask is 0 where padding stands."""
    if not prompts:
        raise RequestError("no prompt given; expected at least one: an empty batch has no shape")
    longest = max(len(prompt) for prompt in prompts)
    missing = [longest - len(prompt) for prompt in prompts]
    ids = [[pad_id] * gap + list(prompt) for gap, prompt in zip(missing, prompts, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in missing]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class PaddedAttention:
    """The `attend` of a padded batch: no query reads a padded key.

    mask  [batch, columns so far], 1 for a real token; the loop makes it one column wider a step
    """

    def __init__(self, spec: ModelSpec, cache: ContiguousKVCache, mask: torch.Tensor) -> None:
        self.cache, self.mask = cache, mask
        self.windows = layer_windows(spec)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [b, q, h, d], key and value [b, q, h_kv, d] -> [b, q, h, d]."""
        self.cache.write(layer, key, value)
        keys, values = self.cache.read(layer)
        columns = torch.arange(keys.shape[2], device=keys.device)
        queries = columns[-query.shape[1] :, None]
        seen = (columns <= queries) & self.mask[:, None, :].bool()
        window = self.windows[layer]
        if window is not None:  # it counts a row's own tokens: padding may stand between them
            positions = padded_positions(self.mask)
            seen &= positions[:, None, :] > positions[:, -query.shape[1] :, None] - window
        # A padded query sees only itself: its output is never used, but must not be 0/0.
        seen |= columns == queries
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=seen[:, None], enable_gqa=True
        )
        return out.transpose(1, 2)


@torch.inference_mode()
def padded_generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    forced: Sequence[Sequence[int]] | None = None,
    on_step: Callable[[torch.Tensor], None] | None = None,
) -> list[list[int]]:
    """Greedy decoding of several prompts in one left-padded batch.

        row 0:  .  .  the cat  sat        mask 0 0 1 1 1     positions - - 0 1 2, then 3
        row 1: one day the cat sat        mask 1 1 1 1 1     positions 0 1 2 3 4, then 5

    Padding on the left puts every row's last token in the last column, so one step decodes all
    rows. The price: padded columns are stored and read, and each row needs its own positions.

    forced   per prompt, tokens to feed instead of the sampled ones (to compare two runs)
    on_step  called with the logits [batch, vocab] of every forward

    Returns max_new_tokens ids per prompt, or fewer for a prompt that reaches the model's context
    length: each row stops where cached_generate would stop. Its later columns are padding too.
    """
    limit = model.spec.max_position_embeddings
    prompts = [prompt_of(model.spec, prompt) for prompt in prompts]
    budgets = [max_outputs(limit, len(prompt), max_new_tokens) for prompt in prompts]
    token_ids, mask = left_pad(prompts, device=model.device)
    num_steps = max(budgets)
    if num_steps < 1:
        return [[] for _ in prompts]
    columns = token_ids.shape[1] + num_steps - 1
    cache = ContiguousKVCache(model.spec, len(prompts), columns, model.dtype, model.device)
    attend = PaddedAttention(model.spec, cache, mask)
    positions = padded_positions(mask)
    outputs: list[torch.Tensor] = []
    for step in range(num_steps):
        logits = model.forward(token_ids, positions, attend, rows="last").view(len(prompts), -1)
        cache.advance(token_ids.shape[1])
        token_ids = logits.argmax(-1, keepdim=True)
        outputs.append(token_ids)
        if on_step:
            on_step(logits)
        if forced is not None and step < num_steps - 1:
            token_ids = torch.tensor([[row[step]] for row in forced], device=model.device)
        positions = next_positions(attend.mask)
        going_on = positions.new_tensor([[step < budget - 1] for budget in budgets])
        positions = positions - 1 + going_on  # a row that has ended stays at its last position
        attend.mask = torch.cat((attend.mask, going_on), dim=1)
    rows = torch.cat(outputs, dim=1).tolist()
    return [row[:budget] for row, budget in zip(rows, budgets, strict=True)]


# --- over blocks ------------------------------------------------------------------------------


class PagedDecoder:
    """A model with a paged cache and the tables over it.

    num_blocks   blocks of the pool, the null block included
    manager      the class of its block tables
    options      of BlockManager: prefix_caching

    One forward is: make room (BlockManager.grow), do the block copies it asks for, write K and V
    by slot, read them by block table, and only then count the tokens as computed. Where all layers
    slide by one window, blocks outside it are given back.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        layout: str = "NHD",
        manager: type[BlockManager] = BlockManager,
        **options,
    ) -> None:
        self.model = model
        windows = set(layer_windows(model.spec))
        window = windows.pop() if len(windows) == 1 else None
        pool = BlockPool(num_blocks, block_size)
        self.manager = manager(pool, sliding_window=window, **options)
        self.cache = PagedKVCache(
            model.spec, num_blocks, block_size, model.dtype, model.device, layout
        )
        self.num_requests = 0
        self.num_tokens_computed = 0

    def request(self, prompt_ids: Sequence[int], **fields) -> Request:
        """A new request, with a name of its own. Its prefix is looked up at the first forward."""
        prompt = prompt_of(self.model.spec, prompt_ids)
        self.num_requests += 1
        return Request(f"request {self.num_requests}", prompt, **fields)

    @torch.inference_mode()
    def forward(
        self, work: Sequence[tuple[Request, int]], *, all_rows: bool = False
    ) -> torch.Tensor:
        """Compute the next tokens of some requests in one ragged batch.

        work       (request, number of its tokens to compute)
        all_rows   logits of every row, [tokens, vocab], instead of one row per request

        A request that has not started is started here, so its count is of the tokens after the
        prefix hit. Raises RequestError before anything at all for a count that is not 1 to the
        tokens left; OutOfBlocks before anything of the failing request is touched; BlockError
        where making room for one evicted what another was to reuse: count again.
        """
        hits = self._check(work)
        device = self.model.device
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for (request, num_new), hit in zip(work, hits, strict=True):
            if hit is None:
                copies = self.manager.grow(request, num_new)
            else:
                copies = self.manager.start(request, num_new, hit)
            self.cache.copy_blocks(copies)
            start = request.num_computed_tokens
            tokens += request.token_ids[start : start + num_new]
            positions += range(start, start + num_new)
            slots += self.manager.slot_mapping(request, start, start + num_new)
        ends = [0, *accumulate(num_new for _, num_new in work)]
        attend = PagedAttention(
            self.model.spec,
            self.cache,
            slot_mapping=slots,
            block_tables=[request.block_table for request, _ in work],
            seq_lens=[request.num_computed_tokens + num_new for request, num_new in work],
            query_start_loc=ends,
        )
        logits = self.model.forward(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            attend,
            rows=None if all_rows else torch.tensor([end - 1 for end in ends[1:]], device=device),
        )
        for request, num_new in work:
            self.manager.mark_computed(request, num_new)
        self.num_tokens_computed += ends[-1]
        return logits

    def _check(self, work: Sequence[tuple[Request, int]]) -> list[PrefixHit | None]:
        """The hit that each count is based on; None for a request that has started."""
        names = [request.request_id for request, _ in work]
        assert names and len(set(names)) == len(names), f"requests {names}: each of them once"
        hits = [self._hit(request) for request, _ in work]
        limit = self.model.spec.max_position_embeddings
        for (request, num_new), hit in zip(work, hits, strict=True):
            done = request.num_computed_tokens + (hit.num_tokens if hit else 0)
            most = min(request.num_tokens, limit or request.num_tokens) - done
            if not 1 <= num_new <= most:
                raise RequestError(
                    f"{request!r}: {num_new} tokens to compute given, expected 1 to {most}. Only a "
                    f"token that has no K and V yet gives logits: append() one first; the model's "
                    f"positions end at {limit}"
                )
        return hits

    def _hit(self, request: Request) -> PrefixHit | None:
        """What the cache holds of a request that has not started; None once it has."""
        started = request.request_id in self.manager.requests
        return None if started else self.manager.match_prefix(request)

    def prefill(self, request: Request, chunk_size: int | None = None) -> torch.Tensor:
        """Compute all known tokens but those in the prefix cache; the last row's logits.

        chunk_size   tokens per forward; all at once by default

        Raises RequestError where no token is left to compute: every caller samples from the
        logits, and a request that is computed to its last token has none to give.
        """
        hit = self._hit(request)
        done = request.num_computed_tokens + (hit.num_tokens if hit else 0)
        while True:
            left = request.num_tokens - done
            num_new = left if chunk_size is None else min(chunk_size, left)
            logits = self.forward([(request, num_new)])[-1]
            done = request.num_computed_tokens
            if done == request.num_tokens:
                return logits

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        eos: int | Collection[int] | None = None,
        on_step: Callable[[Step], None] | None = None,
        chunk_size: int | None = None,
        **fields,
    ) -> list[int]:
        """Greedy decoding of one request, as generate.cached_generate. Releases its blocks.

        fields   of Request: tags, prompt_logprobs ...
        """
        request = self.request(prompt_ids, **fields)
        limit = self.model.spec.max_position_embeddings
        budget = max_outputs(limit, request.num_tokens, max_new_tokens)
        stops = stops_of(eos)
        if budget < 1:
            return []
        try:
            logits = self.prefill(request, chunk_size)
            while True:
                request.append(int(logits.argmax(-1)))
                if on_step:
                    known = request.num_computed_tokens
                    fed = torch.tensor([[known - 1]], device=self.model.device)
                    t = request.num_output_tokens - 1
                    on_step(Step(t, known, fed, logits, 1, request.token_ids[-1]))
                if request.token_ids[-1] in stops or request.num_output_tokens == budget:
                    return request.output_token_ids
                logits = self.forward([(request, 1)])[-1]
        finally:
            self.manager.release(request)


def paged_generate(
    model: Decoder,
    prompt_ids: Sequence[int],
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
    decoder = PagedDecoder(model, 2 + blocks_for(num_tokens, block_size), block_size)
    return decoder.generate(prompt, max_new_tokens, eos=eos, on_step=on_step, chunk_size=chunk_size)
