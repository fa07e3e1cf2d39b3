"""What chapters and pages show, and the exercises that a reader answers.

    display         a sentence with computed numbers, a table, a figure
    measure         what this machine does: seconds, FLOPs counted, bytes streamed
    widgets/        what a reader moves; exercises/ what a reader answers
    formulas        costs.py once more, as mathematics and as JavaScript
    cost_mistakes   wrong formulas that stood in public, beside the right ones
    pool_lab, pool_waste, simulation    blocks and steps without a model
    bench_record    the record of `make bench` as tables and figures
    page_questions  the closed list of what a page may ask Python
    page_figures    draws plotly's figures on the rendered pages

pool_lab, pool_waste, simulation, page_questions and cost_mistakes import the standard library and
kvlab alone: the rendered page runs them too.
"""

from kvlab.errors import KvlabError


class NotebookError(KvlabError):
    """A question, a drawing or a widget that cannot be made as it was asked for."""


def require(holds: object, message: str) -> None:
    """Raise NotebookError(message) unless `holds`: what was given, and what was expected."""
    if not holds:
        raise NotebookError(message)
