"""The step-through of chapter 7: requests as rows, engine steps as columns."""

from __future__ import annotations

import traitlets

from kvlab.scheduler import REASON_TEXT
from kvlab.widgets.base import LabWidget, Twin
from kvlab.workload import WORKLOADS, schedule_trace


class Steps(LabWidget):
    """Who runs how many tokens in which step, and why the others wait.

    workload   a name of kvlab.workload.WORKLOADS: the requests and limits that are shown first
    step       the step that is selected

    The first view is a trace that Python recorded when the widget was made. Every other view asks
    the same function again, in the kernel or in the page.
    """

    script = "steps.js"
    workload = traitlets.Unicode("small_pool").tag(sync=True)
    step = traitlets.Int(7).tag(sync=True)
    questions = traitlets.Dict().tag(sync=True)
    titles = traitlets.Dict().tag(sync=True)
    reason_text = traitlets.Dict().tag(sync=True)
    trace = traitlets.Dict().tag(sync=True)

    def __init__(self, workload: str = "small_pool", **traits) -> None:
        questions = {name: entry.question() for name, entry in WORKLOADS.items()}
        super().__init__(
            workload=workload,
            questions=questions,
            titles={name: entry.title for name, entry in WORKLOADS.items()},
            reason_text={str(reason): text for reason, text in REASON_TEXT.items()},
            trace=schedule_trace(**questions[workload]),
            **traits,
        )

    def twin(self) -> Twin:
        """One row a step: its mode, who runs how many tokens, who waits and why."""
        rows = [
            (
                record["step"],
                record["mode"],
                f"{record['used']} of {record['budget']}",
                ", ".join(_share_text(share) for share in record["shares"]) or "nobody",
                "; ".join(
                    f"{name}: {REASON_TEXT[reason]}" for name, reason in record["reasons"].items()
                )
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
            note=(
                f"{totals['num_steps']} steps, {totals['num_scheduled_tokens']} tokens computed, "
                f"{totals['num_cached_tokens']} spared by prefix hits, "
                f"{totals['num_preemptions']} preemptions, "
                f"{totals['num_recomputed_tokens']} tokens computed again."
            ),
        )


def _share_text(share: dict) -> str:
    extra = f" after {share['cached']} cached" if share["cached"] else ""
    return f"{share['id']} {share['kind']} {share['tokens']}{extra}"
