"""What a cache holds and how many sequences fit, as plain JSON values.

`kvlab kv`, `kvlab models`, the capacity planner and the models page all ask here, so the same
config gives the same answer, or the same named error, on the command line and on a page. Sizes are
bytes; both units, GiB and GB, appear only in sentences, side by side.

The checks of what a reader typed stand first: the rest of the calculator uses them too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from kvlab import costs
from kvlab.configs import (
    NOT_COUNTED,
    families,
    find_model,
    hardware,
    hardware_names,
    model_index,
    preset_named,
    read_config,
)
from kvlab.costs import FORMATS, StorageFormat
from kvlab.errors import KvlabError
from kvlab.specs import LayerSpec, ModelSpec

#: The contexts that the models table shows.
TABLE_CONTEXTS = (8_192, 32_768, 131_072)
MOST = 10**15
#: Names of a format in configs, logs and engines' options, beside those of FORMATS.
OTHER_NAMES = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "fp8_inc": "fp8", "f16": "fp16", "f32": "fp32",
}  # fmt: skip
SHAPE = ("num_layers", "num_heads", "num_kv_heads", "head_dim")


class SheetError(KvlabError):
    """A question that cannot be answered as it was put, or a log that does not answer it."""


# --- what a reader typed ----------------------------------------------------------------------


def require(holds: bool, problem: str) -> None:
    """Go on if the condition holds; otherwise refuse the question with the problem's sentence."""
    if not holds:
        raise SheetError(problem)


def is_whole(value: object, least: int, most: int) -> bool:
    """Is it a whole number in this range? True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def require_whole(name: str, value: object, least: int = 1, most: int = MOST) -> None:
    """Refuse what is no whole number from least to most."""
    problem = f"{name}: given {value!r}; expected a whole number from {least} to {most:,}"
    require(is_whole(value, least, most), problem)


def storage_format(name: str) -> StorageFormat:
    """The format of a name such as bf16, fp8 or q8_0. Raises SheetError for another name."""
    key = name.lower().removeprefix("torch.") if isinstance(name, str) else ""
    key = OTHER_NAMES.get(key, key)
    require(key in FORMATS, f"kv dtype: given {name!r}; expected one of {', '.join(FORMATS)}")
    return FORMATS[key]


def require_whole_blocks(spec: ModelSpec, storage: StorageFormat) -> None:
    """Refuse a block-scaled format whose blocks do not tile a layer's row of K or of V."""
    for _, layer in spec.layer_groups:
        for row in (layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim):
            require(
                row % storage.block == 0,
                f"kv dtype {storage.name}: a row of {row} elements ({layer.kind} layer of "
                f"{spec.name}) is not a whole number of blocks of {storage.block}; choose a "
                f"format with smaller blocks",
            )


def stored_model(
    spec: ModelSpec, kv_dtype: str, tp: int, layout: str = "latent", mtp: bool = False
) -> tuple[ModelSpec, StorageFormat]:
    """(the model as one rank stores it, its format), or a SheetError or CostError."""
    known = layout in ("latent", "expanded")
    require(known, f"layout: given {layout!r}; expected latent or expanded")
    spec = costs.with_mtp(spec) if mtp else spec
    spec = costs.expanded(spec) if layout == "expanded" else spec
    require_whole("tp", tp, 1, 65_536)
    spec = costs.per_rank(spec, tp)
    storage = storage_format(kv_dtype)
    require_whole_blocks(spec, storage)
    return costs.with_scales(spec, storage), storage


def asked_model(model: str | None, config: str | None) -> ModelSpec:
    """The ModelSpec of pasted config.json text, else of a preset's name."""
    if config is None:
        if not isinstance(model, str):
            raise SheetError(f"model: given {model!r}; expected a name such as llama-3-8b")
        return find_model(model)
    kind = type(config).__name__
    require(isinstance(config, str), f"config: given {kind}; expected JSON text")
    begins = config.lstrip("\ufeff \t\r\n")[:1] in ("{", "[")
    require(begins, "config: expected JSON text that begins with {; paste a config.json")
    return read_config(config)


