"""The roofline, with three decode steps on it that move as the context grows."""

from __future__ import annotations

import traitlets

from kvlab import costs, roofline
from kvlab.configs import hardware, preset
from kvlab.reports import accounting_parameters
from kvlab.specs import DATA_DIR, HardwareSpec
from kvlab.widgets.base import LabWidget, Twin
from kvlab.widgets.cost_table import FIELDS, dense_models

HEAD = ("step", "FLOP", "bytes", "FLOP per byte", "at least", "tokens per second", "bound by")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def cards() -> dict[str, HardwareSpec]:
    """Every device of data/hardware, by the name of its file."""
    names = sorted(path.stem for path in (DATA_DIR / "hardware").glob("*.json"))
    return {name: hardware(name) for name in names}


class Roofline(LabWidget):
    """Where a step stands under the two roofs of a card.

    model   a preset's name
    card    a name in data/hardware
    dtype   of weights, KV and arithmetic, one that the card has a rate for
    batch   sequences decoded together
    prompt, decode, step   context s = prompt + step
    """

    script = "roofline.js"
    uses_formulas = True
    models = traitlets.List().tag(sync=True)
    cards = traitlets.List().tag(sync=True)
    model = traitlets.Unicode("llama-3-8b").tag(sync=True)
    card = traitlets.Unicode("h100-sxm").tag(sync=True)
    dtype = traitlets.Unicode("bf16").tag(sync=True)
    batch = traitlets.Int(32).tag(sync=True)
    prompt = traitlets.Int(2048).tag(sync=True)
    decode = traitlets.Int(512).tag(sync=True)
    step = traitlets.Int(256).tag(sync=True)

    def __init__(self, **traits) -> None:
        models = [
            {field: getattr(spec, field) for field in FIELDS}
            | {"slug": slug, "name": spec.name, "P": accounting_parameters(spec, "coarse")[0]}
            for slug, spec in dense_models().items()
        ]
        devices = [
            {
                "slug": slug,
                "name": card.name,
                "bandwidth": card.bandwidth_bytes_per_second,
                "peaks": {k: v for k, v in card.peak_flops_per_second.items() if k in BYTES},
            }
            for slug, card in cards().items()
        ]
        super().__init__(models=models, cards=devices, **traits)

    def rows(self, step: int) -> list[tuple[str, ...]]:
        """The three steps at context prompt + step, as text: what the browser shows."""
        spec, card = preset(self.model), hardware(self.card)
        num_parameters, _ = accounting_parameters(spec, "coarse")
        width, s = BYTES[self.dtype], self.prompt + step
        peak, bandwidth = card.peak_flops_per_second[self.dtype], card.bandwidth_bytes_per_second
        kinds = {
            "without cache": (
                costs.uncached_step_flops(spec, num_parameters, s),
                costs.weight_bytes(num_parameters, width),
                1,
            )
        }
        for name, batch in (
            ("cached, one sequence", 1),
            (f"cached, batch {self.batch}", self.batch),
        ):
            kinds[name] = (
                roofline.batch_step_flops(spec, num_parameters, batch, s),
                roofline.batch_step_bytes(spec, num_parameters, batch, s, width),
                batch,
            )
        return [
            _row(name, flops, moved, tokens, peak, bandwidth)
            for name, (flops, moved, tokens) in kinds.items()
        ]

    def crossover(self) -> float:
        """Resident tokens at which KV outweighs the weights."""
        spec = preset(self.model)
        num_parameters, _ = accounting_parameters(spec, "coarse")
        return roofline.kv_weight_crossover_tokens(spec, num_parameters)

    def twin(self) -> Twin:
        """The three steps at the beginning, the middle and the end of the run."""
        body = []
        for step in sorted({1, max(1, self.decode // 2), self.decode}):
            for name, *cells in self.rows(step):
                body.append((f"{name}, s = {self.prompt + step:,}", *cells))
        return Twin(
            f"Decode steps under the roofs: {preset(self.model).name}, {self.dtype}, on "
            f"{hardware(self.card).name}",
            HEAD,
            body,
            note=f"KV outweighs the weights from {self.crossover():,.0f} resident tokens on. "
            "Coarse accounting; the uncached step is charged for the weights' bytes alone.",
        )


def _row(
    name: str, flops: float, moved: float, tokens: int, peak: float, bandwidth: float
) -> tuple[str, ...]:
    arithmetic = costs.compute_seconds(flops, peak)
    memory = costs.memory_seconds(moved, bandwidth)
    seconds = roofline.roofline_seconds(flops, moved, peak, bandwidth)
    return (
        name,
        _scaled(flops, ("", "k", "M", "G", "T", "P", "E", "Z"), "FLOP"),
        _scaled(moved, ("", "k", "M", "G", "T", "P"), "B"),
        f"{costs.intensity(flops, moved):,.2f}",
        f"{seconds * 1e3:,.3f} ms",
        f"{tokens / seconds:,.1f}",
        "arithmetic" if arithmetic > memory else "bytes",
    )


def _scaled(value: float, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while value >= 1000 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:,.2f} {prefixes[power]}{unit}"
