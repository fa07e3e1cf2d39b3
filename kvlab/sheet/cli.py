"""The `kvlab` command: one subcommand per question, `--json` for machines.

Exit status: 0 answered, 1 an audit that does not agree, 2 the input cannot be read (one line on
standard error says why).
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.configs import find_model
from kvlab.costs import FORMATS
from kvlab.errors import KvlabError
from kvlab.sheet import units
from kvlab.sheet.checks import audit
from kvlab.sheet.kv import SheetError, kv_report, models_report, runnable_report
from kvlab.sheet.run import DEFAULT_BANDWIDTH, cost_report

# --- the answers for people -------------------------------------------------------------------


def print_cost(report: dict) -> None:
    """FLOPs of a run without a cache and with one, its bytes and its time floor."""
    print(
        f"{report['model']}: {report['decode']:,} decode forwards after a prompt of "
        f"{report['prompt']:,} tokens\nP = {report['num_parameters']:,} ({report['accounting']})\n"
    )
    print(f"{'':<14}{'without cache':>18}{'with cache':>18}")
    for label, key in (
        ("projections", "projection_flops"),
        ("attention", "attention_flops"),
        ("total", "total_flops"),
    ):
        uncached, cached = (units.flops(report[run][key]) for run in ("uncached", "cached"))
        print(f"{label:<14}{uncached:>18}{cached:>18}")
    windows = "".join(
        f"\nwindow of {int(window):<14,} {count} of {report['num_layers']} layers attend to no more"
        for window, count in report["windows"].items()
    )
    print(
        f"\nratio                    {report['ratio']:,.1f} x"
        f"\nattention share, cached  {report['attention_share']:.2%}"
        f"\nrows thrown away, last   {report['rows_discarded_last_step']:,}"
        f"\nKV per token             {units.amount(report['kv_bytes_per_token'])}"
        f"\nKV at the end            {units.amount(report['kv_bytes_final'])}{windows}"
        f"\nweights read             {units.amount(report['weight_bytes_read'])}"
        f"\nKV read                  {units.amount(report['kv_bytes_read'])}"
        f"\nintensity at s = {report['context_mid']:<8,}{report['intensity_mid']:.3f} FLOP/byte"
        f"\nfloor at {units.decimal_bytes(report['bandwidth_bytes_per_second'])}/s"
        f"       {units.seconds(report['floor_seconds'])},"
        f" {units.seconds(report['floor_seconds_per_step'])} a step"
    )


def print_kv(report: dict) -> None:
    """What one model's cache holds."""
    ranks, latent = report["tensor_parallel"], "latent" in " ".join(report["layer_runs"])
    how = f" on each of {ranks} ranks" * (ranks > 1) + f", {report['layout']} layout" * latent
    print(
        f"{report['model']}: KV cache in {report['kv_dtype']}{how}\n"
        f"layers                   {', '.join(report['layer_runs'][:8])}"
        f"{', ...' if len(report['layer_runs']) > 8 else ''}"
    )
    filling, growing = report["kv_bytes_per_token_filling"], report["kv_bytes_per_token_growing"]
    total, naive = report["kv_bytes"], report["kv_bytes_per_token_if_sized_from_query_heads"]
    capped, fixed = report["window_cap_bytes_per_sequence"], report["fixed_bytes_per_sequence"]
    padded, mtp = report["kv_bytes_if_padded_to_full"], report["mtp_kv_bytes_per_token"]
    written_out = report["kv_bytes_per_token_if_expanded"]
    indexer = report["indexer_bytes_per_token"]
    for label, value, shown in (
        ("per token, growing", growing, True),
        ("while windows fill", filling, filling != growing),
        ("windows, when full", capped, filling != growing),
        ("fixed, per sequence", fixed, fixed != 0),
        (f"{report['batch']:,} x {report['tokens']:,} tokens", total, True),
        ("if padded to full", padded, padded != total),
        ("sized from query heads", naive, naive != filling),
        ("if K and V expanded", written_out, written_out != filling),
        ("MTP layers, extra", mtp, mtp != 0),
        ("indexer, per token", indexer, indexer != 0),
    ):
        if shown:
            print(f"{label:<25}{units.amount(value)}")
    for note in report["notes"]:
        print(f"note: {note}")


def print_models(rows: list[dict]) -> None:
    """The table of models, or that of the model types that can be run."""
    if "architecture" in rows[0]:
        for row in rows:
            print(f"{row['model_type']:<10}{row['architecture']:<20}{', '.join(row['presets'])}")
        return
    print(f"{'preset':<26}{'B/token growing':>16}{'while filling':>16}  at 8,192 tokens")
    for row in rows:
        print(
            f"{row['preset']:<26}{row['kv_bytes_per_token_growing']:>16,}"
            f"{row['kv_bytes_per_token_filling']:>16,}  {units.amount(row.get('bytes_at_8192'))}"
        )


