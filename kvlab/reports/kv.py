"""What a cache holds and how many sequences fit, as plain JSON values.

`kvlab kv`, `kvlab models`, the capacity planner and the models page all ask here, so the same
config gives the same answer, or the same named error, on the command line and on a page.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kvlab import costs, kv_costs
from kvlab.configs import find_model, model_index, read_config
from kvlab.errors import KvlabError
from kvlab.kv_formats import FORMATS, require_whole_blocks, storage_format
from kvlab.specs import LayerSpec, ModelSpec

#: The contexts that the models table shows.
TABLE_CONTEXTS = (8_192, 32_768, 131_072)
MOST = 10**15


class KvReportError(KvlabError):
    """A question about a cache that cannot be answered as it was put."""


def count(name: str, value: object, least: int = 1, most: int = MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KvReportError(
            f"{name}: given {value!r}; expected a whole number from {least} to {most:,}"
        )
    return value


def whole(value):
    """A Fraction that is a whole number as an int."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def layer_row(index: int, layer: LayerSpec) -> dict:
    """One resolved layer, without what it does not have."""
    row: dict = {"layer": index, "kind": layer.kind}
    if layer.num_kv_heads:
        row |= {
            "num_kv_heads": layer.num_kv_heads,
            "key_dim": layer.key_dim,
            "value_dim": layer.value_dim,
        }
    if layer.window is not None:
        row["window"] = layer.window
    if layer.shares_layer is not None:
        row["shares_layer"] = layer.shares_layer
    if layer.state:
        row["state"] = [
            {"name": s.name, "elements": s.num_elements, "bytes_per_element": s.bytes_per_element}
            for s in layer.state
        ]
    return row


def layer_runs(spec: ModelSpec) -> list[str]:
    """The layer list for people: "5 sliding (window 512), 1 full, ..." with repeats folded."""
    runs: list[list] = []
    for layer in spec.layers:
        text = layer.kind if layer.window is None else f"{layer.kind} {layer.window:,}"
        if runs and runs[-1][1] == text:
            runs[-1][0] += 1
        else:
            runs.append([1, text])
    return [f"{count} {text}" for count, text in runs]


def stored_model(spec: ModelSpec, kv_dtype: str, tp: int, layout: str, mtp: bool):
    """(the model as one rank stores it, its format)."""
    if layout not in ("latent", "expanded"):
        raise KvReportError(f"layout: given {layout!r}; expected latent or expanded")
    spec = kv_costs.with_mtp(spec) if mtp else spec
    spec = kv_costs.expanded(spec) if layout == "expanded" else spec
    spec = kv_costs.per_rank(spec, count("tp", tp, 1, 65_536))
    storage = storage_format(kv_dtype)
    require_whole_blocks(spec, storage)
    return spec, storage


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
    """What one rank keeps for `batch` sequences of `tokens` tokens. All sizes in bytes."""
    count("tokens", tokens, 0)
    count("batch", batch)
    count("block_size", block_size, 1, 2**20)
    stored, storage = stored_model(spec, kv_dtype, tp, layout, mtp)
    width = storage.bytes_per_element
    fixed = kv_costs.fixed_bytes_per_sequence(stored, width)
    naive = kv_costs.bytes_per_token_from_query_heads(spec, width)  # of all ranks together
    padded = kv_costs.paged_kv_bytes(kv_costs.padded_to_full(stored), tokens, block_size, width)
    report = {
        "model": spec.name,
        "model_type": spec.model_type,
        "tokens": tokens,
        "batch": batch,
        "kv_dtype": storage.name,
        "bytes_per_element": float(width) if isinstance(width, Fraction) else width,
        "tensor_parallel": tp,
        "layout": layout,
        "kv_bytes_per_token_growing": kv_costs.growing_bytes_per_token(stored, width),
        "kv_bytes_per_token_filling": costs.kv_bytes_per_token(stored, width),
        "window_cap_bytes_per_sequence": kv_costs.window_cap_bytes(stored, width),
        "fixed_bytes_per_sequence": fixed,
        "kv_bytes": batch * costs.kv_bytes(stored, tokens, width),
        "kv_bytes_in_pages": batch * kv_costs.paged_kv_bytes(stored, tokens, block_size, width),
        "kv_bytes_if_padded_to_full": batch * padded,
        "kv_bytes_per_token_if_sized_from_query_heads": naive and Fraction(naive) / tp,
        "kv_bytes_per_token_if_expanded": costs.kv_bytes_per_token(
            kv_costs.per_rank(kv_costs.expanded(spec), tp), width
        ),
        "mtp_kv_bytes_per_token": sum(
            costs.layer_kv_bytes_per_token(layer, width)
            for layer in kv_costs.per_rank(spec, tp).mtp_layers
        ),
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "layer_runs": layer_runs(spec),
        "layers": [layer_row(i, layer) for i, layer in enumerate(stored.layers)],
        "notes": list(spec.notes) + ([storage.note] if storage.note else []),
    }
    return {key: whole(value) for key, value in report.items()}


def models_report(kv_dtype: str = "bf16") -> list[dict]:
    """The table of all presets: bytes per token, and of one sequence at three contexts."""
    storage = storage_format(kv_dtype)
    width = storage.bytes_per_element
    rows = []
    for stem, facts in model_index().items():
        spec = find_model(stem)
        require_whole_blocks(spec, storage)
        kinds: dict[str, int] = {}
        for layer in spec.layers:
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
        fixed = kv_costs.fixed_bytes_per_sequence(spec, width)
        rows.append(
            {
                "preset": stem,
                "name": facts["name"],
                "hf_id": facts["hf_id"],
                "kv_bytes_per_token_growing": kv_costs.growing_bytes_per_token(spec, width),
                "kv_bytes_per_token_filling": costs.kv_bytes_per_token(spec, width),
                "fixed_bytes_per_sequence": fixed,
                **{
                    f"bytes_at_{tokens}": fixed + costs.kv_bytes(spec, tokens, width)
                    for tokens in TABLE_CONTEXTS
                    if fixed is not None
                },
                "num_layers": spec.num_layers,
                "num_heads": spec.num_heads,
                "num_kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "layer_kinds": kinds,
                "source": facts["source"],
            }
        )
    return [{key: whole(value) for key, value in row.items()} for row in rows]


# --- questions a widget may ask ---------------------------------------------------------------


def asked_model(model: str | None, config: str | None) -> ModelSpec:
    if config is not None:
        if not isinstance(config, str):
            raise KvReportError(f"config: given {type(config).__name__}; expected JSON text")
        if config.lstrip("\ufeff \t\r\n")[:1] not in ("{", "["):
            raise KvReportError(
                "config: expected JSON text that begins with {; paste a config.json"
            )
        return read_config(config)
    if not isinstance(model, str):
        raise KvReportError(f"model: given {model!r}; expected a name such as llama-3-8b")
    return find_model(model)


def ask_kv(model: str | None = None, config: str | None = None, **settings: Any) -> dict:
    """`kv_report` of a preset's name or of pasted config.json text."""
    return kv_report(asked_model(model, config), **settings)


def ask_models() -> list[dict]:
    """The models table."""
    return models_report()


def ask_formats() -> list[dict]:
    """The storage formats: name, bytes per element, note."""
    return [
        {"name": f.name, "bytes_per_element": float(f.bytes_per_element), "note": f.note}
        for f in FORMATS.values()
    ]
