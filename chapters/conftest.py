"""Lets `pytest --nbval chapters` compare notebooks that hold no execution counts.

nbval takes a cell without a count for one that was never run. The committed notebooks were all run
from top to bottom (tools/build_notebooks.py) and keep no counts, so that adding a cell changes one
cell; here each gets its place back before nbval looks.
"""

from __future__ import annotations


def pytest_collection_modifyitems(items: list) -> None:
    """Give each code cell of a notebook the count that a fresh run gives it."""
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and cell.get("execution_count") is None:
            cell["execution_count"] = item.cell_num + 1
