"""The calculator: what a run costs, what a cache holds, what fits, what an engine's log says.

    cost_report(spec, prompt, decode)    FLOPs, bytes and time floor of a run
    kv_report(spec, tokens)              what one rank keeps for its sequences
    models_report()                      the table of all models
    capacity_report(spec, memory, ...)   what fits on a card, and what to change where it does not
    audit(spec, log_text)                a start-up log against the prediction
    ask_...(model=, config=)             the same for a page: a preset's name or a pasted config

Plain JSON values in and out, standard library only: the command line (cli), the widgets and the
rendered pages give the same answer, or the same named error. `units` writes numbers for people.
"""

from kvlab.sheet.audit import ask_audit, audit
from kvlab.sheet.kv import (
    TABLE_CONTEXTS,
    SheetError,
    ask_capacity,
    ask_formats,
    ask_kv,
    ask_models,
    capacity_report,
    kv_report,
    models_report,
    storage_format,
)
from kvlab.sheet.logs import read_log
from kvlab.sheet.run import DEFAULT_BANDWIDTH, accounting_parameters, cost_report

__all__ = [
    "DEFAULT_BANDWIDTH", "TABLE_CONTEXTS", "SheetError", "accounting_parameters", "ask_audit",
    "ask_capacity", "ask_formats", "ask_kv", "ask_models", "audit", "capacity_report",
    "cost_report", "kv_report", "models_report", "read_log", "storage_format",
]  # fmt: skip
