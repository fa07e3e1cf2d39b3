"""The engine: schedule, prepare, execute, sample, update, and around again.

    engine = Engine(model, num_blocks=257)
    engine.add_request(prompt_ids, max_new_tokens=32)
    while engine.has_requests:
        step = engine.step()

Requests come and go between steps; none of them can tell that it was not alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from kvlab.batch import Batch, build_batch
from kvlab.blocks import BlockPool
from kvlab.errors import RequestError, whole
from kvlab.kernels import choose_backend
from kvlab.model import Decoder
from kvlab.paged import PagedAttention, PagedKVCache
from kvlab.request import Request, check_vocabulary, token_row
from kvlab.sampling import Proposer, Sampler, SamplingParams, Wanted
from kvlab.scheduler import Schedule, Scheduler, SchedulerConfig
from kvlab.tables import BlockManager

OnToken = Callable[[str, int], None]  # (request_id, token_id), as soon as it is sampled


class RequestOutput:
    """What a request has got so far: a view of its Request, which fills while the engine steps.

    Everything but token_ids is the request's own: output.finish_reason, output.num_preemptions,
    output.arrival and the rest, see kvlab.request.Request.
    """

    def __init__(self, request: Request) -> None:
        self.request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)

    @property
    def token_ids(self) -> list[int]:
        """Outputs so far, without the prompt."""
        return self.request.output_token_ids

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token: from arrival, so waiting counts. None before there is one."""
        first = self.request.first_token
        return None if first is None else first - self.request.arrival

    @property
    def time_per_output_token_seconds(self) -> float | None:
        """Mean time between outputs after the first; None with fewer than two."""
        first, last = self.request.first_token, self.request.last_token
        if first is None or last is None or self.request.num_output_tokens < 2:
            return None
        return (last - first) / (self.request.num_output_tokens - 1)


@dataclass(frozen=True)
class StepResult:
    """What one step did: its decisions, the batch that ran, the new tokens, and who is done."""

    schedule: Schedule
    batch: Batch
    new_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: list[RequestOutput] = field(default_factory=list)


class ModelRunner:
    """From a Batch of lists to logits: one model, its pool of K and V, one forward a step.

    The model sees [num_tokens] ids with their positions, and every weight is read once for all
    requests. Only attention knows who is who: through query_start_loc, seq_lens and block tables.

    num_blocks         blocks of the pool, the null block included
    attention, cache   which paged attention to run, over which cache
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        attention: type[PagedAttention] = PagedAttention,
        cache: type[PagedKVCache] = PagedKVCache,
    ) -> None:
        self.model, self.attention = model, attention
        self.cache = cache(model.spec, num_blocks, block_size, model.dtype, model.device)

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the rows that are sampled, [len(batch.logits_rows), vocab]."""
        attend = self.attention(
            self.model.spec,
            self.cache,
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
        )
        return self.model.forward(
            self._tensor(batch.token_ids),
            self._tensor(batch.positions),
            attend,
            rows=self._tensor(batch.logits_rows),
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)


