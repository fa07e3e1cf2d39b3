"""Exercises of chapter 7: the subtraction, the ragged batch, a rollback, a preemption."""

from __future__ import annotations

from itertools import product
from typing import Any

from kvlab.batch import context_lengths, cumulative, request_indices, token_positions
from kvlab.notebook.exercises import function, value
from kvlab.scheduler import clamp_new_tokens, computed_after, num_new_tokens


def _share(num_tokens, num_drafts, num_computed, threshold, budget, chunked):
    new = num_new_tokens(num_tokens + num_drafts, 0, num_computed)
    return clamp_new_tokens(new, threshold, budget, chunked)[0]


_COMPUTED, _COUNTS = [9, 0, 6], [1, 4, 2]
_BATCH = {
    "req_indices": request_indices(_COUNTS),
    "positions": token_positions(_COMPUTED, _COUNTS),
    "query_start_loc": [0, *cumulative(_COUNTS)],
    "seq_lens": context_lengths(_COMPUTED, _COUNTS),
}
_BATCH_MISTAKES = [
    ("req_indices", [0, 1, 2], "one entry a token, not one a request"),
    ("req_indices", [0, 1, 1, 1, 1, 1, 1], "the third request is number 2"),
    ("positions", [0, 0, 1, 2, 3, 0, 1], "those are query_pos; add what each request had computed"),
    ("positions", [10, 1, 2, 3, 4, 7, 8], "one too far: the first new one stands at num_computed"),
    ("positions", list(range(7)), "positions start again in every request"),
    ("query_start_loc", [1, 5, 7], "it begins with 0 and has one entry more than requests"),
    ("query_start_loc", [0, 1, 4, 2], "it is cumulative: where the rows begin"),
    ("query_start_loc", [0, 10, 14, 22], "it counts rows of this step, not context"),
    ("seq_lens", _COUNTS, "those are query lengths; the context counts all tokens so far"),
    ("seq_lens", _COMPUTED, "the tokens of this step are written first, so they count"),
    ("seq_lens", [10, 14, 22], "each request has its own context; nothing is summed over requests"),
]


def _pair(answer: Any) -> tuple | None:
    return tuple(answer) if isinstance(answer, tuple | list) and len(answer) == 2 else None


def _alike(got: tuple, right: tuple) -> bool:
    """Two pairs, where ... stands for any number."""
    return all(b is ... or a == b for a, b in zip(got, right, strict=True))


_PROMPT, _OUTPUTS = 30, 12
_KNOWN = _PROMPT + _OUTPUTS

EXERCISES = [
    function("7.1", "The subtraction and its clamps",
        "Write share(num_tokens, num_drafts, num_computed, threshold, budget, chunked): how many "
        "tokens of a request run in this step? num_tokens counts prompt and outputs; a threshold "
        "of 0 is off; with chunking off a request runs whole or not at all.",
        _share,
        (lambda t, d, c, th, b, on: _share(t, 0, c, th, b, on), ": drafts are known tokens too, "
         "they need a row each"),
        (lambda t, d, c, th, b, on: _share(t, d, c, th, b, True) if th else None, ": with chunking "
         "off a prompt runs whole or not at all"),
        (lambda t, d, c, th, b, on: None if on else _share(t, d, c, 0, b, True), ": with chunking "
         "off a prompt that exceeds the budget waits"),
        (lambda t, d, c, th, b, on: None if th else 0, ": a threshold of 0 is switched off"),
        (lambda t, d, c, th, b, on: _share(t, d, c, 0, b, True), ": the threshold cuts a long "
         "prefill before the budget does"),
        otherwise=", expected {right}",
        cases=product((100, 101), (0, 3), (0, 100, 104), (0, 16), (0, 8, 64, 512), (True, False)),
        signs=[
            (lambda got, *case: isinstance(got, int | float) and got < 0, ": a request with "
             "nothing new gets 0 tokens, never fewer"),
            (lambda got, *case: isinstance(got, int) and got > case[4], ": more than the budget "
             "that is left"),
        ],
        prefix="share{case} gave {got}",
        fails="share{case} fails: {kind}: {error}",
        hint="First known minus computed. Nothing below 0. Then, only with chunking, the two mins.",
    ),
    value("7.2", "A ragged batch",
        f"Three requests have {_COMPUTED} tokens computed and {_COUNTS} scheduled. Give the dict "
        "of req_indices, positions, query_start_loc and seq_lens.",
        _BATCH,
        *((lambda batch, name=name: name not in batch, f"{name} is missing") for name in _BATCH),
        *((lambda batch, name=name, wrong=wrong: batch[name] == wrong, f"{name}: {mistake}")
          for name, wrong, mistake in _BATCH_MISTAKES),
        *((lambda batch, name=name: batch[name] != _BATCH[name], f"{name}: not {{got[{name}]}}; "
           "write the rows of the three requests under each other") for name in _BATCH),
        otherwise="",
        expected=f"expected a dict with the keys {sorted(_BATCH)}, each a list",
        read=lambda batch: {name: list(batch[name]) for name in _BATCH if name in batch}
        if isinstance(batch, dict) else None,
        hint="Write seven rows: whose token, and at which position of its own request.",
    ),
    value("7.3", "One draft of three was right",
        "A request has 11 tokens, 10 of them computed, and 3 drafts. The step feeds 4 tokens; the "
        "first draft is right, the second is not. What are (num_computed_tokens, num_tokens) "
        "afterwards?",
        (computed_after(10, 3, 2), 13),
        ((..., 12), "one accepted draft and the model's own next token: two new tokens, not one"),
        (lambda after: after[1] > 13, "the second and third draft were wrong or never reached: "
         "they are not kept"),
        ((14, ...), "rejected drafts were computed, but from a wrong token: they are taken back"),
        ((13, ...), "the newest token was sampled and not fed: it has no K and V yet"),
        ((11, ...), "the accepted draft was fed in this very step, so its K and V are there"),
        otherwise="{got}: count which fed tokens were right, then what was sampled",
        read=_pair,
        same=_alike,
        expected="expected a pair: (num_computed_tokens, num_tokens)",
        hint="Fed: the 11th token and three guesses. Which of them have K and V worth keeping?",
    ),
    value("7.4", "The bill of a preemption",
        f"A request with a prompt of {_PROMPT} has sampled {_OUTPUTS} outputs when it is preempted "
        "between two steps. No prefix caching. How many tokens does its prefill have when it comes "
        "back, and how many of those had been computed before?",
        (_KNOWN, _KNOWN - 1),
        ((_PROMPT, ...), "its outputs are known tokens too, and their K and V are gone too"),
        ((1, ...), "that would be a decode step, with the K and V of everything else missing"),
        ((_KNOWN, _KNOWN), "the newest output had never been computed, so it is not computed "
         "again"),
        ((_KNOWN - 1, ...), "the newest output is known and must be fed, or nothing can be "
         "sampled"),
        ((..., 0), "without prefix caching nothing is found again: blocks went back to the pool"),
        otherwise="{got}: known tokens are prompt and outputs; computed was one less",
        read=_pair,
        same=_alike,
        expected="expected a pair: (tokens of the resumed prefill, tokens computed again)",
        hint="Known: prompt and outputs. Computed: one token fewer, as in every decode.",
    ),
]
