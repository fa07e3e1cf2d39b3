"""The smallest inputs: the shortest run in which a fault shows, and what is measured in it.

    a contiguous run   run_tiny and what stands beside it: a tiny decoder over a cache
    a paged scene      (model) -> logits [rows, vocab] of the tokens that would suffer
    a kernel case      (query, keys, values, block tables, seq_lens) of one paged decode
    an engine run      seven prompts in a pool that is too small for all of them
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

from kvlab import costs
from kvlab.attention import UncachedAttention
from kvlab.blocks import BlockPool
from kvlab.cache import ContiguousKVCache
from kvlab.engine import Engine, StepResult
from kvlab.errors import KvlabError, OutOfBlocks
from kvlab.faults.drift import (
    cached_logits,
    checkpoint,
    compare,
    redeclared,
    right_logits,
    text_ids,
)
from kvlab.faults.registry import suspended
from kvlab.generate import PagedDecoder, padded_generate
from kvlab.kernels import reference as kernel_steps
from kvlab.kernels.reference import paged_decode_reference
from kvlab.model import Decoder
from kvlab.paged import PagedKVCache
from kvlab.request import Request
from kvlab.sampling import NgramProposer
from kvlab.scheduler import Scheduler
from kvlab.specs import LayerSpec, ModelSpec, RopeSpec
from kvlab.tables import BlockManager

# --- a contiguous run -------------------------------------------------------------------------


@cache
def tiny_model() -> Decoder:
    """Two layers, six query heads on two KV heads, seeded random weights: runs in milliseconds."""
    spec = ModelSpec(
        name="tiny", num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=16,
        intermediate_size=64, vocab_size=50, layers=(LayerSpec("full", 2, 16, 16),) * 2,
        tie_word_embeddings=True, max_position_embeddings=1024,
        rope=RopeSpec(10_000.0, 16),
    )  # fmt: skip
    return Decoder.random(spec)


def run_tiny(
    steps: int = 8, prompt_len: int = 6, rope: RopeSpec | None = None, **options: Any
) -> None:
    """`steps` decode steps of the tiny model; options of cached_logits."""
    ids = [(7 * i) % 50 for i in range(prompt_len + steps)]
    cached_logits(redeclared(tiny_model(), rope=rope), ids, prompt_len, **options)


def run_padded(steps: int = 8) -> None:
    """Two prompts of different lengths in one left-padded batch."""
    padded_generate(tiny_model(), [[1, 2, 3], [4, 5, 6, 7, 8]], steps)


def run_rollbacks(steps: int = 8) -> None:
    """3 tokens, a few of them dropped, a reset, as in the report; then the same after a run."""
    kv_cache = ContiguousKVCache(tiny_model().spec, 1, 6 + steps)
    for num_tokens in (0, 2, 5):
        run_tiny(steps=0, prompt_len=3, kv_cache=kv_cache)
        kv_cache.drop_last(num_tokens)
        kv_cache.reset()
    run_tiny(steps, kv_cache=kv_cache)
    kv_cache.reset()


def naive_kl() -> float:
    """Mean KL of the naive loop's rows against the right ones, on the laboratory's text."""
    model, ids = checkpoint().model, text_ids()[:64]
    every_row = model.forward(
        torch.tensor([ids]), torch.arange(64)[None], UncachedAttention(model.spec)
    )
    return compare(right_logits(model, ids, 48), every_row[0, 47:], ids[48:]).mean_kl


def padded_kl() -> float:
    """Mean KL of the shorter row of a left-padded batch against the same prompt alone."""
    model, ids = checkpoint().model, text_ids()
    short, following = ids[:24], ids[24:40]
    with suspended():
        alone = cached_logits(model, short + following, len(short))
    rows: list[torch.Tensor] = []
    padded_generate(
        model, [short, ids[:40]], len(following) + 1, forced=[following, following],
        on_step=lambda logits: rows.append(logits[0]),
    )  # fmt: skip
    return compare(alone, torch.stack(rows), following).mean_kl


def second_conversation_kl() -> float:
    """Mean KL of a second text on a cache that was reset, against the same text alone."""
    model, ids = checkpoint().model, text_ids()
    kv_cache = ContiguousKVCache(model.spec, 1, 160)
    cached_logits(model, ids[:48], 48, kv_cache=kv_cache)
    kv_cache.reset()
    second = ids[200:249]
    now = cached_logits(model, second[:48], 32, kv_cache=kv_cache)
    return compare(right_logits(model, second[:48], 32), now, second[32:]).mean_kl


def excess_bytes() -> float:
    """Allocated bytes over planned bytes, minus one, for the checkpoint's cache."""
    spec = checkpoint().spec
    return ContiguousKVCache(spec, 1, 64).nbytes / costs.kv_bytes(spec, 64, 4) - 1


