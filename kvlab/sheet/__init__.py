"""The calculator: what a model's cache holds, what a run costs, whether an engine's log is right.

    from kvlab.sheet import kv_report, cost_report, capacity_report, audit

    kv_report(spec)            bytes of a model's cache; models_report() of every preset's
    capacity_report(spec, ..)  what fits on a card, and what to change where it does not
    cost_report(spec)          FLOPs, bytes and time floor of n decode forwards
    audit(spec, log_text)      an engine's start-up log against the prediction; read_log(text) alone
    ask_kv, ask_capacity, ask_audit    the same for names and pasted text, as a page asks

Answers are dicts of plain JSON values. Whatever cannot be answered is a SheetError; a model that a
formula does not cover is the formula's CostError, a config that cannot be read the reader's
ConfigError. `kvlab.sheet.cli` is the command line. Everything here uses the standard library alone,
so that it also runs inside the rendered page.
"""

from kvlab.sheet import units
from kvlab.sheet.checks import ask_audit, audit
from kvlab.sheet.kv import (
    TABLE_CONTEXTS,
    SheetError,
    ask_capacity,
    ask_kv,
    capacity_report,
    kv_report,
    models_report,
    storage_format,
)
from kvlab.sheet.logs import read_log
from kvlab.sheet.pools import engine_rules
from kvlab.sheet.run import DEFAULT_BANDWIDTH, accounting_parameters, cost_report

__all__ = [
    "DEFAULT_BANDWIDTH",
    "TABLE_CONTEXTS",
    "SheetError",
    "accounting_parameters",
    "ask_audit",
    "ask_capacity",
    "ask_kv",
    "audit",
    "capacity_report",
    "cost_report",
    "engine_rules",
    "kv_report",
    "models_report",
    "read_log",
    "storage_format",
    "units",
]
