"""The triangle of chapter 1: which tokens each decode step computes, and how many again."""

from __future__ import annotations

import traitlets

from kvlab import costs
from kvlab.specs import ModelSpec
from kvlab.widgets.base import LabWidget, Twin


class Recompute(LabWidget):
    """Steps as rows, tokens as columns; the cells a naive loop computes for the second time.

    spec            the model whose layers are counted
    prompt, decode  p and n, small enough to draw
    step            t of the row shown last
    """

    script = "recompute.js"
    uses_formulas = True
    num_layers = traitlets.Int().tag(sync=True)
    model_name = traitlets.Unicode().tag(sync=True)
    prompt = traitlets.Int(6).tag(sync=True)
    decode = traitlets.Int(8).tag(sync=True)
    step = traitlets.Int(5).tag(sync=True)

    def __init__(self, spec: ModelSpec, **traits) -> None:
        self._spec = spec
        super().__init__(num_layers=spec.num_layers, model_name=spec.name, **traits)

    def twin(self) -> Twin:
        """One row a step: what is fed, what of it is new, what is done again and thrown away."""
        rows = []
        for t in range(1, self.decode + 1):
            context = self.prompt + t
            again = costs.kv_rows_recomputed(self._spec, self.prompt, t)
            rows.append((t, context, 1, costs.logit_rows_discarded(context), f"{again:,}"))
        return Twin(
            f"What a naive loop repeats after a prompt of {self.prompt}",
            ("step t", "tokens fed", "new", "logit rows thrown away", "K/V rows repeated so far"),
            rows,
            note=f"K/V rows are counted over the {self.num_layers} layers of {self.model_name}.",
        )
