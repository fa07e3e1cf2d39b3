"""Two widgets that only pages show: every exercise of the book, and the audit of a log."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import traitlets

from kvlab.configs import model_names, preset
from kvlab.notebook import exercises
from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.sheet import ask_audit, units
from kvlab.specs import DATA_DIR

HERE = Path(__file__).resolve().parent


class Progress(LabWidget):
    """Every exercise of the book with a place for its answer.

    Answers are checked by kvlab's own checkers, in the page or by the kernel. What is solved is
    kept in the browser's localStorage on the page, and in the kernel in a notebook.
    """

    script = str(HERE / "progress.js")
    exercises: traitlets.List = traitlets.List().tag(sync=True)

    def __init__(self, **traits) -> None:
        super().__init__(**traits)
        self.exercises = [
            {
                "id": exercise.id,
                "chapter": chapter,
                "title": exercise.title,
                "question": inspect.cleandoc(exercise.question),
                "hint": exercise.hint,
                "kind": _kind(exercise),
            }
            for chapter in exercises.CHAPTERS
            for exercise in exercises.chapter_exercises(chapter)
        ]

    def twin(self) -> Twin:
        """One row an exercise."""
        where = {"notebook": "in the notebook", "value": "here", "code": "here"}
        rows = [(e["id"], e["title"], e["question"], where[e["kind"]]) for e in self.exercises]
        return Twin("All exercises", ("number", "title", "question", "where"), rows)


def _kind(exercise: exercises.Exercise) -> str:
    """value or code where the page can check it, notebook where it needs torch."""
    if exercise.needs_torch:
        return "notebook"
    return "code" if callable(exercise.solution) else "value"


class Audit(LabWidget):
    """The audit page: paste a config and a start-up log, as for `kvlab audit`.

    model     a name of data/models, used until a config is pasted
    examples  documented logs from data/engine_logs to begin with
    """

    script = str(HERE / "audit.js")
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
                {True: "yes", False: "no", None: "cannot be told"}[check["agrees"]],
                _proof(check),
            )
            for check in self.answer["checks"]
        ]
        head = ("check", "predicted", "reported", "agrees", "proof")
        return Twin(f"{self.answer['engine']} log, {self.answer['model']}", head, rows)


def _proof(check: dict) -> str:
    """Whether the check could have failed for a wrong model, and how narrow it is."""
    if not check["independent"]:
        return "no"
    return "yes" if check["band"] is None else f"yes, within {100 * check['band']:.2g} %"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    return units.both_bytes(value) if unit == "bytes" else f"{value:,.10g} {unit}"
