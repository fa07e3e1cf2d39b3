"""What the position and cache faults have in common: how they are run, measured and described."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from kvlab.faults.drift import cached_logits, drift, tiny_model
from kvlab.faults.registry import Fault

NATS = "KL against the right run, nats per token, on the checkpoint"
NOTHING = "Nothing: shapes, dtypes and speed are right, no error, no warning. "


def run_tiny(steps: int = 8, chunk_size: int | None = None) -> None:
    """A tiny cached run of `steps` decode steps, for detectors."""
    prompt = 6
    ids = [(7 * i) % 50 for i in range(prompt + steps)]
    cached_logits(tiny_model(), ids, prompt, chunk_size=chunk_size)


def detector(
    watch: Callable[[], AbstractContextManager], run: Callable[..., None] = run_tiny
) -> Callable[..., None]:
    """detect(steps): `run` with the watch in place."""

    def detect(steps: int = 8) -> None:
        with watch():
            run(steps)

    return detect


def mean_kl(**options) -> Callable[[], float]:
    """measure(): mean KL of the cached loop over the laboratory's text, see drift()."""

    def measure() -> float:
        return drift(**options).mean_kl

    return measure


def cache_fault(name: str, watch, measure, **fields) -> Fault:
    return Fault(
        name=name, layer="cache", watch=watch, measure=measure,
        **{"detect": detector(watch), "unit": NATS, "threshold": 1e-2, **fields},
    )  # fmt: skip
