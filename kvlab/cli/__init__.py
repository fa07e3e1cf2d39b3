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
from typing import Any

from kvlab import reports, units
from kvlab.cli import audit, kv
from kvlab.configs import find_model
from kvlab.errors import KvlabError


def _show(report: dict | list, as_json: bool, as_text: Callable[[Any], None]) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        as_text(report)


def _print_cost(report: dict) -> None:
    uncached, cached = report["uncached"], report["cached"]
    rows = [
        ("", "without cache", "with cache"),
        *(
            (label, units.flops(uncached[key]), units.flops(cached[key]))
            for label, key in (
                ("projections", "projection_flops"),
                ("attention", "attention_flops"),
                ("total", "total_flops"),
            )
        ),
    ]
    print(
        f"{report['model']}: {report['decode']:,} decode forwards after a prompt of "
        f"{report['prompt']:,} tokens\nP = {report['num_parameters']:,} ({report['accounting']})\n"
    )
    for label, *cells in rows:
        print(f"{label:<14}" + "".join(f"{cell:>18}" for cell in cells))
    print(
        f"\nratio                    {report['ratio']:,.1f} x"
        f"\nattention share, cached  {report['attention_share']:.2%}"
        f"\nrows thrown away, last   {report['rows_discarded_last_step']:,}"
        f"\nKV per token             {units.both_bytes(report['kv_bytes_per_token'])}"
        f"\nKV at the end            {units.both_bytes(report['kv_bytes_final'])}"
        f"\nweights read             {units.both_bytes(report['weight_bytes_read'])}"
        f"\nKV read                  {units.both_bytes(report['kv_bytes_read'])}"
        f"\nintensity at s = {report['context_mid']:<8,}{report['intensity_mid']:.3f} FLOP/byte"
        f"\nfloor at {units.decimal_bytes(report['bandwidth_bytes_per_second'])}/s"
        f"       {units.seconds(report['floor_seconds'])},"
        f" {units.seconds(report['floor_seconds_per_step'])} a step"
    )


def _cost(arguments: argparse.Namespace) -> int:
    report = reports.cost_report(
        find_model(arguments.model),
        arguments.prompt,
        arguments.decode,
        arguments.params,
        arguments.bandwidth,
    )
    _show(report, arguments.json, _print_cost)
    return 0


def _kv(arguments: argparse.Namespace) -> int:
    _show(arguments.answer(arguments), arguments.json, arguments.text)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    report = audit.audit_answer(arguments)
    _show(report, arguments.json, audit.print_audit)
    return 0 if report["agrees"] else 1


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other error of the command, and its help."""

    def error(self, message: str):
        self.exit(2, f"kvlab: {message}; `{self.prog} --help` lists what there is\n")


def _faults(arguments: argparse.Namespace) -> int:
    # The registry imports torch. Run as a program, it costs the other subcommands nothing.
    program = runpy.run_module("kvlab.faults")
    return program["main"](["--json"] if arguments.json else [])


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="kvlab", description="What decoding costs and what its cache holds."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    cost = commands.add_parser("cost", help="FLOPs, bytes and time floor of a run")
    cost.add_argument("model", help="a preset's name, such as llama-3-8b, or a config.json")
    cost.add_argument("--prompt", type=int, default=2048, help="p, tokens before decoding")
    cost.add_argument("--decode", type=int, default=512, help="n, decode forwards")
    cost.add_argument("--params", default="coarse", help="coarse, exact, or a number of parameters")
    cost.add_argument(
        "--bandwidth", type=float, default=reports.DEFAULT_BANDWIDTH, help="bytes per second"
    )
    cost.set_defaults(run=_cost)

    faults = commands.add_parser("faults", help="the known silent bugs and their detectors")
    faults.set_defaults(run=_faults)

    kv.add_commands(commands)
    for name in ("kv", "models"):
        commands.choices[name].set_defaults(run=_kv)

    audit.add_command(commands)
    commands.choices["audit"].set_defaults(run=_audit)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KvlabError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