# --- paged scenes -----------------------------------------------------------------------------

#: A scene: model -> logits [rows, vocab]
Scene = Callable[[Decoder], torch.Tensor]


def _ids(model: Decoder, start: int, stop: int) -> list[int]:
    """Real text for the checkpoint, some numbers for a tiny model."""
    if model.spec.vocab_size > 1000:
        return list(text_ids()[start:stop])
    return [(7 * i + i // 5) % min(50, model.spec.vocab_size) for i in range(start, stop)]


def _go_on(decoder: PagedDecoder, *tokens_of: tuple[Request, list[int]]) -> list[torch.Tensor]:
    """The next tokens of each sequence in turn, one a forward: the logits after each."""
    rows = []
    for tokens in zip(*(tokens for _, tokens in tokens_of), strict=True):
        for (seq, _), token in zip(tokens_of, tokens, strict=True):
            seq.append(token)
            rows.append(decoder.forward([(seq, 1)])[-1])
    return rows


def sharer_outlives_owner(model: Decoder) -> torch.Tensor:
    """B shares A's blocks; A ends; C arrives and must wait for room; B goes on."""
    decoder = PagedDecoder(model, 8, 4)
    first, second = decoder.request(_ids(model, 0, 13)), decoder.request(_ids(model, 0, 14))
    decoder.prefill(first)
    decoder.prefill(second)
    decoder.manager.release(first)
    with suppress(OutOfBlocks):  # 3 blocks are free, C needs 6
        decoder.prefill(decoder.request(_ids(model, 40, 64)))
    return torch.stack(_go_on(decoder, (second, _ids(model, 14, 16))))


def twins(model: Decoder) -> torch.Tensor:
    """Two equal prompts in one step: the last row of each."""
    decoder = PagedDecoder(model, 24, 4)
    work = []
    for seq in [decoder.request(_ids(model, 0, 14)) for _ in range(2)]:
        # as a scheduler does: look up and make room for all, then run
        num_new = seq.num_tokens - decoder.manager.match_prefix(seq).num_tokens
        decoder.cache.copy_blocks(decoder.manager.start(seq, num_new))
        work.append((seq, num_new))
    return decoder.forward(list(reversed(work)))  # the reader's row comes before the writer's


def reused_block(model: Decoder) -> torch.Tensor:
    """X, then Y in the same four blocks, then X again."""
    decoder = PagedDecoder(model, 5, 4)
    decoder.generate(_ids(model, 0, 13), 1)
    decoder.generate(_ids(model, 40, 56), 1)
    return decoder.prefill(decoder.request(_ids(model, 0, 13)))[None]


def forks(model: Decoder) -> torch.Tensor:
    """Two copies of one sequence go on with different tokens."""
    decoder = PagedDecoder(model, 16, 4)
    parent = decoder.request(_ids(model, 0, 7))
    decoder.prefill(parent)
    child = decoder.manager.fork(parent, "fork")
    return torch.stack(_go_on(decoder, (parent, _ids(model, 7, 10)), (child, _ids(model, 30, 33))))


def small_blocks(model: Decoder) -> torch.Tensor:
    """A prompt and three decode steps over blocks of 8."""
    decoder = PagedDecoder(model, 40, 8)
    seq = decoder.request(_ids(model, 0, 20))
    return torch.stack([decoder.prefill(seq), *_go_on(decoder, (seq, _ids(model, 20, 23)))])


def repeated(scene: Scene) -> Callable[[int], None]:
    """run(steps): the scene on a tiny model, over and over for about `steps` steps."""

    def run(steps: int = 8) -> None:
        for _ in range(max(1, steps // 8)):
            scene(tiny_model())

    return run


def kl_of(scene: Scene) -> Callable[[], float]:
    """measure(): KL of the scene on the checkpoint, as it is now against as it should be."""

    def measure() -> float:
        model = checkpoint().model
        with suspended():
            right = scene(model)
        return compare(right, scene(model), right.argmax(-1).tolist()).mean_kl

    return measure


def slots_overwritten() -> float:
    """Slots that changed although no row was meant for them: 8 blocks of 16, slots [3, -1]."""
    spec = tiny_model().spec
    kv_cache = PagedKVCache(spec, 8, 16)
    kv_cache.key_cache(0).fill_(9.0)
    rows = torch.ones(2, spec.num_kv_heads, spec.head_dim)
    kv_cache.write(0, rows, rows, [3, -1])
    changed = (kv_cache.key_cache(0).flatten(0, 1) != 9.0).any(-1).any(-1)
    return float(changed.sum() - 1)


def empty_blocks_shared() -> float:
    """Block 16, 16 tokens computed, room for one more reserved: blocks of a fork without tokens."""
    manager = BlockManager(BlockPool(4, 16))
    parent = Request("parent", list(range(16)))
    manager.start(parent, 16)
    manager.mark_computed(parent, 16)
    manager.grow(parent, 1)
    return float(len(manager.fork(parent, "fork").block_table) - 1)


def foreign_hit_tokens() -> float:
    """Tokens that salt "X" finds of what adapter "X" computed; must be 0."""
    manager = BlockManager(BlockPool(8, 4))
    first = Request("adapter", list(range(9)), tags=(("adapter", "X"),))
    manager.start(first, 9)
    manager.mark_computed(first, 9)
    second = Request("salt", list(range(9)), tags=(("salt", "X"),))
    return float(manager.match_prefix(second).num_tokens)


def hit_rate_of_a_lonely_request() -> float:
    """One request of 64 tokens, preempted once and resumed; the rate must be 0."""
    manager = BlockManager(BlockPool(8, 16))
    seq = Request("lonely", list(range(64)))
    manager.start(seq, 64)
    manager.mark_computed(seq, 64)
    seq.append(64)
    manager.preempt(seq)
    manager.start(seq, 1)
    return manager.stats.hit_rate


# --- kernel cases -----------------------------------------------------------------------------

#: query, keys, values, block tables, seq_lens
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case_of(*seq_lens: int, unwritten: float = 0.0) -> Case:
    """4 heads on 2, d 8, block 4, blocks 1, 2, ... in turn; other slots hold `unwritten`."""
    generator = torch.Generator().manual_seed(5)
    needed = [-(-n // 4) for n in seq_lens]
    tables = torch.zeros(len(seq_lens), max(needed) + 1, dtype=torch.int32)
    caches = torch.full((2, sum(needed) + 2, 4, 2, 8), unwritten)
    block = 0
    for row, seq_len in enumerate(seq_lens):
        for position in range(seq_len):
            block += position % 4 == 0
            tables[row, position // 4] = block
            caches[:, block, position % 4] = torch.randn(2, 2, 8, generator=generator)
    query = torch.randn(len(seq_lens), 4, 8, generator=generator)
    return query, caches[0], caches[1], tables, torch.tensor(seq_lens)


def fused_case() -> Case:
    """The case of 9 tokens, with K and V as slices of one buffer, as a fused projection leaves."""
    query, keys, values, tables, lens = case_of(9)
    buffer = torch.cat((keys, keys + 1, values), dim=2)  # heads 0-1 are K, 4-5 are V
    return query, buffer[:, :, :2], buffer[:, :, 4:], tables, lens


def huge_scores_case() -> Case:
    """Equal scores of 90,510: more than fp16 holds. Softmax must give every key the same weight."""
    query, keys, values, tables, lens = case_of(6)
    return query.fill_(256.0), keys.fill_(125.0), values, tables, lens


def kernel_error(make: Callable[[], Case]) -> float:
    """Largest difference of the kernel's steps from float64; infinity where it is not a number."""
    case = make()
    out, right = kernel_steps.paged_decode_torch(*case)[0], paged_decode_reference(*case)[0]
    wrong = (out - right).abs().max().item()
    return wrong if math.isfinite(wrong) else math.inf


def wrapped_offset() -> float:
    """Offset of block 65,536 over what it should be, minus one, without sign.

    The blocks are Llama-3-8B's with K and V packed: 16 tokens, 2, 8 heads, 128.
    """
    block, elements = torch.tensor([65_536]), 16 * 2 * 8 * 128
    offset = kernel_steps.kv_offset(block, torch.zeros_like(block), 0, (elements, 2048, 128))
    return abs(int(offset) / (65_536 * elements) - 1)


def foreign_block_error() -> float:
    """0 if a table that names a block past the pool is refused; else how far the answer is off."""
    query, keys, values, tables, lens = case_of(16)
    right, _ = paged_decode_reference(query, keys, values, tables, lens)
    try:
        out, _ = kernel_steps.paged_decode_torch(
            query, keys[:4], values[:4], tables.where(tables != 3, 5), lens
        )
    except KvlabError:
        return 0.0
    return (out - right).abs().max().item()


# --- engine runs ------------------------------------------------------------------------------

#: Seven prompts of different lengths; the pool of `crowded` holds about three of them.
PROMPTS = tuple(tuple((7 * i + 3 * j) % 50 for j in range(6 + 3 * i)) for i in range(7))


def crowded(num_blocks: int = 22, drafts: bool = True) -> tuple[list[StepResult], Engine]:
    """Run the prompts on the tiny model in a pool that is too small for all; step by step."""
    engine = Engine(
        tiny_model(), num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16,
        proposer=NgramProposer() if drafts else None,
    )  # fmt: skip
    results = []
    for prompt in PROMPTS:
        engine.add_request(prompt, max_new_tokens=12)
    while engine.has_requests:
        results.append(engine.step())
    return results, engine


def delivered(**options) -> dict[str, list[int]]:
    """The tokens of each request of the crowded run, as the steps handed them out."""
    tokens: dict[str, list[int]] = {}
    for result in crowded(**options)[0]:
        for request_id, fresh in result.new_tokens.items():
            tokens.setdefault(request_id, []).extend(fresh)
    return tokens


def run_engine(steps: int = 8) -> None:
    """The crowded run, over and over for a long watch, then light requests passing."""
    for _ in range(max(steps // 40, 1)):
        crowded()
    steps_at_the_head()


class PassThree(Scheduler):
    """Three lighter requests may pass the first one."""

    max_head_skips = 3

    def may_pass(self, head: Request) -> bool:
        return head.num_skips < self.max_head_skips


def steps_at_the_head() -> float:
    """A heavy request at the head while light ones keep coming; how long it stood there."""
    engine = Engine(
        tiny_model(), num_blocks=15, block_size=4, max_num_batched_tokens=64, prefix_caching=False,
        enable_chunked_prefill=False, scheduler=PassThree, max_num_seqs=4,
    )  # fmt: skip
    engine.add_request(list(range(12)), max_new_tokens=4)
    engine.step()
    engine.add_request(list(range(50)), request_id="heavy", max_new_tokens=2)
    heavy = engine.scheduler.requests["heavy"]
    for number in range(30):
        engine.add_request([number, 1, 2, 3, 4, 5], max_new_tokens=3)
        engine.step()
    while engine.has_requests:
        engine.step()
    return float(heavy.head_delay)


def wrong_share(**options) -> float:
    """Share of requests whose greedy outputs differ from running alone."""
    with suspended():
        right = delivered(num_blocks=200, drafts=False)
    try:
        got = delivered(**options)
    except Exception:  # a fault may also end in an error: nothing right came out
        return 1.0
    return sum(got[request_id] != tokens for request_id, tokens in right.items()) / len(right)


#: The same without drafts.
wrong_share_undrafted = partial(wrong_share, drafts=False)


def budget_ratio() -> float:
    """Most tokens in one step over the budget."""
    made = [result.schedule for result in crowded()[0]]
    return max(each.num_scheduled_tokens / each.budget for each in made)


def false_hits() -> float:
    """Tokens reported as prefix hits although no two prompts share a block."""
    _, engine = crowded(drafts=False)
    return float(engine.scheduler.stats.num_cached_tokens)


def later_ones_first() -> float:
    """Requests that got their last token before an earlier one of the same length did."""
    done = []
    engine = Engine(tiny_model(), num_blocks=12, block_size=4, max_num_batched_tokens=64)
    for index in range(5):
        engine.add_request([index + j for j in range(9)], request_id=str(index), max_new_tokens=16)
    while engine.has_requests:
        done += [int(output.request_id) for output in engine.step().finished]
    return float(sum(a > b for a, b in pairwise(done)))
