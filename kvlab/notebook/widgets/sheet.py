"""The calculator's widget: what fits a card.

It asks the same Python that the command line runs, in the kernel or in the page. The first answer
is computed when the widget is made, so the page shows it before any Python has been started.
"""

from __future__ import annotations

import traitlets

from kvlab.configs import hardware, hardware_names, model_index, preset
from kvlab.costs import FORMATS
from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.sheet import ask_capacity, units

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
