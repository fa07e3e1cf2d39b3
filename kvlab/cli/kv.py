"""`kvlab kv MODEL` and `kvlab models`: what a cache holds, for one model and for all of them."""

from __future__ import annotations

import argparse

from kvlab import units
from kvlab.configs import find_model
from kvlab.kv_formats import FORMATS
from kvlab.reports.kv import kv_report, models_report


def print_kv(report: dict) -> None:
    """The report for people."""
    ranks, latent = report["tensor_parallel"], "latent" in " ".join(report["layer_runs"])
    how = f" on each of {ranks} ranks" * (ranks > 1) + f", {report['layout']} layout" * latent
    print(
        f"{report['model']}: KV cache in {report['kv_dtype']}{how}\n"
        f"layers                   {', '.join(report['layer_runs'][:8])}"
        f"{', ...' if len(report['layer_runs']) > 8 else ''}"
    )
    filling, growing = report["kv_bytes_per_token_filling"], report["kv_bytes_per_token_growing"]
    lines = [("per token, growing", growing)]
    if filling != growing:
        lines += [
            ("while windows fill", filling),
            ("windows, when full", report["window_cap_bytes_per_sequence"]),
        ]
    fixed = report["fixed_bytes_per_sequence"]
    if fixed != 0:
        lines.append(("fixed, per sequence", fixed))
    name = f"{report['batch']:,} x {report['tokens']:,} tokens"
    lines.append((name, report["kv_bytes"]))
    if report["kv_bytes_if_padded_to_full"] != report["kv_bytes"]:
        lines.append(("if padded to full", report["kv_bytes_if_padded_to_full"]))
    naive = report["kv_bytes_per_token_if_sized_from_query_heads"]
    if naive != filling:
        lines.append(("sized from query heads", naive))
    if report["kv_bytes_per_token_if_expanded"] != filling:
        lines.append(("if K and V expanded", report["kv_bytes_per_token_if_expanded"]))
    if report["mtp_kv_bytes_per_token"]:
        lines.append(("MTP layers, extra", report["mtp_kv_bytes_per_token"]))
    for label, value in lines:
        print(f"{label:<25}{'not known' if value is None else units.both_bytes(value)}")
    for note in report["notes"]:
        print(f"note: {note}")


def print_models(rows: list[dict]) -> None:
    """The table for people."""
    print(f"{'preset':<26}{'B/token growing':>16}{'while filling':>16}  at 8,192 tokens")
    for row in rows:
        at = row.get("bytes_at_8192")
        print(
            f"{row['preset']:<26}{row['kv_bytes_per_token_growing']:>16,}"
            f"{row['kv_bytes_per_token_filling']:>16,}  "
            f"{'not known' if at is None else units.both_bytes(at)}"
        )


def kv_answer(arguments: argparse.Namespace) -> dict:
    """The answer to `kvlab kv`."""
    return kv_report(
        find_model(arguments.model),
        tokens=arguments.tokens,
        kv_dtype=arguments.kv_dtype,
        tp=arguments.tp,
        batch=arguments.batch,
        layout=arguments.layout,
        mtp=arguments.mtp,
        block_size=arguments.block_size,
    )


def add_commands(commands) -> None:
    """Add `kv` and `models` to the command line's subcommands."""
    kv = commands.add_parser("kv", help="what one model's cache holds")
    kv.add_argument("model", help="a name such as llama-3-8b, a Hugging Face id, or a config.json")
    kv.add_argument("--tokens", type=int, default=8192, help="N, tokens of each sequence")
    kv.add_argument("--kv-dtype", default="bf16", help=", ".join(FORMATS))
    kv.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel ranks; the answer is per rank"
    )
    kv.add_argument("--batch", type=int, default=1, help="sequences")
    kv.add_argument(
        "--layout", default="latent", help="latent or expanded: how an MLA model's rows are kept"
    )
    kv.add_argument("--mtp", action="store_true", help="count multi-token prediction layers too")
    kv.add_argument("--block-size", type=int, default=16, help="tokens in a page")
    kv.set_defaults(answer=kv_answer, text=print_kv)

    models = commands.add_parser("models", help="the table of models")
    models.add_argument("--kv-dtype", default="bf16", help=", ".join(FORMATS))
    models.set_defaults(
        answer=lambda arguments: models_report(arguments.kv_dtype), text=print_models
    )
