"""The block pool of chapter 5: a workload played over kvlab's own blocks, to step and to break."""

from __future__ import annotations

import traitlets

from kvlab.blocks import EVICTION_POLICIES
from kvlab.paging.breaks import BREAKS
from kvlab.paging.lab import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_OPERATIONS, TEXTS, TOUR, pool_trace
from kvlab.tables import FULL_HIT_RULES
from kvlab.widgets.base import LabWidget, Twin


class Pool(LabWidget):
    """Blocks, tables and free list after each operation; every token leads to its slot.

    step   the state that is shown

    The first view is a trace that Python recorded when the widget was made. Every other view asks
    the same function again, in the kernel or in the page.
    """

    script = "pool.js"
    step = traitlets.Int(10).tag(sync=True)
    num_blocks = traitlets.Int(12).tag(sync=True)
    block_size = traitlets.Int(4).tag(sync=True)
    trace = traitlets.Dict().tag(sync=True)
    menus = traitlets.Dict().tag(sync=True)

    def __init__(self, **traits) -> None:
        size = {key: traits.get(key, getattr(Pool, key).default_value)
                for key in ("num_blocks", "block_size")}  # fmt: skip
        menus = {
            "texts": {name: " ".join(words[:4]) + " ..." for name, words in TEXTS.items()},
            "longest": min(len(words) for words in TEXTS.values()),
            "breaks": {name: text for name, (text, _) in BREAKS.items()},
            "eviction": list(EVICTION_POLICIES),
            "full_hit": list(FULL_HIT_RULES),
            "limits": [MAX_BLOCKS, MAX_BLOCK_SIZE, MAX_OPERATIONS],
        }
        super().__init__(trace=pool_trace(TOUR, **size), menus=menus, **traits)

    def twin(self) -> Twin:
        """One row an operation: what happened, and what the pool looks like then."""
        rows = [
            (
                index,
                state["text"],
                state["counts"]["in_use"],
                state["counts"]["free"],
                state["counts"]["cached"],
                "; ".join(f"{s['name']}: {s['table']}" for s in state["sequences"]) or "none",
            )
            for index, state in enumerate(self.trace["states"])
        ]
        head = ("step", "what happened", "in use", "free", "of these cached", "block tables")
        return Twin(
            f"A pool of {self.num_blocks} blocks of {self.block_size} tokens",
            head,
            rows,
            "Position p of a sequence lies in block table[p // block_size], at offset "
            "p % block_size. check_integrity() was silent at every step.",
        )
