"""Run the committed chapters from top to bottom with the packages of the Python that runs this.

    .venv-colab/bin/python tools/run_chapters.py          all chapters
    .venv-colab/bin/python tools/run_chapters.py 02 05    those whose name starts so

Outputs are not compared: the question is whether a chapter reaches its end. Says of each one:
passed or failed, the seconds, the first error, and what its cells wrote to stderr.
"""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import nbformat
from build_notebooks import CHAPTERS, ChapterError, chosen, run
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

PACKAGES = ("torch", "triton", "transformers", "ipywidgets", "anywidget", "plotly", "pandas",
            "numpy")


def outputs(notebook: NotebookNode, output_type: str) -> list[tuple[int, NotebookNode]]:
    """(cell number, output) of every output of one type, in order."""
    return [(number, output) for number, cell in enumerate(notebook.cells)
            if cell.cell_type == "code" for output in cell.outputs
            if output.output_type == output_type]


def try_chapter(path: Path) -> str | None:
    """Run a chapter and print a line of what came of it: the first error, or None."""
    notebook = nbformat.read(path, as_version=4)
    start, error = time.monotonic(), None
    try:
        run(notebook, path.parent)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as raised:
        error = str(raised).strip().splitlines()[-1]
        for number, output in outputs(notebook, "error")[:1]:
            error = f"cell {number}: {output.ename}: {output.evalue}"
    seconds = time.monotonic() - start
    result = f"failed {seconds:5.0f} s  {error}" if error else f"passed {seconds:5.0f} s"
    print(f"{path.stem:26} {result}", flush=True)
    for number, output in outputs(notebook, "stream"):
        if output.name == "stderr" and output.text.strip():
            print(f"    cell {number} wrote to stderr: {output.text.strip()[:300]}", flush=True)
    return error


def main(names: list[str], folder: Path = CHAPTERS) -> int:
    versions = [f"{name} {version(name)}" for name in PACKAGES]
    print(", ".join([f"Python {platform.python_version()}", *versions]), flush=True)
    try:
        paths = [path.with_suffix(".ipynb") for path in chosen(names, folder)]
    except ChapterError as error:
        print(f"ChapterError: {error}", file=sys.stderr)
        return 1
    failed = [path.stem for path in paths if try_chapter(path)]
    print(f"{len(paths) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
