"""May this request come in? Once when it is added, and in every step while it waits."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.block_tables import BlockManager
from kvlab.blocks import blocks_for, is_whole
from kvlab.policy import Admission, SchedulerConfig
from kvlab.prefix import PrefixHit
from kvlab.request import NeverFits, Request, RequestError, Status
from kvlab.schedule import Reason, clamp_new_tokens, num_new_tokens


def refuse_what_never_fits(
    manager: BlockManager, config: SchedulerConfig, request: Request
) -> None:
    """Raise NeverFits for a request that could not run to its end with everything to itself.

    RequestError is for one whose settings mean nothing, or which has run already.

    Such a request would wait for ever, and under strict order everybody behind it too. With
    chunking off the whole text must fit one step: after a preemption, prompt and outputs are
    computed again in one piece.
    """
    outputs = request.max_new_tokens
    if not is_whole(outputs, 1):
        raise RequestError(
            f"request {request.request_id!r}: max_new_tokens={outputs!r}, expected a whole number, "
            f"1 or more"
        )
    for name, place in (("priority", request.priority), ("arrival", request.arrival)):
        if not isinstance(place, int | float) or place != place:  # NaN is not itself
            raise RequestError(
                f"request {request.request_id!r}: {name}={place!r}, expected a number (the "
                f"smaller, the sooner)"
            )
    if request.status != Status.NEW or request.block_table:
        raise RequestError(
            f"request {request.request_id!r} is {request.status} and holds "
            f"{len(request.block_table)} blocks; expected one that was never added, here or "
            f"elsewhere: make a new Request from its tokens"
        )
    longest = request.max_computed_tokens
    one_step = None if config.enable_chunked_prefill else config.max_num_batched_tokens
    for limit, what, cure in (
        (pool_room(manager), "tokens of room in the pool", "make the pool larger"),
        (config.max_model_len, "positions of the model", "shorten the prompt"),
        (one_step, "tokens of one step's budget", "switch chunked prefill on"),
    ):
        if limit is not None and longest > limit:
            raise NeverFits(
                f"request {request.request_id!r}: {request.num_prompt_tokens} prompt tokens and "
                f"{request.max_new_tokens} outputs compute {longest} positions, but there are "
                f"{limit} {what}; {cure}, or ask for fewer outputs"
            )


def pool_room(manager: BlockManager) -> int:
    """Tokens that the pool holds when nobody else is there."""
    return manager.pool.num_usable_blocks * manager.block_size


def first_share(
    manager: BlockManager,
    config: SchedulerConfig,
    request: Request,
    hit: PrefixHit,
    budget: int,
    running: Iterable[Request],
) -> tuple[int, Reason | None]:
    """(tokens that a waiting request may run in this step, why not more). 0: it is not admitted.

    hit      what the prefix cache holds of it: those tokens cost no budget
    running  the requests that are in, for what full-length admission has promised them
    """
    share, reason = clamp_new_tokens(
        num_new_tokens(request.num_tokens, request.num_placeholders, hit.num_tokens),
        config.long_prefill_token_threshold,
        budget,
        config.enable_chunked_prefill,
    )
    if not share:
        return 0, reason
    if config.admission is Admission.FULL_LENGTH:
        needed = manager.num_blocks_needed(request, request.num_tokens - hit.num_tokens, hit)
        free = manager.pool.num_free_blocks
        if needed > free:
            return 0, Reason.NO_BLOCKS
        if needed > free - promised_blocks(manager, running):
            return 0, Reason.PROMISED_BLOCKS
    fitting = manager.num_tokens_that_fit(request, hit)
    if fitting >= share:
        return share, reason
    if fitting < 1 or not config.enable_chunked_prefill:
        return 0, Reason.NO_BLOCKS
    return fitting, Reason.NO_BLOCKS


def promised_blocks(manager: BlockManager, running: Iterable[Request]) -> int:
    """Blocks that prompts half way in will still take."""
    return sum(
        max(blocks_for(r.num_tokens, manager.block_size) - len(r.block_table), 0) for r in running
    )
