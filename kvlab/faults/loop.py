"""Faults of the plain loop of chapter 1, which has no cache to blame."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

import kvlab.attention as attention_module
from kvlab.faults.describe import NATS, NOTHING
from kvlab.faults.drift import checkpoint, compare, right_logits, text_ids, tiny_model
from kvlab.faults.registry import Fault, FaultDetected, register
from kvlab.faults.seams import replaced
from kvlab.generate import naive_generate
from kvlab.model import Decoder

_PROMPT, _STEPS = 48, 16


def _without_mask() -> AbstractContextManager[None]:
    """Every token sees every other one; all shapes stay."""

    def attention(original, query, key, value, *, scale=None, window=None):
        group = query.shape[2] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, scale=scale)
        return out.transpose(1, 2)

    return replaced(attention_module, "attention", attention)


def _previous_row() -> AbstractContextManager[None]:
    """Row i of the logits is handed out as row i + 1."""

    def forward(original, model, token_ids, positions, attend, rows=None):
        logits = original(model, token_ids, positions, attend, rows)
        return logits.roll(1, dims=-2) if rows is None else logits

    return replaced(Decoder, "forward", forward)


def _naive_logits(model: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """All rows [s, vocab] of one naive forward, under whatever faults are on."""
    attend = attention_module.UncachedAttention(model.spec)
    return model.forward(torch.tensor([list(ids)]), torch.arange(len(ids))[None], attend)[0]


def _naive_kl() -> float:
    """Mean KL of the naive loop's rows against the right ones, on the laboratory's text."""
    model, ids = checkpoint().model, text_ids()[: _PROMPT + _STEPS]
    now = _naive_logits(model, ids)[_PROMPT - 1 :]
    return compare(right_logits(model, ids, _PROMPT), now, ids[_PROMPT:]).mean_kl


def _detect_changing_keys(steps: int = 8) -> None:
    """K of old tokens after each added token, in every layer of a tiny model."""
    model, before = tiny_model(), []
    for length in range(3, 3 + steps):
        kept: list[torch.Tensor] = []
        inner = attention_module.UncachedAttention(model.spec)

        def attend(layer, query, key, value, kept=kept, inner=inner):
            kept.append(key)
            return inner(layer, query, key, value)

        ids = [(7 * i) % 50 for i in range(length)]
        model.forward(torch.tensor([ids]), torch.arange(length)[None], attend)
        for layer, (old, new) in enumerate(zip(before, kept, strict=False)):
            if not torch.allclose(old, new[:, : length - 1], atol=1e-4):
                raise FaultDetected(
                    f"layer {layer}: K of the first {length - 1} tokens changed when one more was "
                    "added, expected the same values: a token may see no later token"
                )
        before = kept


def _detect_wrong_row(steps: int = 8) -> None:
    """The sampled token against the best one of a forward that computes the last row alone."""
    model, ids = tiny_model(), [3, 1, 4, 1, 5]
    for _ in range(steps):
        sampled = naive_generate(model, ids, 1)[0]
        attend = attention_module.UncachedAttention(model.spec)
        positions = torch.arange(len(ids))[None]
        last = model.forward(torch.tensor([ids]), positions, attend, rows="last")
        if sampled != int(last.argmax()):
            raise FaultDetected(
                f"after {len(ids)} tokens the loop sampled {sampled}, the last row alone says "
                f"{int(last.argmax())}: the next token is in the row of the last token"
            )
        ids.append(sampled)


register(
    Fault(
        name="causal_mask_missing",
        layer="loop",
        symptom="Poor text that changes its mind: every new token changes what the old ones were.",
        smallest_input="Two tokens, two layers: K of token 0 in layer 1 must be the same with and "
        "without token 1 behind it.",
        looks_like=NOTHING + "With a cache the same model behaves differently, since a cached "
        "token cannot see the future.",
        detector="K of old tokens does not change when a token is added.",
        cure="Let a query see its own key and those before it, whichever backend is chosen.",
        source="moojink/openvla-oft#89",
        switch=_without_mask,
        detect=_detect_changing_keys,
        measure=_naive_kl,
        unit=NATS,
        threshold=1e-2,
    ),
    Fault(
        name="logits_row_before_last",
        layer="loop",
        symptom="The text stutters: the loop predicts a token that it already has.",
        smallest_input="Five tokens fed, five rows of logits: the next token is in row 4, the "
        "fault reads row 3.",
        looks_like=NOTHING + "The words repeated are plausible words.",
        detector="The sampled token equals the best one of a forward that computes one row.",
        cure="Ask the decoder for the last row, and for no other.",
        source="abetlen/llama-cpp-python#1179",
        switch=_previous_row,
        detect=_detect_wrong_row,
        measure=_naive_kl,
        unit=NATS,
        threshold=1e-2,
    ),
)
