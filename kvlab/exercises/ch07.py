"""Exercises of chapter 7: the subtraction, the ragged batch, a rollback, a preemption."""

from __future__ import annotations

from itertools import product
from typing import Any

from kvlab.batch import (
    context_lengths,
    cumulative,
    request_indices,
    token_positions,
)
from kvlab.exercises import Exercise, Wrong, register
from kvlab.scheduler import clamp_new_tokens, computed_after, num_new_tokens


def _share(num_tokens, num_drafts, num_computed, threshold, budget, chunked):
    new = num_new_tokens(num_tokens + num_drafts, 0, num_computed)
    return clamp_new_tokens(new, threshold, budget, chunked)[0]


def _check_share(answer: Any) -> None:
    """7.1: the function against every combination of some telling values."""
    if not callable(answer):
        raise Wrong("define the function share(...) and pass the function itself")
    cases = product((100, 101), (0, 3), (0, 100, 104), (0, 16), (0, 8, 64, 512), (True, False))
    for case in cases:
        tokens, drafts, computed, threshold, budget, chunked = case
        expected = _share(*case)
        try:
            got = answer(*case)
        except Exception as error:
            raise Wrong(f"share{case} fails: {error!r}") from None
        if got == expected:
            continue
        if isinstance(got, int | float) and got < 0:
            raise Wrong(
                f"share{case} gave {got}: a request with nothing new gets 0 tokens, never fewer"
            )
        if tokens + drafts > computed and got == _share(tokens, 0, computed, *case[3:]):
            raise Wrong(f"share{case}: drafts are known tokens too, they need a row each")
        if not chunked and threshold and got == min(threshold, budget, tokens + drafts - computed):
            raise Wrong(f"share{case}: with chunking off a prompt runs whole or not at all")
        if not chunked and got == min(budget, tokens + drafts - computed):
            raise Wrong(f"share{case}: with chunking off a prompt that exceeds the budget waits")
        if got == 0 and threshold == 0 and budget:
            raise Wrong(f"share{case}: threshold 0 means that it is switched off")
        if isinstance(got, int) and got > budget:
            raise Wrong(f"share{case} gave {got}: more than the budget that is left")
        if chunked and threshold and got == min(budget, tokens + drafts - computed):
            raise Wrong(f"share{case}: the threshold cuts a long prefill before the budget does")
        raise Wrong(f"share{case} gave {got}, expected {expected}")


register(
    Exercise(
        id="7.1",
        title="The subtraction and its clamps",
        question=(
            "Write share(num_tokens, num_drafts, num_computed, threshold, budget, chunked): how "
            "many tokens of a request run in this step? num_tokens counts prompt and outputs; a "
            "threshold of 0 is off; with chunking off a request runs whole or not at all."
        ),
        check=_check_share,
        solution=_share,
        hint="First known minus computed. Nothing below 0. Then, only with chunking, the two mins.",
    )
)

_COMPUTED, _COUNTS = [9, 0, 6], [1, 4, 2]
_BATCH = {
    "req_indices": request_indices(_COUNTS),
    "positions": token_positions(_COMPUTED, _COUNTS),
    "query_start_loc": [0, *cumulative(_COUNTS)],
    "seq_lens": context_lengths(_COMPUTED, _COUNTS),
}
_BATCH_TRAPS = {
    "req_indices": [
        ([0, 1, 2], "one entry a token, not one a request"),
        ([0, 1, 1, 1, 1, 1, 1], "the third request is number 2"),
    ],
    "positions": [
        ([0, 0, 1, 2, 3, 0, 1], "those are query_pos; add what each request had computed"),
        ([10, 1, 2, 3, 4, 7, 8], "one too far: the first new token stands at num_computed"),
        (list(range(7)), "positions start again in every request"),
    ],
    "query_start_loc": [
        ([1, 5, 7], "it begins with 0 and has one entry more than requests"),
        ([0, 1, 4, 2], "it is cumulative: where the rows begin"),
        ([0, 10, 14, 22], "it counts rows of this step, not context"),
    ],
    "seq_lens": [
        (_COUNTS, "those are query lengths; the context counts all tokens so far"),
        (_COMPUTED, "the tokens of this step are written first, so they count"),
        ([10, 14, 22], "each request has its own context; nothing is summed over requests"),
    ],
}


