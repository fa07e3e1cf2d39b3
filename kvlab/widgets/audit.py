"""The engine audit of the page with its name: paste a config and a start-up log."""

from __future__ import annotations

import json

import traitlets

from kvlab import units
from kvlab.audit import ask_audit
from kvlab.configs import model_names, preset
from kvlab.specs import DATA_DIR
from kvlab.widgets.base import LabWidget, Twin


class Audit(LabWidget):
    """An engine's figures beside the prediction, by the Python that `kvlab audit` runs.

    model     a name of data/models, used until a config is pasted
    examples  documented logs from data/engine_logs to begin with
    """

    script = "audit.js"
    models = traitlets.List().tag(sync=True)
    examples = traitlets.List().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    log = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)

    def __init__(self, **traits) -> None:
        super().__init__(**traits)
        self.models = [{"slug": name, "name": preset(name).name} for name in model_names()]
        folder = DATA_DIR / "engine_logs"
        self.examples = [
            {**entry, "text": (folder / entry["file"]).read_text("utf-8")}
            for entry in json.loads((folder / "index.json").read_text("utf-8"))["logs"]
        ]
        self.log = self.log or next(
            e["text"] for e in self.examples if e["file"] == "vllm-v1-two-lines.log"
        )
        self.answer = ask_audit(self.log, model=self.model)

    def twin(self) -> Twin:
        """The checks of the first log."""
        rows = [
            (
                check["name"],
                _shown(check["predicted"], check["unit"]),
                _shown(check["reported"], check["unit"]),
                "yes" if check["agrees"] else "no",
                "yes" if check["independent"] else "no",
            )
            for check in self.answer["checks"]
        ]
        head = ("check", "predicted", "reported", "agrees", "independent")
        return Twin(f"{self.answer['engine']} log, {self.answer['model']}", head, rows)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    return units.both_bytes(value) if unit == "bytes" else f"{value:,.10g} {unit}"