# --- one model --------------------------------------------------------------------------------


def kv_report(
    spec: ModelSpec,
    tokens: int = 8_192,
    kv_dtype: str = "bf16",
    tp: int = 1,
    batch: int = 1,
    layout: str = "latent",
    mtp: bool = False,
    block_size: int = 16,
) -> dict:
    """What one rank keeps for `batch` sequences of `tokens` tokens. All sizes in bytes.

    Raises SheetError for a number, format or layout that cannot be, CostError for such a split.
    """
    require_whole("tokens", tokens, 0)
    require_whole("batch", batch)
    require_whole("block_size", block_size, 1, 2**20)
    stored, storage = stored_model(spec, kv_dtype, tp, layout, mtp)
    latent = layout == "latent" and any(layer.kind == "latent" for layer in spec.layers)
    require(
        latent or storage.name != "fp8_ds_mla",
        f"kv dtype {storage.name}: the format of a latent row (MLA), and none is stored here for "
        f"{spec.name}; expected fp8 or another",
    )
    bare, _ = stored_model(spec, "bf16", tp, layout, mtp)  # as it is computed, without scales
    width, elements = storage.bytes_per_element, costs.kv_bytes_per_token(bare, 1)
    rate = costs.kv_bytes_per_token(stored, width)
    shown, notes = spec, list(spec.notes)
    if mtp and spec.mtp_layers:  # the note, the list and the count follow
        shown = replace(costs.with_mtp(spec), num_layers=len(stored.layers))
        notes = [note.replace(NOT_COUNTED, "counted") if "MTP" in note else note for note in notes]
    from_query_heads = None
    if spec.num_heads:
        whole = costs.with_scales(spec, storage)
        from_query_heads = Fraction(costs.bytes_per_token_from_query_heads(whole, width)) / tp
    padded = costs.paged_kv_bytes(costs.padded_to_full(stored), tokens, block_size, width)
    return _plain(
        {
            "model": spec.name,
            "model_type": spec.model_type,
            "tokens": tokens,
            "batch": batch,
            "kv_dtype": storage.name,
            "bytes_per_element": Fraction(rate) / elements if elements else width,
            "tensor_parallel": tp,
            "layout": layout,
            "kv_bytes_per_token_growing": costs.growing_bytes_per_token(stored, width),
            "kv_bytes_per_token_filling": rate,
            "window_cap_bytes_per_sequence": costs.window_cap_bytes(stored, width),
            "fixed_bytes_per_sequence": costs.fixed_bytes_per_sequence(stored, width),
            "kv_bytes": batch * costs.kv_bytes(stored, tokens, width),
            "kv_bytes_in_pages": batch * costs.paged_kv_bytes(stored, tokens, block_size, width),
            "kv_bytes_if_padded_to_full": batch * padded,
            "kv_bytes_per_token_if_sized_from_query_heads": from_query_heads,
            "kv_bytes_per_token_if_expanded": costs.kv_bytes_per_token(
                stored_model(spec, kv_dtype, tp, "expanded")[0], width
            ),
            "indexer_bytes_per_token": costs.index_bytes_per_token(stored, width),
            "mtp_kv_bytes_per_token": sum(
                costs.layer_kv_bytes_per_token(layer, width)
                for layer in stored_model(spec, kv_dtype, tp)[0].mtp_layers
            ),
            **{name: getattr(shown, name) for name in SHAPE},
            "layer_runs": layer_runs(shown),
            "layers": [_layer_row(i, layer) for i, layer in enumerate(bare.layers)],
            "notes": notes + ([storage.note] if storage.note else []),
        }
    )


def layer_runs(spec: ModelSpec) -> list[str]:
    """The layer list for people: "5 sliding 512", "1 full", ... with repeats folded."""
    kinds = (x.kind if x.window is None else f"{x.kind} {x.window:,}" for x in spec.layers)
    return [f"{len(list(run))} {kind}" for kind, run in groupby(kinds)]


