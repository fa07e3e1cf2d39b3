"""The questions a page may ask Python: a closed list of functions, JSON in and JSON out.

In a notebook the kernel answers them; on the rendered page the same files answer inside the
browser (Pyodide). That is why every module named here imports the standard library and kvlab's
own stdlib-only files, nothing else. A function takes keyword arguments that JSON can carry and
returns what JSON can carry. Nothing outside the list can be called, and text is never run.

To add one, add a line to FUNCTIONS: the name a widget asks for, and `module:function`.
"""

from __future__ import annotations

import importlib
import json

from kvlab.notebook import require

#: name -> "module:function"
FUNCTIONS: dict[str, str] = {
    "echo": "kvlab.notebook.page_questions:echo",
    "exercise": "kvlab.notebook.exercises:ask_exercise",
    "kv": "kvlab.sheet:ask_kv",
    "audit": "kvlab.sheet:ask_audit",
    "capacity": "kvlab.sheet:ask_capacity",
    "pool_trace": "kvlab.notebook.pool_lab:pool_trace",
    "schedule_trace": "kvlab.notebook.simulation:schedule_trace",
}


def echo(**arguments: object) -> dict:
    """Give the arguments back: what tests of the transport ask for."""
    return arguments


def answer_json(function: str, arguments_json: str) -> str:
    """Call one listed function with keyword arguments, over text.

    Returns {"ok": its answer} or {"error": {"name", "message"}}, and never raises.
    """
    known = ", ".join(sorted(FUNCTIONS))
    try:
        require(
            function in FUNCTIONS,
            f"{function!r} is not a question this book answers; ask one of {known}",
        )
        arguments = json.loads(arguments_json)
        require(
            isinstance(arguments, dict),
            f"arguments of {function} must be an object, not {arguments!r}",
        )
        module, name = FUNCTIONS[function].split(":")
        return json.dumps({"ok": getattr(importlib.import_module(module), name)(**arguments)})
    except Exception as error:  # the page shows it; a kernel must outlive a bad question
        return json.dumps({"error": {"name": type(error).__name__, "message": str(error)}})
