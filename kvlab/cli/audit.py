"""`kvlab audit`: an engine's start-up log against the prediction, for people and as JSON.

Exit status: 0 the log agrees, 1 it does not, 2 it cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvlab import units
from kvlab.audit import LogError, audit
from kvlab.configs import find_model


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    return units.both_bytes(value) if unit == "bytes" else f"{value:,.10g} {unit}"


def print_audit(report: dict) -> None:
    """The audit for people."""
    verdict = "agrees" if report["agrees"] else "does not agree"
    print(
        f"{report['engine']} log, {report['model']}, {report['kv_dtype']} cache, "
        f"{report['tensor_parallel']} rank(s): {verdict}"
    )
    for check in report["checks"]:
        kind = "independent" if check["independent"] else "follows from other figures"
        print(
            f"\n{check['name']}: {'agrees' if check['agrees'] else 'DOES NOT AGREE'} ({kind})\n"
            f"  predicted  {_value(check['predicted'], check['unit'])}\n"
            f"  reported   {_value(check['reported'], check['unit'])}\n"
            f"  {check['why']}"
        )
    for note in report["notes"]:
        print(f"note: {note}")


def read_text(path: str) -> str:
    """The log's text; `-` is standard input."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise LogError(
            f"--log: given {path!r}, which cannot be read ({error.strerror}); name a text file"
        ) from None
    marked = raw[:2] in (b"\xff\xfe", b"\xfe\xff")  # as PowerShell writes what it redirects
    return raw.decode("utf-16" if marked else "utf-8", errors="replace")


def audit_answer(arguments: argparse.Namespace) -> dict:
    """The answer to `kvlab audit`."""
    return audit(
        find_model(arguments.config), read_text(arguments.log), arguments.tp, arguments.kv_dtype
    )


def add_command(commands) -> None:
    """Add `audit` to the command line's subcommands."""
    parser = commands.add_parser("audit", help="an engine's start-up log against the prediction")
    parser.add_argument("--config", required=True, help="a preset's name or a config.json")
    parser.add_argument("--log", required=True, help="the engine's log, or - for standard input")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks, if the log does not say")
    parser.add_argument("--kv-dtype", help="dtype of the cache, if the log does not say")
