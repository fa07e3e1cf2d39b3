"""What the reader answers before a result is shown: a guess."""

from __future__ import annotations

import hashlib
import math

import traitlets

from kvlab.notebook import require
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
