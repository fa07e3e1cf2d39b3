"""What fits on a card: the pool, what a sequence needs of it, and what to change when it does not.

`kvlab`'s capacity table and the planner on the page ask here. Sizes are bytes; both units, GiB and
GB, appear only in sentences, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvlab import costs, kv_costs
from kvlab.configs import hardware, hardware_names, model_index, preset_named
from kvlab.errors import KvlabError
from kvlab.kv_formats import storage_format
from kvlab.reports.kv import (
    KvReportError,
    asked_model,
    count,
    layer_runs,
    stored_model,
    whole,
)
from kvlab.specs import ModelSpec


def capacity_report(
    spec: ModelSpec,
    memory_bytes: int,
    weight_bytes: int,
    utilisation: str | float = "0.9",
    tokens: int = 8_192,
    sequences: int = 1,
    kv_dtype: str = "bf16",
    tp: int = 1,
    block_size: int = 16,
    reserve_bytes: int = 0,
) -> dict:
    """Does it fit, on each of tp cards? What is left for the cache, and what would have to change.

    memory_bytes and weight_bytes are of one card and of the whole model; a rank holds 1 / tp of
    the weights. Everything is bytes; units appear only in the sentences.
    """
    count("memory_bytes", memory_bytes)
    count("weight_bytes", weight_bytes, 0)
    count("reserve_bytes", reserve_bytes, 0)
    count("tokens", tokens)
    count("sequences", sequences)
    count("block_size", block_size, 1, 2**20)
    share = _share(utilisation)
    stored, storage = stored_model(spec, kv_dtype, tp, "latent", False)
    width = storage.bytes_per_element
    per_card_weights = -(-weight_bytes // tp)
    pool = kv_costs.pool_bytes(memory_bytes, share, per_card_weights, reserve_bytes)
    each = kv_costs.sequence_bytes(stored, tokens, width)
    needed = sequences * each
    rate = kv_costs.growing_bytes_per_token(stored, width)
    uniform = bool(rate) and all(
        layer.window is None and not layer.state for _, layer in stored.layer_groups
    )
    blocks = kv_costs.num_blocks(pool, rate, block_size) if uniform and pool > 0 else None
    report = {
        "model": spec.name,
        "fits": pool >= needed,
        "weights_fit": pool >= 0,
        "pool_bytes": pool,
        "needed_bytes": needed,
        "bytes_per_sequence": each,
        "weight_bytes_per_card": per_card_weights,
        "usable_bytes": int(memory_bytes * share),
        "sequences_that_fit": kv_costs.sequences_that_fit(stored, pool, tokens, width)
        if pool > 0 and each
        else 0,
        "longest_context": kv_costs.longest_context(stored, pool, sequences, width)
        if pool > 0
        else 0,
        "num_blocks": blocks,
        "pool_tokens": None if blocks is None else kv_costs.pool_tokens(blocks, block_size),
        "kv_bytes_per_token_growing": rate,
        "fits_ignoring_utilisation": memory_bytes - per_card_weights - reserve_bytes >= needed,
        "memory_bytes": memory_bytes,
        "layer_runs": layer_runs(spec),
        "notes": list(spec.notes),
    }
    load = _Load(spec, memory_bytes, weight_bytes, share, tokens, sequences, reserve_bytes)
    report["advice"] = [] if report["fits"] else _advice(load, report, kv_dtype, tp)
    return {key: whole(value) for key, value in report.items()}


def _share(utilisation: str | float) -> Fraction:
    try:
        share = Fraction(str(utilisation))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if isinstance(utilisation, bool) or not 0 < share <= 1:
        raise KvReportError(f"utilisation: given {utilisation!r}; expected a share such as 0.9")
    return share


@dataclass(frozen=True)
class _Load:
    """A plan without its format and its number of cards: what is tried again with others."""

    spec: ModelSpec
    memory_bytes: int
    weight_bytes: int
    share: Fraction
    tokens: int
    sequences: int
    reserve_bytes: int

    def fits(self, kv_dtype: str, tp: int) -> bool:
        """Would it fit in this format on so many cards? False where that cannot be split."""
        try:
            stored, storage = stored_model(self.spec, kv_dtype, tp, "latent", False)
        except KvlabError:
            return False
        weights = -(-self.weight_bytes // tp)
        pool = kv_costs.pool_bytes(self.memory_bytes, self.share, weights, self.reserve_bytes)
        each = kv_costs.sequence_bytes(stored, self.tokens, storage.bytes_per_element)
        return pool >= self.sequences * each


def _advice(load: _Load, report: dict, kv_dtype: str, tp: int) -> list[str]:
    """Single changes, each of which makes it fit; each was tried. Empty: it takes more than one."""
    advice = []
    if report["sequences_that_fit"]:
        advice.append(f"run {report['sequences_that_fit']:,} sequences at a time")
    if report["longest_context"]:
        advice.append(f"cut each sequence to {report['longest_context']:,} tokens")
    for name in ("fp8", "nvfp4"):
        smaller = (
            storage_format(name).bytes_per_element < storage_format(kv_dtype).bytes_per_element
        )
        if smaller and load.fits(name, tp):
            advice.append(f"store K and V in {name}")
            break
    cards = next((t for t in (2 * tp, 4 * tp, 8 * tp, 16 * tp) if load.fits(kv_dtype, t)), None)
    if cards is not None:
        advice.append(f"split the model over {cards} cards")
    return advice


def ask_capacity(
    model: str | None = None, config: str | None = None, card: str | None = None, **settings: Any
) -> dict:
    """`capacity_report` of a preset or a pasted config, on a named card or a number of bytes.

    weight_bytes may be left out where the weights can be counted: 2 bytes a parameter.
    """
    spec = asked_model(model, config)
    if card is not None:
        device = hardware(card)
        settings.setdefault("memory_bytes", device.driver_memory_bytes or device.memory_bytes)
    if settings.get("memory_bytes") is None:
        raise KvReportError(
            f"memory_bytes: missing, and no card; expected bytes of memory, or a card out of "
            f"{', '.join(hardware_names())}; give one"
        )
    if settings.get("weight_bytes") is None:
        settings["weight_bytes"] = weight_bytes_of(spec, None if config is not None else model)
    return capacity_report(spec, **settings)


def weight_bytes_of(spec: ModelSpec, model: str | None = None) -> int:
    """The weights in 2 bytes each, where their number is known or follows from the shape."""
    stem = preset_named(model) if model is not None else None
    params = model_index()[stem]["params"] if stem is not None else None
    if params is None and spec.is_dense_llama:
        params = costs.resident_params(spec)
    if params is None:
        raise KvReportError(
            f"weight_bytes: the weights of {spec.name} cannot be counted from its shape; expected "
            f"their size in bytes; give it (the size of the checkpoint's files)"
        )
    return costs.weight_bytes(params)
