"""The files that Python in the page needs: what answers.py can reach, and the facts in data/.

The list is not written down anywhere: it is every kvlab module that the functions of
`kvlab.answers.FUNCTIONS` import, found by reading imports. A module on it that imports anything
but the standard library and kvlab is an error here, before it could be one in a reader's browser.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from kvlab.answers import FUNCTIONS
from kvlab.errors import KvlabError
from kvlab.specs import DATA_DIR

PACKAGE = Path(__file__).resolve().parent
#: Facts above this size (measurements, mostly) stay out of the page.
MAX_DATA_BYTES = 100_000


class NotStandardLibrary(KvlabError):
    """A module that must run in the page imports something that is not there."""


def page_modules() -> list[str]:
    """Names of the kvlab modules that Python in the page needs, sorted."""
    todo = ["kvlab", "kvlab.answers", *(place.split(":")[0] for place in FUNCTIONS.values())]
    # kvlab.exercises loads a chapter by its number when the chapter is first asked for.
    todo += [f"kvlab.exercises.{p.stem}" for p in PACKAGE.glob("exercises/ch[0-9][0-9].py")]
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
                raise NotStandardLibrary(
                    f"{name} imports {imported}, but it answers questions inside the page, where "
                    "only the standard library exists: move that import to another module"
                )
    return found
