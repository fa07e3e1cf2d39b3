"""One check of an audit, and the causes to try where it does not agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvlab import kv_costs
from kvlab.audit.logs import Figure
from kvlab.errors import KvlabError
from kvlab.kv_formats import StorageFormat, storage_format
from kvlab.specs import ModelSpec

#: (model of one rank, bytes of an element) -> does the check agree?
Agrees = Callable[[ModelSpec, object], bool]


class AuditError(KvlabError):
    """A log and a model that cannot be set side by side."""


def check(
    name: str, predicted, reported, agrees: bool, unit: str, independent: bool,
    figure: Figure | None, why: str,
) -> dict:  # fmt: skip
    """A row of the audit. independent: the check could have failed for a wrong model."""
    return {
        "name": name,
        "predicted": predicted,
        "reported": reported,
        "unit": unit,
        "agrees": bool(agrees),
        "independent": independent,
        "line": figure.line if figure else None,
        "why": why,
    }


def no_cause(ratio: float) -> str:
    """What to say where nothing usual explains a figure that is `ratio` times the predicted one."""
    if ratio == math.inf:
        return (
            "no usual cause fits: nothing of this kind is predicted. Is it the right config, and "
            "does the engine keep a second copy?"
        )
    return (
        f"no usual cause fits: the log's figure is {float(ratio):.3f} times the predicted one. Is "
        "it the right config, and does the pool hold something else beside K and V?"
    )


def alternatives(spec: ModelSpec, tp: int, storage: StorageFormat) -> Iterator[tuple]:
    """(what would have to be true, spec of a rank, bytes of an element): causes to try."""
    bytes_per_element = storage.bytes_per_element
    for name in ("fp32", "bf16", "fp8", "int4"):
        if storage_format(name).bytes_per_element != bytes_per_element:
            other = storage_format(name)
            yield (
                f"the cache is stored as {name}, not {storage.name}",
                kv_costs.per_rank(spec, tp),
                other.bytes_per_element,
            )
    for ranks in (1, 2, 4, 8, 16):
        if ranks != tp:
            try:
                yield (
                    f"the figures are for {ranks} tensor-parallel ranks, not {tp}",
                    kv_costs.per_rank(spec, ranks),
                    bytes_per_element,
                )
            except kv_costs.KvCostError:
                continue  # so many ranks cannot hold this model
    rank = kv_costs.per_rank(spec, tp)
    if spec.num_heads and spec.hidden_size:
        heads = tuple(replace(x, num_kv_heads=spec.num_heads) for x in spec.layers)
        yield (
            "the cache is sized from query heads",
            kv_costs.per_rank(replace(spec, layers=heads), tp),
            bytes_per_element,
        )
        derived = spec.hidden_size // spec.num_heads
        narrow = tuple(replace(x, key_dim=derived, value_dim=derived) for x in rank.layers)
        yield (
            "the head size is derived as hidden / heads",
            replace(rank, layers=narrow),
            bytes_per_element,
        )
    yield "the latent is stored expanded", kv_costs.expanded(rank), bytes_per_element
    yield "the draft (MTP) layers have a cache too", kv_costs.with_mtp(rank), bytes_per_element


def explain(agrees: Agrees, spec: ModelSpec, tp: int, storage: StorageFormat, ratio: float) -> str:
    """Which other assumption would make the check agree, for a check that does not."""
    causes = [text for text, rank, width in alternatives(spec, tp, storage) if agrees(rank, width)]
    if causes:
        return f"it would agree if {'; or if '.join(causes)}"
    return no_cause(ratio)