def _check_batch(answer: Any) -> None:
    """7.2: four lists under their names."""
    if not isinstance(answer, dict):
        raise Wrong(f"expected a dict with the keys {sorted(_BATCH)}")
    missing = sorted(set(_BATCH) - set(answer))
    if missing:
        raise Wrong(f"{missing[0]} is missing")
    for name, expected in _BATCH.items():
        got = list(answer[name])
        if got == expected:
            continue
        for wrong, mistake in _BATCH_TRAPS[name]:
            if got == wrong:
                raise Wrong(f"{name}: {mistake}")
        raise Wrong(f"{name}: not {got}; write the rows of the three requests under each other")


register(
    Exercise(
        id="7.2",
        title="A ragged batch",
        question=(
            f"Three requests have {_COMPUTED} tokens computed and {_COUNTS} scheduled. Give the "
            "dict of req_indices, positions, query_start_loc and seq_lens."
        ),
        check=_check_batch,
        solution=_BATCH,
        hint="Write seven rows: whose token, and at which position of its own request.",
    )
)

_AFTER = (computed_after(10, 3, 2), 13)


def _check_after(answer: Any) -> None:
    """7.3: (num_computed_tokens, num_tokens) after one of three drafts was right."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("expected a pair: (num_computed_tokens, num_tokens)")
    computed, tokens = answer
    if (computed, tokens) == _AFTER:
        return
    if tokens == 12:
        raise Wrong("one accepted draft and the model's own next token: two new tokens, not one")
    if tokens > 13:
        raise Wrong("the second and third draft were wrong or never reached: they are not kept")
    if computed == 14:
        raise Wrong("rejected drafts were computed, but from a wrong token: they are taken back")
    if computed == 13:
        raise Wrong("the newest token was sampled and not fed: it has no K and V yet")
    if computed == 11:
        raise Wrong("the accepted draft was fed in this very step, so its K and V are there")
    raise Wrong(f"({computed}, {tokens}): count which fed tokens were right, then what was sampled")


register(
    Exercise(
        id="7.3",
        title="One draft of three was right",
        question=(
            "A request has 11 tokens, 10 of them computed, and 3 drafts. The step feeds 4 tokens; "
            "the first draft is right, the second is not. What are (num_computed_tokens, "
            "num_tokens) afterwards?"
        ),
        check=_check_after,
        solution=_AFTER,
        hint="Fed: the 11th token and three guesses. Which of them have K and V worth keeping?",
    )
)

_PROMPT, _OUTPUTS = 30, 12
_RESUMED = (_PROMPT + _OUTPUTS, _PROMPT + _OUTPUTS - 1)


def _check_preemption(answer: Any) -> None:
    """7.4: (tokens of the resumed prefill, tokens of it that are computed a second time)."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("expected a pair: (tokens of the resumed prefill, tokens computed again)")
    prefill, again = answer
    if (prefill, again) == _RESUMED:
        return
    if prefill == _PROMPT:
        raise Wrong("its outputs are known tokens too, and their K and V are gone with the rest")
    if prefill == 1:
        raise Wrong("that would be a decode step, with the K and V of everything else missing")
    if prefill == again == _PROMPT + _OUTPUTS:
        raise Wrong("the newest output had never been computed, so it is not computed again")
    if prefill == _PROMPT + _OUTPUTS - 1:
        raise Wrong("the newest output is known and must be fed, or nothing can be sampled")
    if again == 0:
        raise Wrong("without prefix caching nothing is found again: blocks went back to the pool")
    raise Wrong(f"({prefill}, {again}): known tokens are prompt and outputs; computed was one less")


register(
    Exercise(
        id="7.4",
        title="The bill of a preemption",
        question=(
            f"A request with a prompt of {_PROMPT} has sampled {_OUTPUTS} outputs when it is "
            "preempted between two steps. No prefix caching. How many tokens does its prefill have "
            "when it comes back, and how many of those had been computed before?"
        ),
        check=_check_preemption,
        solution=_RESUMED,
        hint="Known: prompt and outputs. Computed: one token fewer, as in every decode.",
    )
)
