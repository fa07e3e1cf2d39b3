"""The launch of chapter 6: how splits fill a card, and which tiles are read in which turn."""

from __future__ import annotations

from itertools import product

import traitlets

from kvlab import costs
from kvlab.configs import hardware, preset
from kvlab.kernels.splits import ceil_div, split_table
from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.specs import ModelSpec

CARDS = ("t4", "l4", "a100-80gb", "h100-sxm")
SEQUENCES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (512, 2048, 4096, 8192, 16384, 32768)
#: What the reader may choose; 0 leaves it to the rule.
SPLITS = (0, 1, 2, 4, 8, 16, 32, 64)
TILE = 32


def launch_facts(
    spec: ModelSpec, multiprocessors: int | None, num_seqs: int, context: int, splits: int
) -> dict[str, float]:
    """One launch of one layer in bf16, as the widget draws it."""
    assert multiprocessors is not None, "data/hardware says how many each card has"
    table = split_table(num_seqs, spec.num_kv_heads, context, multiprocessors, TILE, splits or None)
    per_split = ceil_div(table["num_tiles"], table["num_splits"])
    used = ceil_div(table["num_tiles"], per_split)
    part = num_seqs * spec.num_heads * table["num_splits"] * (spec.head_dim + 1) * 4
    return {
        "splits": table["num_splits"],
        "tiles": table["num_tiles"],
        "per_split": per_split,
        "used": used,  # splits that got a tile at all
        "last": table["num_tiles"] - (used - 1) * per_split,  # tiles of the last of them
        "programs": table["num_programs"],
        "slots": table["num_slots"],
        "waves": table["num_waves"],
        "busy": round(table["efficiency"], 4),
        "kv_bytes": num_seqs * context * costs.layer_kv_bytes_per_token(spec.layers[0]),
        "part_bytes": part if table["num_splits"] > 1 else 0,
    }


class Splits(LabWidget):
    """Programs on a card, for every position of the controls; all numbers come from Python.

    facts   card -> sequences -> context -> splits -> values in the order of `names`
    """

    script = "splits.js"
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    cards = traitlets.Dict().tag(sync=True)
    model_name = traitlets.Unicode().tag(sync=True)
    num_kv_heads = traitlets.Int().tag(sync=True)
    tile_bytes = traitlets.Int().tag(sync=True)
    card = traitlets.Unicode("a100-80gb").tag(sync=True)
    num_seqs = traitlets.Int(1).tag(sync=True)
    context = traitlets.Int(4096).tag(sync=True)
    splits = traitlets.Int(1).tag(sync=True)

    def __init__(self, spec: ModelSpec | None = None, **traits) -> None:
        spec = spec or preset("llama-3-8b")
        self._spec = spec
        known = {card: hardware(card) for card in CARDS}
        facts: dict[str, dict] = {}
        for card, num_seqs, context, splits in product(CARDS, SEQUENCES, CONTEXTS, SPLITS):
            found = launch_facts(spec, known[card].num_multiprocessors, num_seqs, context, splits)
            by_context = facts.setdefault(card, {}).setdefault(str(num_seqs), {})
            by_context.setdefault(str(context), {})[str(splits)] = list(found.values())
        row_bytes = costs.layer_kv_bytes_per_token(spec.layers[0]) // spec.num_kv_heads
        super().__init__(
            names=list(found),
            facts=facts,
            cards={card: card_facts.name for card, card_facts in known.items()},
            model_name=spec.name,
            num_kv_heads=spec.num_kv_heads,
            tile_bytes=TILE * row_bytes,
            **traits,
        )

    def twin(self) -> Twin:
        """One row a batch size and way of splitting, on the card and at the context shown."""
        rows, multiprocessors = [], hardware(self.card).num_multiprocessors
        for num_seqs in SEQUENCES:
            for splits in (1, 0):
                found = launch_facts(self._spec, multiprocessors, num_seqs, self.context, splits)
                rows.append((
                    num_seqs, "none" if splits else f"{found['splits']:,}",
                    f"{found['programs']:,} on {found['slots']:,}", found["waves"],
                    f"{found['busy']:.0%}", f"{found['waves'] * found['per_split']:,}",
                ))  # fmt: skip
        return Twin(
            f"One layer of {self._spec.name}, {self.context:,} tokens, {self.cards[self.card]}",
            ("sequences", "splits", "programs on slots", "waves", "slots busy", "turns in a row"),
            rows,
            "Without splitting, and as the rule splits. A turn reads one tile of "
            f"{TILE} keys; turns in a row are what the clock sees.",
        )