def print_audit(report: dict) -> None:
    """An engine's figures beside the prediction."""
    print(
        f"{report['engine']} log, {report['model']}, {report['kv_dtype']} cache, "
        f"{report['tensor_parallel']} rank(s): {report['verdict']}"
    )
    for check in report["checks"]:
        kind = "independent" if check["independent"] else "no proof"
        if check["independent"] and check["band"] is not None:
            kind += f", within {check['band']:.2%}"
        said = "DOES NOT AGREE" if check["agrees"] is False else check["verdict"]
        print(
            f"\n{check['name']}: {said} ({kind})\n"
            f"  predicted  {units.amount(check['predicted'], check['unit'])}\n"
            f"  reported   {units.amount(check['reported'], check['unit'])}\n"
            f"  {check['why']}"
        )
    for note in report["notes"]:
        print(f"note: {note}")


# --- the questions ----------------------------------------------------------------------------


def _cost(given: argparse.Namespace) -> dict:
    spec = find_model(given.model)
    return cost_report(spec, given.prompt, given.decode, given.params, given.bandwidth)


def _kv(given: argparse.Namespace) -> dict:
    names = ("tokens", "kv_dtype", "tp", "batch", "layout", "mtp", "block_size")
    return kv_report(find_model(given.model), **{name: getattr(given, name) for name in names})


def _models(given: argparse.Namespace) -> list[dict]:
    return runnable_report() if given.runnable else models_report(given.kv_dtype)


def _audit(given: argparse.Namespace) -> dict:
    return audit(find_model(given.config), _log_text(given.log), given.tp, given.kv_dtype)


def _log_text(path: str) -> str:
    """The log's text; `-` is standard input."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise SheetError(
            f"--log: given {path!r}, which cannot be read ({error.strerror}); name a text file"
        ) from None
    marked = raw[:2] in (b"\xff\xfe", b"\xfe\xff")  # as PowerShell writes what it redirects
    return raw.decode("utf-16" if marked else "utf-8", errors="replace")


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other error of the command, and its help."""

    def error(self, message: str):
        """Leave with status 2 and the complaint on standard error."""
        self.exit(2, f"kvlab: {message}; `{self.prog} --help` lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="kvlab", description="What decoding costs and what its cache holds."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    formats = ", ".join(FORMATS)

    def command(
        name: str, help_text: str, answer: Callable | None = None, text: Callable | None = None
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help_text)
        added.set_defaults(answer=answer, text=text)
        return added

    cost = command("cost", "FLOPs, bytes and time floor of a run", _cost, print_cost)
    cost.add_argument("model", help="a preset's name, such as llama-3-8b, or a config.json")
    cost.add_argument("--prompt", type=int, default=2048, help="p, tokens before decoding")
    cost.add_argument("--decode", type=int, default=512, help="n, decode forwards")
    cost.add_argument("--params", default="coarse", help="coarse, exact, or a number of parameters")
    cost.add_argument("--bandwidth", type=float, default=DEFAULT_BANDWIDTH, help="bytes per second")

    command("faults", "the known silent bugs and their detectors")

    kv = command("kv", "what one model's cache holds", _kv, print_kv)
    kv.add_argument("model", help="a name such as llama-3-8b, a Hugging Face id, or a config.json")
    kv.add_argument("--tokens", type=int, default=8192, help="N, tokens of each sequence")
    kv.add_argument("--kv-dtype", default="bf16", help=formats)
    kv.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel ranks; the answer is per rank"
    )
    kv.add_argument("--batch", type=int, default=1, help="sequences")
    kv.add_argument(
        "--layout", default="latent", help="latent or expanded: how an MLA model's rows are kept"
    )
    kv.add_argument("--mtp", action="store_true", help="count multi-token prediction layers too")
    kv.add_argument("--block-size", type=int, default=16, help="tokens in a page")

    models = command("models", "the table of models", _models, print_models)
    models.add_argument("--kv-dtype", default="bf16", help=formats)
    models.add_argument("--runnable", action="store_true", help="the model types that kvlab runs")

    check = command("audit", "an engine's start-up log against the prediction", _audit, print_audit)
    check.add_argument("--config", required=True, help="a preset's name or a config.json")
    check.add_argument("--log", required=True, help="the engine's log, or - for standard input")
    check.add_argument("--tp", type=int, help="tensor-parallel ranks, if the log does not say")
    check.add_argument("--kv-dtype", help="dtype of the cache, if the log does not say")

    for added in commands.choices.values():
        added.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    given = _parser().parse_args(argv)
    try:
        if given.command == "faults":
            # The registry imports torch. Run as a program, it costs the other commands nothing.
            status = runpy.run_module("kvlab.faults")["main"](["--json"] if given.json else [])
        else:
            report: Any = given.answer(given)
            if given.json:
                print(json.dumps(report, indent=2))
            else:
                given.text(report)
            wrong = given.command == "audit" and report["agrees"] is False
            status = 1 if wrong else 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:  # an extra that is not installed
        missing = (error.name or "").partition(".")[0]
        if missing == "kvlab":
            raise
        extra = "torch" if missing in ("torch", "safetensors", "tokenizers") else "notebook"
        print(f"kvlab: needs {missing}: pip install 'kvlab[{extra}]'", file=sys.stderr)
        return 2
    except KvlabError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
