"""What the reader answers: a guess before its result, and the exercises of the whole book."""

from __future__ import annotations

import hashlib
import inspect
import math

import traitlets

from kvlab.notebook import exercises, require
from kvlab.notebook.widgets import LabWidget, Twin


class Predict(LabWidget):
    """Ask for a number; show the computed one, and the ratio, only after the reader commits.

    question     one sentence that says what is asked, and per what
    answer       the computed number (never typed)
    unit         shown after both numbers, such as "GiB" or "times"
    explanation  a sentence shown with the answer

    On the rendered page the committed guess is kept in the browser's localStorage, under `key`;
    in a notebook it is the trait `guess` (0 while `committed` is False).
    """

    script = "predict.js"
    question = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Float().tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    explanation = traitlets.Unicode().tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)
    guess = traitlets.Float(0.0).tag(sync=True)
    committed = traitlets.Bool(False).tag(sync=True)

    def __init__(self, question: str, answer: float, unit: str = "", explanation: str = "") -> None:
        answer = float(answer)
        require(math.isfinite(answer), f"answer: given {answer}; expected a finite number")
        key = hashlib.sha256(question.encode()).hexdigest()[:12]
        super().__init__(
            question=question, answer=answer, unit=unit, explanation=explanation, key=key
        )

    def twin(self) -> Twin:
        """Question and answer: on paper there is nothing to hold back."""
        shown = f"{self.answer:,.4g} {self.unit}".strip()
        head, row = ("question", "computed answer"), (self.question, shown)
        return Twin("The computed answer", head, [row], self.explanation, folded=True)


class Progress(LabWidget):
    """Every exercise of the book with a place for its answer.

    Answers are checked by kvlab's own checkers, in the page or by the kernel. What is solved is
    kept in the browser's localStorage on the page, and in the kernel in a notebook.
    """

    script = "progress.js"
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
