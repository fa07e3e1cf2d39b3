"""The models page: one sortable table of every preset, and where each config was read.

A plain HTML table that reads well without scripts; page.js makes its headings sort.
"""

from __future__ import annotations

from html import escape

from kvlab import costs
from kvlab.configs import find_model
from kvlab.sheet import TABLE_CONTEXTS, models_report, units
from kvlab.specs import ModelSpec

#: The column of one tensor-parallel rank: so many ranks, at this context.
RANKS, RANK_TOKENS = 8, 32_768
HEAD = (
    ("model", "text"),
    *((f"at {tokens:,} tokens", "number") for tokens in TABLE_CONTEXTS),
    (f"at {RANK_TOKENS:,}, one of {RANKS} ranks", "number"),
    ("bytes a token, for good", "number"),
    ("bytes a token, at first", "number"),
    ("fixed state", "number"),
    ("layers", "text"),
    ("query / KV heads", "number"),
    ("head size", "number"),
)


def models_html() -> str:
    """The table and the list of sources, as one block of HTML without an empty line."""
    rows = models_report()
    head = "".join(f'<th scope="col" data-sort="{kind}">{escape(name)}</th>' for name, kind in HEAD)
    body = "\n".join(_row(row) for row in rows)
    sources = "\n".join(
        f"<li>{escape(row['name'])} (<code>{escape(row['hf_id'])}</code>): "
        f"{escape(row['source'])}</li>"
        for row in rows
    )
    return (
        '<div class="kvlab-scroll" tabindex="0" role="region" aria-label="All models">\n'
        '<table class="dataframe kvlab-table kvlab-sortable">\n'
        f"<caption>{len(rows)} models, bf16, one sequence</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
        f"<details>\n<summary>Where each config was read</summary>\n<ul>\n{sources}\n</ul>\n"
        "</details>"
    )


def _row(row: dict) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["layer_kinds"].items())
    heads = row["num_heads"] or 0
    spec = find_model(row["preset"])
    latent = next((layer.key_dim for layer in spec.layers if layer.kind == "latent"), None)
    cells = [
        *(_size(row.get(f"bytes_at_{tokens}")) for tokens in TABLE_CONTEXTS),
        _rank(spec),
        _count(row["kv_bytes_per_token_growing"]),
        _count(row["kv_bytes_per_token_filling"]),
        _size(row["fixed_bytes_per_sequence"]),
        (kinds, kinds),
        (f"{heads} / {row['num_kv_heads'] if latent is None else 'one row'}", heads),
        (f"{row['head_dim']}", row["head_dim"]) if latent is None else (f"row of {latent}", latent),
    ]
    tds = "".join(
        f'<td data-value="{escape(str(value))}">{escape(text)}</td>' for text, value in cells
    )
    name = escape(row["name"])
    return (
        f'<tr><th scope="row" data-value="{name.lower()}">{name}<br>'
        f"<code>{escape(row['preset'])}</code></th>{tds}</tr>"
    )


def _rank(spec: ModelSpec) -> tuple[str, int]:
    """What one rank keeps of one sequence; heads that cannot be shared out evenly are said so."""
    try:
        own = costs.per_rank(spec, RANKS)
    except costs.CostError:
        return "not divisible", -1
    fixed = costs.fixed_bytes_per_sequence(own)
    return _size(None if fixed is None else fixed + costs.kv_bytes(own, RANK_TOKENS))


def _count(value: int) -> tuple[str, int]:
    return f"{value:,}", value


def _size(value: int | None) -> tuple[str, int]:
    if value is None:
        return "not known", -1
    return ("none", 0) if value == 0 else (units.binary_bytes(value), value)
