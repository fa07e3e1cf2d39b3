"""Every exercise of the book on one page: done, left, and most of them answerable right there."""

from __future__ import annotations

import inspect

import traitlets

from kvlab.notebook import exercises
from kvlab.widgets.base import LabWidget, Twin


def _kind(exercise: exercises.Exercise) -> str:
    """value or code where the page can check it, notebook where it needs torch."""
    if exercises.needs_torch(exercise):
        return "notebook"
    return "code" if callable(exercise.solution) else "value"


class Progress(LabWidget):
    """The list of exercises with a place for each answer.

    Answers are checked by kvlab.exercises itself, in the page or by the kernel. What is solved is
    kept in the browser's localStorage on the page, and in the kernel in a notebook.
    """

    script = "progress.js"
    exercises = traitlets.List().tag(sync=True)

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
