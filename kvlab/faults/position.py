"""Faults of the position counter: the right rotation by the wrong number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

import kvlab.model as model_module
from kvlab import rope as position_rules
from kvlab.faults import checks
from kvlab.faults.describe import NATS, NOTHING, detector, mean_kl, run_tiny
from kvlab.faults.drift import cached_logits, checkpoint, compare, text_ids, tiny_model
from kvlab.faults.registry import Fault, register
from kvlab.faults.seams import ChangedAttend, replaced, suspended
from kvlab.generate import padded_generate
from kvlab.model import Decoder

#: change(positions, cached tokens, prompt length) -> positions
Change = Callable[[torch.Tensor, int, int], torch.Tensor]


def _before_forward(change: Change) -> AbstractContextManager[None]:
    """Change the positions that a cached loop hands to the model."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        cache = getattr(attend, "cache", None)
        if cache is not None and not hasattr(attend, "mask"):
            if cache.length == 0:
                attend.first_fed = positions.shape[-1]
            prompt = getattr(attend, "first_fed", cache.length)
            positions = change(positions, cache.length, prompt)
        return original(model, token_ids, positions, attend, rows)

    return replaced(Decoder, "forward", forward)


def _off_by_one(positions, cached, prompt):
    return positions + 1 if cached else positions


def _restarts(positions, cached, prompt):
    return positions - prompt if cached else positions


def _adds_prompt(positions, cached, prompt):
    return prompt * (cached - prompt + 1) + positions - cached if cached else positions


def _one_offset(positions, cached, prompt):
    return torch.full_like(positions, cached) if cached else positions


def _shift_all(positions, cached, prompt):
    return positions + 5


def _shared_counter() -> AbstractContextManager[None]:
    def columns(original, attention_mask):
        return torch.full((attention_mask.shape[0], 1), attention_mask.shape[1])

    return replaced(position_rules, "next_positions", columns)


