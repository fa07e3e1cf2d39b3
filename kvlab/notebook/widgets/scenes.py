"""Two step-throughs: the block pool of chapter 5, and the engine's steps of chapter 7.

The first view is a trace that Python recorded when the widget was made. Every other view asks the
same function again, in the kernel or in the page.
"""

from __future__ import annotations

import traitlets

from kvlab.notebook import pool_lab
from kvlab.notebook.policies import EVICTION, FULL_HIT
from kvlab.notebook.simulation import REASON_TEXT, WORKLOADS, schedule_trace
from kvlab.notebook.widgets import LabWidget, Twin


class Pool(LabWidget):
    """Blocks, tables and free list after each operation; every token leads to its slot.

    step   the state that is shown
    """

    script = "pool.js"
    step = traitlets.Int(10).tag(sync=True)
    num_blocks = traitlets.Int(12).tag(sync=True)
    block_size = traitlets.Int(4).tag(sync=True)
    trace = traitlets.Dict().tag(sync=True)
    menus = traitlets.Dict().tag(sync=True)

    def __init__(self, **traits) -> None:
        super().__init__(**traits)
        self.trace = pool_lab.pool_trace(
            pool_lab.TOUR, num_blocks=self.num_blocks, block_size=self.block_size
        )
        texts = pool_lab.TEXTS
        self.menus = {
            "texts": {name: " ".join(words[:4]) + " ..." for name, words in texts.items()},
            "longest": min(len(words) for words in texts.values()),
            "breaks": {name: text for name, (text, _) in pool_lab.BREAKS.items()},
            "eviction": list(EVICTION),
            "full_hit": list(FULL_HIT),
            "limits": [pool_lab.MAX_BLOCKS, pool_lab.MAX_BLOCK_SIZE, pool_lab.MAX_OPERATIONS],
        }

    def twin(self) -> Twin:
        """One row an operation: what happened, and what the pool looks like then."""
        rows = [
            (
                index,
                state["text"],
                *(state["counts"][name] for name in ("in_use", "free", "cached")),
                "; ".join(f"{s['name']}: {s['table']}" for s in state["sequences"]) or "none",
            )
            for index, state in enumerate(self.trace["states"])
        ]
        return Twin(
            f"A pool of {self.num_blocks} blocks of {self.block_size} tokens",
            ("step", "what happened", "in use", "free", "of these cached", "block tables"),
            rows,
            "Position p of a sequence lies in block table[p // block_size], at offset "
            "p % block_size. check_tables() was silent at every step.",
        )


class Steps(LabWidget):
    """Requests as rows, engine steps as columns: who runs how many tokens, and why others wait.

    workload   a name of WORKLOADS: the requests and limits that are shown first
    step       the step that is selected
    """

    script = "steps.js"
    workload = traitlets.Unicode("small_pool").tag(sync=True)
    step = traitlets.Int(7).tag(sync=True)
    questions = traitlets.Dict().tag(sync=True)
    titles = traitlets.Dict().tag(sync=True)
    reason_text = traitlets.Dict().tag(sync=True)
    trace = traitlets.Dict().tag(sync=True)

    def __init__(self, workload: str = "small_pool", **traits) -> None:
        super().__init__(workload=workload, **traits)
        self.questions = {name: entry.question() for name, entry in WORKLOADS.items()}
        self.titles = {name: entry.title for name, entry in WORKLOADS.items()}
        self.reason_text = {str(reason): text for reason, text in REASON_TEXT.items()}
        self.trace = schedule_trace(**self.questions[workload])

    def twin(self) -> Twin:
        """One row a step: its mode, who runs how many tokens, who waits and why."""
        rows = [
            (
                record["step"],
                record["mode"],
                f"{record['used']} of {record['budget']}",
                ", ".join(_share_text(share) for share in record["shares"]) or "nobody",
                "; ".join(f"{name}: {REASON_TEXT[r]}" for name, r in record["reasons"].items())
                or "nobody",
                record["free_after"],
            )
            for record in self.trace["steps"]
        ]
        totals = self.trace["totals"]
        return Twin(
            f"Engine steps: {self.titles[self.workload]}",
            ("step", "mode", "tokens", "who runs", "who waits, and why", "free blocks after"),
            rows,
            f"{totals['num_steps']} steps, {totals['num_scheduled_tokens']} tokens computed, "
            f"{totals['num_cached_tokens']} spared by prefix hits, "
            f"{totals['num_preemptions']} preemptions, "
            f"{totals['num_recomputed_tokens']} tokens computed again.",
        )


def _share_text(share: dict) -> str:
    extra = f" after {share['cached']} cached" if share["cached"] else ""
    return f"{share['id']} {share['kind']} {share['tokens']}{extra}"
