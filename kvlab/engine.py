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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from tqdm import tqdm

from kvlab import engine_inputs as inputs
from kvlab.batch import build_batch
from kvlab.block_tables import BlockManager
from kvlab.blocks import BlockPool
from kvlab.drafts import NgramProposer
from kvlab.engine_interrupts import interrupts_held
from kvlab.engine_outputs import RequestOutput, StepResult, new_tokens, raise_if_stuck
from kvlab.engine_runner import ModelRunner
from kvlab.model import Decoder
from kvlab.paged_attention import PagedAttention
from kvlab.policy import SchedulerConfig
from kvlab.request import Request
from kvlab.sampling import Sampler, SamplingParams, Wanted
from kvlab.schedule import Schedule
from kvlab.scheduler import Scheduler
from kvlab.trace import add_outputs, step_record

OnToken = Callable[[str, int], None]  # (request_id, token_id), as soon as it is sampled


class Engine:
    """Many requests on one model, one forward a step.

    model            the decoder; its context length bounds every request, and max_model_len
    num_blocks       blocks of the KV pool, the null block included
    block_size       tokens per block
    eos_token_id     ends a request, beside its own stop tokens; several may; None: nothing does
    proposer         guesses drafts from the text; None: one token a step
    attention        paged attention to decode with; by default what kvlab.backends chooses here
    keep_trace       keep a record of every step in .trace (plain values, see kvlab.trace)
    settings         fields of SchedulerConfig: max_num_batched_tokens=..., admission=..., ...
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int = 513,
        block_size: int = 16,
        prefix_caching: bool = True,
        full_hit: str = "block",
        eos_token_id: int | Collection[int] | None = None,
        proposer: NgramProposer | None = None,
        attention: type[PagedAttention] | None = None,
        keep_trace: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        **settings,
    ) -> None:
        config = inputs.within_context(SchedulerConfig(**settings), model.spec)
        self.model, self.proposer, self.clock = model, proposer, clock
        self.stop_token_ids = inputs.stop_tokens(eos_token_id, model.spec.vocab_size)
        pool = BlockPool(num_blocks, block_size)
        manager = BlockManager(pool, prefix_caching=prefix_caching, full_hit=full_hit)
        self.scheduler = Scheduler(manager, config)
        self.runner = ModelRunner(model, num_blocks, block_size, attention)
        self.sampler = Sampler()
        self.trace: list[dict] | None = [] if keep_trace else None
        self._live: dict[str, RequestOutput] = {}
        self._sampling: dict[str, SamplingParams] = {}
        self._owed_copies: list[tuple[int, int]] = []  # of this step, and of steps that failed
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
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Put a request in line; its RequestOutput fills while the engine steps.

        Raises a RequestError or SequenceError that names what is wrong; nobody else notices.
        """
        prompt, arrival = inputs.token_list(prompt_token_ids), self.clock()
        vocab_size = self.model.spec.vocab_size
        inputs.check_tokens(prompt, vocab_size)
        inputs.check_fields(request_id, sampling, stop_token_ids, adapter, cache_salt, vocab_size)
        request_id = self._free_name() if request_id is None else request_id
        request = Request(
            request_id,
            prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=(*self.stop_token_ids, *stop_token_ids),
            priority=priority,
            adapter=adapter,
            cache_salt=cache_salt,
        )
        output = RequestOutput(request_id, prompt, arrival=arrival)
        with interrupts_held():
            self.scheduler.add(request)
            self._live[request_id] = output
            self._sampling[request_id] = sampling or SamplingParams()
        return output

    def _free_name(self) -> str:
        while True:
            name, self._num_named = f"request-{self._num_named}", self._num_named + 1
            if name not in self._live:
                return name

    @interrupts_held()
    def abort(self, request_id: str) -> RequestOutput:
        """Stop a request, waiting or running, and give its blocks back."""
        return self._finish(self.scheduler.abort(request_id))

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    # -- the step -----------------------------------------------------------------------

    def step(self) -> StepResult:
        """schedule -> prepare -> execute -> sample -> update, once.

        If it raises, no request has gained or lost a token: the next step does the same again.
        An interrupt waits while decisions and results are booked, and leaves the step done or not.
        """
        self._propose()
        with interrupts_held():
            schedule = self.scheduler.schedule()
            self._owed_copies += schedule.block_copies
        raise_if_stuck(schedule)
        batch = build_batch(schedule)
        record = None if self.trace is None else step_record(schedule, batch, self.scheduler)
        sampled: dict[str, list[int]] = {}
        if not schedule.is_idle:
            self.runner.cache.copy_blocks(self._owed_copies)
            logits = self.runner.run(batch)
            sampled = self.sampler.sample(logits, self._wanted(schedule))
        now = self.clock()  # all that can fail comes before update(), which counts the tokens
        with interrupts_held():
            kept = self.scheduler.update(schedule, sampled)
            result = StepResult(schedule, *self._deliver(schedule, kept, now))
            if self.trace is not None and record is not None:
                add_outputs(record, result.new_tokens)
                self.trace.append(record)
        return result

    def _propose(self) -> None:
        """Guess on for every request that decodes, before its share is decided."""
        if self.proposer is None:
            return
        for request in self.scheduler.running:
            if request.num_uncomputed_tokens == 1 and not request.draft_token_ids:
                limit = request.num_outputs_left - 1
                drafts = self.proposer.propose(request.token_ids, limit)
                inputs.check_tokens(drafts, self.model.spec.vocab_size, "draft")
                self.scheduler.set_drafts(request.request_id, drafts)

    def _wanted(self, schedule: Schedule) -> list[Wanted]:
        wanted = []
        for entry in schedule.scheduled:
            if entry.samples:
                params, known = self._sampling[entry.request_id], entry.request.num_output_tokens
                wanted.append(Wanted(entry.request_id, params, entry.draft_token_ids, known))
        return wanted

    def _deliver(
        self, schedule: Schedule, kept: dict[str, list[int]], now: float
    ) -> tuple[dict[str, list[int]], list[RequestOutput]]:
        fresh, finished = {}, []
        for entry in schedule.scheduled:
            tokens = kept.get(entry.request_id)
            if not tokens:
                continue
            output = self._live[entry.request_id]
            output.token_ids += tokens
            output.first_token = now if output.first_token is None else output.first_token
            output.last_token = now
            output.follow(entry.request)
            fresh[entry.request_id] = tokens
            if entry.request.finish_reason:
                finished.append(self._finish(entry.request))
        return fresh, finished

    def _finish(self, request: Request) -> RequestOutput:
        output = self._live.pop(request.request_id)
        del self._sampling[request.request_id]
        output.follow(request)
        return output

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
        prompts = inputs.prompt_list(prompts)
        limits = inputs.one_for_each(max_new_tokens, len(prompts))
        params = inputs.one_for_each(sampling, len(prompts))
        outputs: list[RequestOutput] = []
        hide = not (sys.stderr.isatty() if progress is None else progress)
        try:
            for prompt, limit, param in zip(prompts, limits, params, strict=True):
                outputs.append(self.add_request(prompt, max_new_tokens=limit, sampling=param))
            with tqdm(total=len(outputs), disable=hide, unit="request") as bar:
                for fresh in new_tokens(outputs, self.step):
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
            for fresh in new_tokens([output], self.step):
                yield from (token for _, token in fresh)
        finally:
            self._abort_unfinished([output])

    def _abort_unfinished(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished:  # a name alone may be somebody else's by now
                self.abort(output.request_id)
