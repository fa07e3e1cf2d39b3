"""The book's cost table, stepped through the run: without a cache and with one."""

from __future__ import annotations

import traitlets

from kvlab import costs, units
from kvlab.configs import model_names, preset
from kvlab.reports import accounting_parameters
from kvlab.specs import ModelSpec
from kvlab.widgets.base import LabWidget, Twin

FIELDS = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
HEAD = ("", "without cache", "with cache", "ratio")


def dense_models() -> dict[str, ModelSpec]:
    """The presets the formulas of the table hold for: Llama-shaped, full attention throughout."""
    specs = {name: preset(name) for name in model_names()}
    return {
        name: spec
        for name, spec in specs.items()
        if spec.is_dense_llama and {layer.kind for _, layer in spec.layer_groups} == {"full"}
    }


class CostTable(LabWidget):
    """What decode steps 1..t of a run cost, for t the reader moves.

    model       a preset's name
    prompt      p
    decode      n
    accounting  "coarse" or "exact": which P the projections cost 2P for
    step        t; n // 2 at first
    """

    script = "cost_table.js"
    uses_formulas = True
    models = traitlets.List().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    prompt = traitlets.Int(2048).tag(sync=True)
    decode = traitlets.Int(512).tag(sync=True)
    accounting = traitlets.Unicode("coarse").tag(sync=True)
    step = traitlets.Int().tag(sync=True)

    def __init__(self, **traits) -> None:
        models = []
        for name, spec in dense_models().items():
            entry = {field: getattr(spec, field) for field in FIELDS}
            entry |= {"slug": name, "name": spec.name}
            for accounting in ("coarse", "exact"):
                entry[accounting], entry[f"{accounting}_text"] = accounting_parameters(
                    spec, accounting
                )
            models.append(entry)
        traits.setdefault("step", traits.get("decode", 512) // 2 or 1)
        super().__init__(models=models, **traits)

    def rows(self, step: int) -> list[tuple[str, str, str, str]]:
        """The table after t steps, as text: what the browser shows for the same state."""
        spec = preset(self.model)
        num_parameters, _ = accounting_parameters(spec, self.accounting)
        p, s = self.prompt, self.prompt + step
        read = costs.cached_step_bytes(spec, num_parameters, s)
        flops = {
            "this step": (
                costs.uncached_step_flops(spec, num_parameters, s),
                costs.cached_step_flops(spec, num_parameters, s),
            ),
            "projections so far": (
                costs.uncached_run_projection_flops(num_parameters, p, step),
                costs.cached_run_projection_flops(num_parameters, step),
            ),
            "attention so far": (
                costs.uncached_run_attention_flops(spec, p, step),
                costs.cached_run_attention_flops(spec, p, step),
            ),
        }
        projections, attention = flops["projections so far"], flops["attention so far"]
        flops["all so far"] = tuple(a + b for a, b in zip(projections, attention))
        rows = [
            (name, units.flops(a), units.flops(b), f"{a / b:,.1f}")
            for name, (a, b) in flops.items()
        ]
        a, b = (costs.intensity(x, read) for x in flops["this step"])
        rows.append(("FLOP per byte, this step", f"{a:,.2f}", f"{b:,.2f}", f"{a / b:,.1f}"))
        thrown = costs.logit_rows_discarded(s)
        rows.append(("logit rows thrown away, this step", f"{thrown:,}", "0", "–"))
        thrown_so_far = costs.sum_of_contexts(p, step) - step
        rows.append(("logit rows thrown away so far", f"{thrown_so_far:,}", "0", "–"))
        rows.append(("cache rows kept, each layer", "0", f"{s:,}", "–"))
        kept = units.binary_bytes(costs.kv_bytes(spec, s))
        rows.append(("cache kept, all layers", "0 B", kept, "–"))
        return rows

    def twin(self) -> Twin:
        """The run at five steps: the animation, read down the table."""
        spec = preset(self.model)
        num_parameters, accounting = accounting_parameters(spec, self.accounting)
        steps = sorted({max(1, round(self.decode * part / 4)) for part in range(5)})
        body = []
        for t in steps:
            cells = {name: row for name, *row in self.rows(t)}
            body.append(
                (
                    f"{t:,}",
                    f"{self.prompt + t:,}",
                    *cells["this step"][:2],
                    *cells["all so far"],
                    cells["logit rows thrown away so far"][0],
                    cells["cache kept, all layers"][1],
                )
            )
        head = (
            "step t",
            "context s",
            "this step, without cache",
            "with cache",
            "so far, without cache",
            "with cache",
            "ratio",
            "logit rows thrown away",
            "cache kept",
        )
        return Twin(
            f"What decoding costs: {spec.name}, prompt {self.prompt:,}, {self.decode:,} steps",
            head,
            body,
            note=f"Accounting: {accounting}, P = {num_parameters:,}. KV in 2 bytes an element.",
        )
