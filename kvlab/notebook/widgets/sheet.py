"""The calculator's two widgets: what fits a card, and an engine's log beside the prediction.

Both ask the same Python that the command line runs, in the kernel or in the page. The first answer
is computed when the widget is made, so the page shows it before any Python has been started.
"""

from __future__ import annotations

import json

import traitlets

from kvlab.configs import hardware, hardware_names, model_index, model_names, preset
from kvlab.costs import FORMATS
from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.sheet import ask_audit, ask_capacity, units
from kvlab.specs import DATA_DIR

#: Rows of the plan: label, and the key of the answer.
PLAN = (
    ("the card's memory", "memory_bytes"),
    ("usable share of it", "usable_bytes"),
    ("weights", "weight_bytes_per_card"),
    ("left for the cache", "pool_bytes"),
    ("one sequence", "bytes_per_sequence"),
    ("all sequences", "needed_bytes"),
)


class Capacity(LabWidget):
    """The planner of chapter 3: a card, a model, a load; what fits, and what to change.

    model, card     names of data/models and data/hardware
    utilisation     share of the card that an engine lets itself use, in percent
    kv_dtype        a name of FORMATS
    tp              cards that the model is split over
    tokens, sequences   the load
    """

    script = "capacity.js"
    models: traitlets.List = traitlets.List().tag(sync=True)
    cards: traitlets.List = traitlets.List().tag(sync=True)
    formats: traitlets.List = traitlets.List().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    card = traitlets.Unicode("h100-sxm").tag(sync=True)
    utilisation = traitlets.Int(90).tag(sync=True)
    kv_dtype = traitlets.Unicode("bf16").tag(sync=True)
    tp = traitlets.Int(1).tag(sync=True)
    tokens = traitlets.Int(8192).tag(sync=True)
    sequences = traitlets.Int(64).tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)

    def __init__(self, **traits) -> None:
        super().__init__(**traits)
        self.models = [
            {"slug": stem, "name": facts["name"], "params": facts["params"]}
            for stem, facts in model_index().items()
        ]
        self.cards = [{"slug": name, "name": hardware(name).name} for name in hardware_names()]
        self.formats = list(FORMATS)
        self.answer = ask_capacity(**self.question())

    def question(self) -> dict:
        """What the widget asks first."""
        names = ("model", "card", "kv_dtype", "tp", "tokens", "sequences")
        utilisation = f"{self.utilisation / 100:.2f}"
        return {name: getattr(self, name) for name in names} | {"utilisation": utilisation}

    def twin(self) -> Twin:
        """The plan as a table, both units in every row of bytes."""
        answer, longest = self.answer, self.answer["longest_context"]
        rows = [
            *((label, units.both_bytes(answer[key])) for label, key in PLAN),
            ("sequences that fit", f"{answer['sequences_that_fit']:,}"),
            # None means that windows alone bound the cache.
            ("longest context each", "no limit" if longest is None else f"{longest:,} tokens"),
            ("it fits", "yes" if answer["fits"] else "no"),
        ]
        advice = "; or ".join(answer["advice"])
        return Twin(
            f"{preset(self.model).name} on {hardware(self.card).name}: {self.sequences:,} "
            f"sequences of {self.tokens:,} tokens, {self.kv_dtype}, "
            f"{self.utilisation} % of the card",
            ("", "per card"),
            rows,
            f"To make it fit: {advice}." if advice else "",
        )


class Audit(LabWidget):
    """The audit page: paste a config and a start-up log, as for `kvlab audit`.

    model     a name of data/models, used until a config is pasted
    examples  documented logs from data/engine_logs to begin with
    """

    script = "audit.js"
    models: traitlets.List = traitlets.List().tag(sync=True)
    examples: traitlets.List = traitlets.List().tag(sync=True)
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
        texts = {example["file"]: example["text"] for example in self.examples}
        self.log = self.log or texts["vllm-v1-two-lines.log"]
        self.answer = ask_audit(self.log, model=self.model)

    def twin(self) -> Twin:
        """The checks of the first log."""
        rows = [
            (
                check["name"],
                *(_shown(check[side], check["unit"]) for side in ("predicted", "reported")),
                *("yes" if check[key] else "no" for key in ("agrees", "independent")),
            )
            for check in self.answer["checks"]
        ]
        head = ("check", "predicted", "reported", "agrees", "independent")
        return Twin(f"{self.answer['engine']} log, {self.answer['model']}", head, rows)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    return units.both_bytes(value) if unit == "bytes" else f"{value:,.10g} {unit}"
