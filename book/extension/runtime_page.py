"""The page that says what runs where: the cards of data/hardware by the rules of kvlab.kernels."""

from __future__ import annotations

import torch

from kvlab.checkpoint import load
from kvlab.configs import hardware, hardware_names
from kvlab.kernels.choose import choose_dtype, decide, half_dtype
from kvlab.notebook.display import say, table
from kvlab.notebook.measure import runtime

#: What a small case on the card may answer: nothing is wrong, or something is.
TRIALS = (lambda: None, lambda: "a small case came out wrong")


def say_here() -> None:
    """The line of the machine that built the page."""
    say(f"**These pages were built on:** {runtime(load().model)}")


def _row(card: str, capability: str, dtype: torch.dtype, why: str, attends: str) -> dict:
    return {
        "card": card,
        "compute capability": capability,
        "load() takes": str(dtype).removeprefix("torch."),
        "because": why.split(": ", 1)[1],
        "an engine attends in": attends,
    }


def show_cards() -> None:
    """A row a card: what load() and an engine choose there."""
    rows = []
    for card in map(hardware, hardware_names()):
        if card.compute_capability is None:
            continue  # a processor
        major, minor = map(int, card.compute_capability.split("."))
        names = {decide((major, minor), trial)[0]: None for trial in TRIALS}
        attends = " if a small case comes out right there, else ".join(names)
        dtype, why = half_dtype((major, minor))
        rows.append(_row(card.name, card.compute_capability, dtype, why, attends))
    rows.append(_row("none", "", *choose_dtype("cpu"), "torch"))
    table(rows, "What is chosen on each card", text=True)