class Engine:
    """Many requests on one model, one forward a step.

    model            the decoder; its context length bounds every request, and max_model_len
    num_blocks       blocks of the KV pool, the null block included
    block_size       tokens per block
    eos_token_id     ends a request, beside its own stop tokens; several may; None: nothing does
    proposer         guesses drafts from the text; None: one token a step
    attention        paged attention to decode with: a class, "torch", "triton", or None for what
                     kvlab.kernels chooses here
    pool, tables, scheduler, cache   classes to take in place of BlockPool, BlockManager, Scheduler
                     and PagedKVCache: another eviction rule, policy, format of K and V
    on_step          called with the StepResult of every step
    settings         fields of SchedulerConfig: max_num_batched_tokens=..., max_num_seqs=..., ...

    Settings that cannot work raise RequestError.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int = 513,
        block_size: int = 16,
        prefix_caching: bool = True,
        eos_token_id: int | Collection[int] | None = None,
        proposer: Proposer | None = None,
        attention: type[PagedAttention] | str | None = None,
        pool: type[BlockPool] = BlockPool,
        tables: type[BlockManager] = BlockManager,
        scheduler: type[Scheduler] = Scheduler,
        cache: type[PagedKVCache] = PagedKVCache,
        on_step: Callable[[StepResult], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **settings,
    ) -> None:
        self.model, self.clock, self.on_step = model, clock, on_step
        if proposer is not None and not callable(getattr(proposer, "propose", None)):
            raise RequestError(
                f"proposer={proposer!r}; expected an object with propose(token_ids, limit), such "
                f"as kvlab.sampling.NgramProposer(), or None"
            )
        self.proposer = proposer
        stops = [] if eos_token_id is None else eos_token_id
        is_row = isinstance(stops, Collection) and getattr(stops, "ndim", 1) > 0
        row = list(stops) if is_row else [stops]  # type: ignore[arg-type]
        self.stop_token_ids = self._tokens(row, "eos_token_id:")
        limit = context_limit(model, settings.get("max_model_len"))
        config = SchedulerConfig(**{**settings, "max_model_len": limit})
        manager = tables(pool(num_blocks, block_size), prefix_caching=prefix_caching)
        room, asked = manager.pool.num_usable_blocks * block_size, settings.get("max_model_len")
        if asked is not None and asked > room:
            raise RequestError(
                f"max_model_len={asked}; expected at most {room}, the tokens of {num_blocks} "
                f"blocks but the null block: make the pool larger, or max_model_len smaller"
            )
        self.scheduler = scheduler(manager, config)
        if attention is None or isinstance(attention, str):
            attention = choose_backend(str(model.device), attention).attention
        assert isinstance(attention, type), "a class, or a name that was looked up just now"
        self.runner = ModelRunner(model, num_blocks, block_size, attention, cache)
        self.sampler = Sampler()
        self._num_named = 0

    # -- requests -----------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        max_new_tokens: int = 16,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] = (),
        priority: float = 0,
        tags: tuple[tuple, ...] = (),
    ) -> RequestOutput:
        """Put a request in line; its RequestOutput fills while the engine steps.

        tags   what K and V depend on besides tokens: (("adapter", "X"),), (("salt", "Y"),)

        Raises a RequestError that names what is wrong; nobody else notices.
        """
        arrival = self.clock()
        for name, value, kind in (
            ("request_id", request_id, str), ("sampling", sampling, SamplingParams)
        ):  # fmt: skip
            if value is not None and not isinstance(value, kind):
                raise RequestError(f"{name}={value!r}; expected {kind.__name__}, or None")
        request = Request(
            self._free_name() if request_id is None else request_id,
            self._tokens(prompt_token_ids, "prompt"),
            max_new_tokens=max_new_tokens,
            stop_token_ids=(*self.stop_token_ids, *self._tokens(stop_token_ids, "stop")),
            priority=priority,
            arrival=arrival,
            sampling=sampling or SamplingParams(),
            tags=tags,
        )
        self.scheduler.add(request)
        return RequestOutput(request)

    def _tokens(self, tokens: object, what: str) -> list[int]:
        """A row of the model's own tokens, as a list."""
        row = token_row(tokens, what)
        check_vocabulary(row, self.model.spec.vocab_size, what)
        return row

    def _free_name(self) -> str:
        while True:
            name, self._num_named = f"request-{self._num_named}", self._num_named + 1
            if name not in self.scheduler.requests:
                return name

    def abort(self, request_id: str) -> RequestOutput:
        """Stop a request, waiting or running, and give its blocks back."""
        return RequestOutput(self.scheduler.abort(request_id))

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    # -- the step -----------------------------------------------------------------------

    def step(self) -> StepResult:
        """schedule -> prepare -> execute -> sample -> update, once.

        Whatever breaks a step off, a failure or Ctrl-C, no request loses a token or gains one:
        those that run give their blocks back and compute them again.
        """
        self._propose()
        try:
            schedule = self.scheduler.schedule()
            is_stuck = schedule.is_idle and schedule.reasons  # a loop until it is empty had no end
            assert not is_stuck, f"no request can move: {schedule.reasons}"
            batch = build_batch(schedule)
            sampled = {} if schedule.is_idle else self._execute(schedule, batch)
            new_tokens = self.scheduler.update(schedule, sampled, self.clock())
        except BaseException:
            self.scheduler.start_over()
            raise
        served = [entry.request for entry in schedule.scheduled]
        finished = [RequestOutput(request) for request in served if request.finish_reason]
        result = StepResult(schedule, batch, {k: v for k, v in new_tokens.items() if v}, finished)
        if self.on_step is not None:
            self.on_step(result)
        return result

    def _propose(self) -> None:
        """Guess on for every request that decodes, before its share is decided."""
        if self.proposer is None:
            return
        for request in self.scheduler.running:
            if request.num_uncomputed_tokens == 1 and not request.draft_token_ids:
                limit = request.num_outputs_left - 1
                drafts = self._tokens(self.proposer.propose(request.token_ids, limit), "draft")
                self.scheduler.set_drafts(request.request_id, drafts)

    def _execute(self, schedule: Schedule, batch: Batch) -> dict[str, list[int]]:
        """Run the batch and sample: the outputs of each request that reached its last token."""
        self.runner.cache.copy_blocks(schedule.block_copies)
        logits = self.runner.run(batch)
        wanted = [
            Wanted(
                entry.request_id,
                entry.request.sampling or SamplingParams(),
                entry.draft_token_ids,
                entry.request.num_output_tokens,
            )
            for entry in schedule.scheduled
            if entry.samples
        ]
        return self.sampler.sample(logits, wanted)

    # -- whole runs ---------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 16,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: OnToken | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, together, and return their outputs in the same order.

        max_new_tokens, sampling   one for all prompts, or one for each
        on_token    called with (request_id, token_id) for every token as it comes
        progress    a bar of finished requests on standard error; by default on a terminal only

        If a prompt is refused, or on_token raises, the prompts of this call are taken out again.
        """
        if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
            raise RequestError(
                f"the prompts are {prompts!r}; expected a list of lists of token ids"
            )
        prompts = list(prompts)
        limits = one_for_each(max_new_tokens, len(prompts))
        params = one_for_each(sampling, len(prompts))
        outputs: list[RequestOutput] = []
        hide = not (sys.stderr.isatty() if progress is None else progress)
        try:
            for prompt, limit, param in zip(prompts, limits, params, strict=True):
                outputs.append(self.add_request(prompt, max_new_tokens=limit, sampling=param))
            with tqdm(total=len(outputs), disable=hide, unit="request") as bar:
                for fresh in self._new_tokens(outputs):
                    if on_token is not None:
                        for request_id, token in fresh:
                            on_token(request_id, token)
                    bar.update(sum(output.finished for output in outputs) - bar.n)
        finally:
            self._abort_unfinished(outputs)
        return outputs

    def stream(self, prompt_token_ids: Sequence[int], **request) -> Iterator[int]:
        """Token after token of one request; others in line move along with it.

        Takes the arguments of add_request. Closing the iterator early aborts the request.
        """
        output = self.add_request(prompt_token_ids, **request)
        try:
            for fresh in self._new_tokens([output]):
                yield from (token for _, token in fresh)
        finally:
            self._abort_unfinished([output])

    def _new_tokens(self, outputs: Sequence[RequestOutput]) -> Iterator[list[tuple[str, int]]]:
        """Step until these are done; their new (request_id, token_id), whoever made the steps."""
        told = [0] * len(outputs)
        while True:
            fresh = []
            for i, output in enumerate(outputs):
                token_ids = output.token_ids
                fresh += [(output.request_id, token) for token in token_ids[told[i] :]]
                told[i] = len(token_ids)
            if fresh:
                yield fresh
            elif all(output.finished for output in outputs):
                return
            else:
                self.step()

    def _abort_unfinished(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished:  # a name alone may be somebody else's by now
                self.abort(output.request_id)


def one_for_each(value: object, count: int) -> list:
    """A setting for every prompt: the same for all, or one each. RequestError if not as many."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{len(value)} settings for {count} prompts; expected one for each")
    return list(value)


def context_limit(model: Decoder, asked: int | None) -> int | None:
    """max_model_len: as asked, or where the model's positions and its rotary table end.

    Raises RequestError where requests could grow past them.
    """
    ends = [model.spec.max_position_embeddings, model.rope.limit]
    limit = min((end for end in ends if end is not None), default=None)
    if asked is None:
        return limit
    if limit is not None and whole("max_model_len", asked, 1) > limit:
        raise RequestError(
            f"max_model_len={asked}; expected at most {limit}, the context length of "
            f"{model.spec.name}: its positions end there. Leave max_model_len out, or make it "
            f"smaller"
        )
    return asked