def _layer_row(index: int, layer: LayerSpec) -> dict:
    """One resolved layer, without what it does not have."""
    row: dict[str, Any] = {"layer": index, "kind": layer.kind}
    if layer.num_kv_heads:
        row |= {name: getattr(layer, name) for name in ("num_kv_heads", "key_dim", "value_dim")}
    for name in ("window", "shares_layer"):
        if getattr(layer, name) is not None:
            row[name] = getattr(layer, name)
    if layer.state:
        row["state"] = [
            {"name": s.name, "elements": s.num_elements, "bytes_per_element": s.bytes_per_element}
            for s in layer.state
        ]
    return row


def _plain(report: dict) -> dict:
    """Fractions as JSON has them: a whole one as an int, another as a float."""
    for key, value in report.items():
        if isinstance(value, Fraction):
            report[key] = value.numerator if value.denominator == 1 else float(value)
    return report


# --- all models -------------------------------------------------------------------------------


def models_report(kv_dtype: str = "bf16") -> list[dict]:
    """The table of all presets: bytes per token, and of one sequence at three contexts."""
    storage = storage_format(kv_dtype)
    width = storage.bytes_per_element
    rows = []
    for stem, facts in model_index().items():
        spec = find_model(stem)
        require_whole_blocks(spec, storage)
        stored = costs.with_scales(spec, storage)
        fixed = costs.fixed_bytes_per_sequence(stored, width)
        contexts = TABLE_CONTEXTS if fixed is not None else ()
        row = {
            "preset": stem,
            "name": facts["name"],
            "hf_id": facts["hf_id"],
            "kv_bytes_per_token_growing": costs.growing_bytes_per_token(stored, width),
            "kv_bytes_per_token_filling": costs.kv_bytes_per_token(stored, width),
            "fixed_bytes_per_sequence": fixed,
            **{f"bytes_at_{n}": costs.sequence_bytes(stored, n, width) for n in contexts},
            **{name: getattr(spec, name) for name in SHAPE},
            "layer_kinds": dict(Counter(layer.kind for layer in spec.layers)),
            "source": facts["source"],
        }
        rows.append(_plain(row))
    return rows


def runnable_report() -> list[dict]:
    """The model types that the decoder computes, each with the presets of that type it can run."""
    specs = {stem: find_model(stem) for stem in model_index()}
    return [
        {
            "model_type": model_type,
            "architecture": family["architecture"],
            "presets": [
                stem
                for stem, spec in specs.items()
                if spec.model_type == model_type and not spec.unsupported
            ],
        }
        for model_type, family in families().items()
    ]


