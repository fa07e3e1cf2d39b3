"""The files that Python in the page needs: what its questions can reach, and the facts in data/.

The list is not written down anywhere: it is every kvlab module that the functions of
`kvlab.notebook.page_questions.FUNCTIONS` import, found by reading imports. A module on it that
imports anything but the standard library and kvlab is an error here, before it could be one in a
reader's browser.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import kvlab
from kvlab.notebook import NotebookError
from kvlab.notebook.page_questions import FUNCTIONS
from kvlab.specs import DATA_DIR

PACKAGE = Path(kvlab.__file__).resolve().parent
#: Facts above this size (measurements, mostly) stay out of the page.
MAX_DATA_BYTES = 100_000


def page_modules() -> list[str]:
    """Names of the kvlab modules that Python in the page needs, sorted."""
    asked = {name: place.split(":")[0] for name, place in FUNCTIONS.items()}
    todo = ["kvlab.notebook.page_questions", *asked.values()]
    # A chapter's exercises are loaded by their number when one of them is first asked for.
    chapters = _path(asked["exercise"]).parent.glob("ch[0-9][0-9].py")
    todo += [f"{asked['exercise']}.{path.stem}" for path in chapters]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        todo += [parent] if parent else []
        todo += _imports(name)
    return sorted(seen)


def page_files() -> dict[str, str]:
    """Path below the page's Python folder -> text: the modules and the small files of data/."""
    files = {}
    for name in page_modules():
        path = _path(name)
        files[path.relative_to(PACKAGE.parent).as_posix()] = path.read_text("utf-8")
    for path in sorted(DATA_DIR.rglob("*")):
        if path.suffix in (".json", ".txt", ".log") and path.stat().st_size <= MAX_DATA_BYTES:
            place = f"kvlab/data/{path.relative_to(DATA_DIR).as_posix()}"
            files[place] = path.read_text("utf-8")
    return files


def page_script() -> str:
    """python.js of the rendered book: hands the files to page.js."""
    return f"globalThis.kvlabPage.python({json.dumps(page_files())});\n"


def _path(name: str) -> Path:
    below = PACKAGE.parent.joinpath(*name.split("."))
    return below / "__init__.py" if below.is_dir() else below.with_suffix(".py")


def _imports(name: str) -> list[str]:
    """kvlab modules that one module imports; anything else must be the standard library."""
    found = []
    for node in ast.walk(ast.parse(_path(name).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if _path(n).exists() else node.module for n in names]
        else:
            continue
        for imported in names:
            top = imported.split(".")[0]
            if top == "kvlab":
                found.append(imported)
            elif top not in sys.stdlib_module_names:
                raise NotebookError(
                    f"{name} imports {imported}, but it answers questions inside the page, where "
                    "only the standard library exists: move that import to another module"
                )
    return found