def _query_moves_on() -> AbstractContextManager[None]:
    """The query is rotated after the cache has advanced the offset that both of them share."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        cached = getattr(getattr(attend, "cache", None), "length", 0)
        cos, sin = model.rope.rows(torch.ones_like(positions))

        def turned_on(layer, query, key, value):
            return model_module.apply_rope(query, cos, sin), key, value

        moved = ChangedAttend(attend, turned_on) if cached else attend
        return original(model, token_ids, positions, moved, rows)

    return replaced(Decoder, "forward", forward)


def _run_chunked(steps: int = 8) -> None:
    run_tiny(steps, chunk_size=2)


def _run_padded(steps: int = 8) -> None:
    padded_generate(tiny_model(), [[1, 2, 3], [4, 5, 6, 7, 8]], steps)


def _padded_kl() -> float:
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


register(
    Fault(
        name="decode_position_off_by_one",
        layer="position",
        symptom="Fluent text that is a little off in the first words after the prompt: every "
        "distance across the seam between prompt and output is one too long. The first word that "
        "flips changes all that follows.",
        smallest_input="Prompt of 5 tokens, then one decode step: seq_len is 6, the position "
        "must be 5, the fault uses 6.",
        looks_like=NOTHING + "The first token after the prompt is right.",
        detector="positions[-1] == seq_lens - 1 at every step.",
        cure="Take the position from the number of cached tokens, before this token is counted.",
        source="GeeeekExplorer/nano-vllm#67",
        switch=lambda: _before_forward(_off_by_one),
        detect=detector(checks.watch_positions),
        watch=checks.watch_positions,
        measure=mean_kl(),
        unit=NATS,
        threshold=1e-3,
    ),
    Fault(
        name="decode_position_restarts",
        layer="position",
        symptom="After the prompt every new token claims to stand at the very beginning; the "
        "text loses the thread within a few words.",
        smallest_input="Prompt of 6, decode 3: positions must be 6, 7, 8, the fault uses 0, 1, 2.",
        looks_like=NOTHING + "A run without a cache is right, so the model gets the blame.",
        detector="positions[-1] == seq_lens - 1 at every step.",
        cure="Build positions from the cache's length, never from the length of what is fed.",
        source="huggingface/transformers#15736, huggingface/transformers#47597",
        switch=lambda: _before_forward(_restarts),
        detect=detector(checks.watch_positions),
        watch=checks.watch_positions,
        measure=mean_kl(),
        unit=NATS,
        threshold=1e-2,
    ),
    Fault(
        name="decode_offset_adds_prompt",
        layer="position",
        symptom="Good for one token, then worse with every step, sooner with a longer prompt.",
        smallest_input="Prompt of 6, decode 3: offsets must be 0, 6, 7, 8, the fault uses "
        "0, 6, 12, 18.",
        looks_like=NOTHING + "The first decode step is right, so a one-step test passes.",
        detector="positions[-1] == seq_lens - 1 at every step.",
        cure="Advance the offset by the tokens fed in this forward, not by the prompt again.",
        source="skyzh/tiny-llm#46, skyzh/tiny-llm#65",
        switch=lambda: _before_forward(_adds_prompt),
        detect=detector(checks.watch_positions),
        watch=checks.watch_positions,
        measure=mean_kl(),
        unit=NATS,
        threshold=1e-2,
    ),
    Fault(
        name="chunk_shares_one_offset",
        layer="position",
        symptom="Drafts are rejected far too often, or a prompt fed in pieces is answered "
        "differently from the same prompt fed whole.",
        smallest_input="Four draft tokens from offset 10: positions must be 10, 11, 12, 13, the "
        "fault uses 10, 10, 10, 10.",
        looks_like=NOTHING + "Plain decoding, one token a step, is right.",
        detector="Positions ascend by one within a row, and the last is seq_lens - 1.",
        cure="positions = cached + arange(q_len), also when q_len is small.",
        source="skyzh/tiny-llm commit 5b6fdc3",
        switch=lambda: _before_forward(_one_offset),
        detect=detector(checks.watch_positions, _run_chunked),
        watch=checks.watch_positions,
        measure=mean_kl(chunk_size=8, num_steps=8),
        unit=NATS,
        threshold=1e-2,
    ),
    Fault(
        name="shared_counter_under_padding",
        layer="position",
        symptom="In a padded batch the shorter prompts get worse answers than alone; the "
        "longest one is right.",
        smallest_input="Mask [[0,0,1,1,1],[1,1,1,1,1]], one decode step: positions must be "
        "[[3],[5]], the fault uses [[5],[5]].",
        looks_like=NOTHING + "Batches of equal lengths, and batch size 1, are right.",
        detector="positions[:, -1] == attention_mask.sum(-1) - 1, row by row.",
        cure="Count each row's own real tokens (a running sum of its mask).",
        source="unslothai/unsloth#3699, ndif-team/nnsight#673, tloen/alpaca-lora#315",
        switch=_shared_counter,
        detect=detector(checks.watch_positions, _run_padded),
        watch=checks.watch_positions,
        measure=_padded_kl,
        unit=NATS + ", shorter row",
        threshold=1e-3,
    ),
    Fault(
        name="query_offset_mutated_in_place",
        layer="position",
        symptom="Loops and garbage in batched serving, while single requests are right.",
        smallest_input="offset = cache.offset (a tensor), then the cache update does offset += 1, "
        "then q is rotated by offset: k stands at 5, its own query at 6.",
        looks_like=NOTHING + "Positions printed before the step are right.",
        detector="The first layer's q and k, as attention gets them, equal R(position) W x.",
        cure="Rotate q and k together, before the cache advances; a counter is a plain int.",
        source="ml-explore/mlx-lm#1097, ml-explore/mlx-lm#1806, ml-explore/mlx-lm#1699",
        switch=_query_moves_on,
        detect=detector(checks.watch_rotation),
        watch=checks.watch_rotation,
        measure=mean_kl(),
        unit=NATS,
        threshold=1e-3,
    ),
    Fault(
        name="uniform_shift",
        layer="position",
        symptom="None today: scores depend on differences of positions only. It breaks later, "
        "with learned positions, a scaling rule that looks at the length, or a second cache "
        "that counts from zero.",
        smallest_input="Positions 5, 6, 7, ... for 0, 1, 2, ... in prompt and decode alike.",
        looks_like=NOTHING + "Every output is right too, to the last digit that rounding leaves.",
        detector="positions[-1] == seq_lens - 1. No comparison of outputs can find it.",
        cure="Test the position arrays themselves.",
        source="the harmless half of unslothai/unsloth#3699; why outputs alone cannot clear "
        "GeeeekExplorer/nano-vllm#67",
        switch=lambda: _before_forward(_shift_all),
        detect=detector(checks.watch_positions),
        watch=checks.watch_positions,
        measure=mean_kl(),
        unit=NATS,
        threshold=1e-6,
        visible=False,
    ),
)
