"""What every widget of the book shares: one base class, `show`, and the text twin.

A widget is a Python class and a JavaScript file. The Python side holds the state (traits) and the
text twin; the JavaScript side draws. The module a browser receives is composed from the files of
shared/, the formulas of costs.py that the widget calls, and the widget's own file, so nothing is
fetched from anywhere. The classes, by what they show:

    costs       Recompute, CostTable, Roofline, Shapes: what decoding costs, by generated formulas
    scenes      Pool, Steps: blocks and engine steps, played over kvlab's own files
    positions   Rotate, DriftCurves: what a position does to a score, and to the model
    splits      Splits: how the programs of a launch fill a card
    sheet       Capacity: what fits a card
    practice    Predict: the reader's guess

To write one:

    class Pool(LabWidget):
        script = "pool.js"            # beside this file; ends in `export default { render };`
        num_blocks = traitlets.Int(16).tag(sync=True)

        def twin(self) -> Twin:       # the same facts as a table: no script, print, screen reader
            return Twin("The pool", ("block", "owner"), [(1, "A"), (2, "B")])

and in the .js: `function render({ model, el }) { ... }` with the helpers of shared/*.js, and
with the functions of costs.py by their names.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import ClassVar

import anywidget
import traitlets
from IPython.display import HTML, display

from kvlab.notebook import page_questions
from kvlab.notebook.formulas import called_in, javascript

FOLDER = Path(__file__).resolve().parent
#: Put before each widget's own file, in this order.
SHARED = ("elements.js", "controls.js", "numbers.js", "python.js")
_counter = itertools.count(1)


@dataclass(frozen=True)
class Twin:
    """A widget said as a table: what is read without JavaScript, on paper and by a screen reader.

    Cells are text or numbers and are escaped. `note` is a sentence under the table. Cells of a
    column that holds numbers in every row are set flush right.
    """

    caption: str
    head: Sequence[object]
    rows: Sequence[Sequence[object]]
    note: str = ""
    folded: bool = False  # True where the table gives an answer away

    def html(self, twin_id: str = "") -> str:
        """The table inside an open <details>, which the widget folds once it has drawn itself."""
        head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in self.head)
        body = "".join(self._row(row) for row in self.rows)
        opened = "" if self.folded else " open"
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return (
            f'<details{opened} class="kvlab-twin" data-kvlab-twin="{escape(twin_id)}">'
            f"<summary>{escape(self.caption)} (as a table)</summary>"
            '<div class="kvlab-scroll" tabindex="0" role="region" '
            f'aria-label="{escape(self.caption)}">'
            f'<table class="dataframe kvlab-table"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{note}</details>"
        )

    @staticmethod
    def _row(row: Sequence[object]) -> str:
        first, *rest = (escape(str(cell)) for cell in row)
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        return f'<tr><th scope="row">{first}</th>{cells}</tr>'


class LabWidget(anywidget.AnyWidget):
    """Base of the book's widgets. Subclasses set `script`, their traits and `twin()`."""

    script: ClassVar[str] = ""
    #: Ties the widget to its text twin, so that the widget can fold the twin away.
    twin_id = traitlets.Unicode().tag(sync=True)

    def __init_subclass__(cls, **kwargs) -> None:
        if "script" in cls.__dict__:
            cls._esm = module_text(cls.script)
            cls._css = shared_css()
        super().__init_subclass__(**kwargs)

    def __init__(self, **traits) -> None:
        name = f"{type(self).__name__}-{next(_counter)}"
        # The same id in every run: a notebook that is built again comes out byte for byte equal.
        traits.setdefault("model_id", hashlib.sha256(name.encode()).hexdigest()[:32])
        super().__init__(twin_id=name, **traits)
        self.on_msg(_reply)

    def twin(self) -> Twin:
        """The widget's facts, in its present state, as a table."""
        raise NotImplementedError(f"{type(self).__name__} must say itself as a table: write twin()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def show(widget: LabWidget) -> None:
    """Display a widget, then its text twin. The last line of a widget's cell in a chapter."""
    display(widget)
    display(HTML(widget.twin().html(widget.twin_id)))


@cache
def module_text(script: str) -> str:
    """The ES module of one widget: shared helpers, the formulas it calls, the widget's own file.

    script   its file in this folder, or a whole path
    """
    shared = [(FOLDER / "shared" / name).read_text("utf-8") for name in SHARED]
    own = (FOLDER / script).read_text("utf-8")
    return "\n".join([*shared, javascript(called_in(own)), own])


@cache
def shared_css() -> str:
    """The style sheet of all widgets, also copied onto the rendered pages for the twins."""
    return (FOLDER / "shared.css").read_text("utf-8")


def _reply(widget: LabWidget, content: object, buffers: object) -> None:
    """Answer one `ask` of the browser's with the same function that Pyodide runs on a page."""
    if not isinstance(content, dict) or content.get("kind") != "kvlab-ask":
        return
    function, arguments = str(content.get("function")), json.dumps(content.get("arguments"))
    text = page_questions.answer_json(function, arguments)
    widget.send({"kind": "kvlab-answer", "id": content.get("id"), "text": text})