# --- what fits on a card ----------------------------------------------------------------------


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
    the weights. Raises SheetError for what cannot be, CostError for a state of unknown size.
    """
    require_whole("memory_bytes", memory_bytes)
    require_whole("weight_bytes", weight_bytes, 0)
    require_whole("reserve_bytes", reserve_bytes, 0)
    require_whole("tokens", tokens)
    require_whole("sequences", sequences)
    require_whole("block_size", block_size, 1, 2**20)
    share = _share(utilisation)
    stored, storage = stored_model(spec, kv_dtype, tp)
    width = storage.bytes_per_element

    def weights_and_pool(tp: int) -> tuple[int, int]:
        weights = -(-weight_bytes // tp)
        return weights, costs.pool_bytes(memory_bytes, share, weights, reserve_bytes)

    def fits(kv_dtype: str, tp: int) -> bool:
        """Would it fit in this format on so many cards? False where that cannot be split."""
        try:
            other, storage = stored_model(spec, kv_dtype, tp)
        except KvlabError:
            return False
        return in_pages(other, weights_and_pool(tp)[1], storage.bytes_per_element) >= sequences

    def in_pages(model: ModelSpec, pool: int, width: int | Fraction) -> int:
        """Sequences that fit in whole pages. One block is the null block, which nobody gets."""
        each = costs.sequence_bytes(model, tokens, width) - costs.kv_bytes(model, tokens, width)
        each += costs.paged_kv_bytes(model, tokens, block_size, width)
        page = block_size * costs.kv_bytes_per_token(model, width)
        return int((pool - page) // each) if pool > page and each else 0

    weights, pool = weights_and_pool(tp)
    each = costs.sequence_bytes(stored, tokens, width)
    needed = sequences * each
    rate = costs.growing_bytes_per_token(stored, width)
    uniform = rate and all(layer.window is None and not layer.state for layer in stored.layers)
    blocks = costs.num_blocks(pool, rate, block_size) if uniform and pool > 0 else None
    most = in_pages(stored, pool, width)
    page = block_size * costs.kv_bytes_per_token(stored, width)
    longest = costs.longest_context(stored, max(pool - page, 0), sequences, width)
    if longest is not None:
        longest = longest // block_size * block_size

    advice = []  # single changes, each of which makes it fit; each was tried
    if most < sequences:
        if most:
            advice.append(f"run {most:,} sequences at a time")
        if longest:
            advice.append(f"cut each sequence to {longest:,} tokens")
        smaller = [name for name in ("fp8", "nvfp4") if FORMATS[name].bytes_per_element < width]
        fitting = [name for name in smaller if fits(name, tp)]
        if fitting:
            advice.append(f"store K and V in {fitting[0]}")
        cards = [t for t in (2 * tp, 4 * tp, 8 * tp, 16 * tp) if fits(kv_dtype, t)]
        if cards:
            advice.append(f"split the model over {cards[0]} cards")
    return _plain(
        {
            "model": spec.name,
            "fits": most >= sequences,
            "weights_fit": pool >= 0,
            "pool_bytes": pool,
            "needed_bytes": needed,
            "bytes_per_sequence": each,
            "weight_bytes_per_card": weights,
            "usable_bytes": int(memory_bytes * share),
            "sequences_that_fit": most,
            "longest_context": longest,
            "num_blocks": blocks,
            "pool_tokens": None if blocks is None else costs.pool_tokens(blocks, block_size),
            "kv_bytes_per_token_growing": rate,
            "fits_ignoring_utilisation": memory_bytes - weights - reserve_bytes >= needed,
            "memory_bytes": memory_bytes,
            "layer_runs": layer_runs(spec),
            "notes": list(spec.notes),
            "advice": advice,
        }
    )


def _share(utilisation: str | float) -> Fraction:
    try:
        share = Fraction(str(utilisation))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    right = 0 < share <= 1 and not isinstance(utilisation, bool)
    require(right, f"utilisation: given {utilisation!r}; expected a share such as 0.9")
    return share


def _weight_bytes_of(spec: ModelSpec, model: str | None) -> int:
    """The weights in 2 bytes each, where their number is known or follows from the shape."""
    stem = preset_named(model) if model is not None else None
    params = model_index()[stem]["params"] if stem is not None else None
    if params is None and spec.is_dense_llama:
        params = costs.resident_params(spec)
    if params is None:
        raise SheetError(
            f"weight_bytes: the weights of {spec.name} cannot be counted from its shape; expected "
            f"their size in bytes; give it (the size of the checkpoint's files)"
        )
    return costs.weight_bytes(params)


# --- questions a widget may ask ---------------------------------------------------------------


def ask_kv(model: str | None = None, config: str | None = None, **settings: Any) -> dict:
    """`kv_report` of a preset's name or of pasted config.json text."""
    return kv_report(asked_model(model, config), **settings)


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
    require(
        settings.get("memory_bytes") is not None,
        f"memory_bytes: missing, and no card; expected bytes of memory, or a card out of "
        f"{', '.join(hardware_names())}; give one",
    )
    if settings.get("weight_bytes") is None:
        settings["weight_bytes"] = _weight_bytes_of(spec, None if config is not None else model)
    return capacity_report(spec, **settings)
