"""Build chapters/NN_name.ipynb from chapters/NN_name.py by running it from top to bottom.

    python tools/build_notebooks.py                 all chapters
    python tools/build_notebooks.py 02 05_paged     those whose name starts so
    python tools/build_notebooks.py --shared        only rewrite the badge and the setup cell
    python tools/build_notebooks.py --check         run nothing; say where .py and .ipynb differ

A rebuild whose outputs are the same is the same file, byte for byte: cell ids are hashes of the
source, and no timing, count or widget state is kept. Only the .py is edited by hand; the line with
the Colab link and the setup cell are written into it by this tool, the same in every chapter.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
MAX_BYTES = 500_000
CELL_TIMEOUT_SECONDS = 600
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KEPT_TAGS = ("setup", "hide-input", "hide-cell", "hide-output", "nbval-ignore-output", "gpu")
METADATA = {
    "jupytext": {"text_representation": {"extension": ".py", "format_name": "percent"}},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SETUP = '''\
# The same cell in every chapter: installs kvlab where it is missing, as on Colab.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kvlab") is None:
    package = "kvlab[checkpoint] @ git+{address}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)
if "google.colab" in sys.modules:
    sys.modules["google.colab"].output.enable_custom_widget_manager()'''
BADGE = "[**Open in Colab**](https://colab.research.google.com/github/{path}/blob/main/chapters/{name}.ipynb)"


class ChapterError(Exception):
    """A chapter breaks one of the rules that this tool holds; the text names chapter and cell."""


def address(root: Path = ROOT) -> str:
    """The repository's public address: the one place is `repository: url:` in _config.yml."""
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    return config["repository"]["url"].rstrip("/")


def badge(name: str, url: str) -> str:
    """The line that opens a chapter in Colab."""
    return BADGE.format(path="/".join(url.split("/")[-2:]), name=name)


def with_shared(notebook: NotebookNode, name: str, url: str) -> NotebookNode:
    """Write the Colab line under the title and the setup cell's text. Changes the notebook."""
    first = notebook.cells[0]
    title, _, rest = first.source.partition("\n")
    if first.cell_type != "markdown" or not title.startswith("# "):
        raise ChapterError(f"{name}: the first cell must be Markdown that starts with '# N. Title'")
    rest = re.sub(r"^\[\*\*Open in Colab\*\*\].*$", "", rest, flags=re.MULTILINE).strip("\n")
    first.source = f"{title}\n\n{badge(name, url)}\n\n{rest}".rstrip()
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip() == "# setup":
            cell.metadata["tags"] = ["setup", "hide-cell"]
    setups = [cell for cell in notebook.cells if "setup" in tags(cell)]
    if len(setups) != 1 or setups[0].cell_type != "code":
        raise ChapterError(f'{name}: exactly one code cell must be tagged "setup", and has '
                           f"{len(setups)}; write a code cell that holds only `# setup`")
    setups[0].source = SETUP.format(address=url)
    return notebook


def tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def read_source(path: Path) -> NotebookNode:
    """The cells of a .py in percent format, with only what a committed notebook keeps."""
    notebook = jupytext.read(path, fmt="py:percent")
    return stripped(notebook, path.stem)


def stripped(notebook: NotebookNode, name: str) -> NotebookNode:
    """Fixed metadata, ids that are hashes of the source, no outputs."""
    cells, seen = [], {}
    for cell in notebook.cells:
        if cell.cell_type not in ("code", "markdown"):
            raise ChapterError(f"{name}: a cell of type {cell.cell_type}; use code or markdown")
        unknown = set(tags(cell)) - set(KEPT_TAGS)
        if unknown:
            raise ChapterError(f"{name}: unknown tags {sorted(unknown)}; known: {KEPT_TAGS}")
        key = f"{cell.cell_type}:{cell.source}"
        seen[key] = seen.get(key, 0) + 1
        cell_id = hashlib.sha256(f"{seen[key]}:{key}".encode()).hexdigest()[:12]
        v4 = nbformat.v4
        new = v4.new_code_cell if cell.cell_type == "code" else v4.new_markdown_cell
        metadata = {"tags": tags(cell)} if tags(cell) else {}
        cells.append(new(cell.source, id=cell_id, metadata=metadata))
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA, nbformat_minor=5)


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Execute all cells in a fresh kernel. One retry if the kernel does not start at all."""
    for attempt in (1, 2):
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_SECONDS, kernel_name="python3", record_timing=False,
            store_widget_state=False, coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}})
        try:
            return client.execute()
        except RuntimeError as error:
            if attempt == 2 or "Kernel" not in str(error):
                raise
    raise AssertionError("not reached")


def clean_outputs(notebook: NotebookNode, name: str) -> NotebookNode:
    """Keep what a reader without a kernel can see, and nothing that changes from run to run."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        kept = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                raise ChapterError(f"{name}: cell {number} writes to stderr: {output.text[:300]!r}")
            if "data" in output:
                output.data.pop(WIDGET_VIEW, None)  # its text stays, and its table follows it
                if not output.data:
                    continue
                output.metadata = NotebookNode()
            if output.output_type == "execute_result":
                output.execution_count = None
            kept.append(output)
        cell.outputs = kept
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def text_of(notebook: NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def write_shared(path: Path, url: str) -> bool:
    """Bring a chapter's Colab line and setup cell up to date in the .py. True if it changed."""
    old = path.read_text(encoding="utf-8")
    notebook = with_shared(jupytext.reads(old, fmt="py:percent"), path.stem, url)
    for cell in notebook.cells:
        cell.metadata = NotebookNode({"tags": tags(cell)} if tags(cell) else {})
    notebook.metadata = nbformat.from_dict(
        {"jupytext": METADATA["jupytext"], "kernelspec": METADATA["kernelspec"]})
    new = without_version(jupytext.writes(notebook, fmt="py:percent"))
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old


def without_version(text: str) -> str:
    """A .py whose header does not name the jupytext that wrote it."""
    return re.sub(r"^# +(format_version|jupytext_version): .*\n", "", text, flags=re.MULTILINE)


def build(path: Path, url: str) -> Path:
    """Run one chapter and write its notebook. Raises what its cells raise."""
    write_shared(path, url)
    notebook = clean_outputs(run(read_source(path), path.parent), path.stem)
    text = text_of(notebook)
    if len(text.encode()) > MAX_BYTES:
        raise ChapterError(f"{path.stem}: {len(text.encode())} bytes, more than {MAX_BYTES}: "
                           "print less, or draw fewer points")
    out = path.with_suffix(".ipynb")
    out.write_text(text, encoding="utf-8")
    return out


def differences(path: Path, url: str) -> list[str]:
    """Where a chapter's .py and .ipynb (sources, tags, ids) or its shared parts differ."""
    built = path.with_suffix(".ipynb")
    if not built.is_file():
        return [f"{path.stem}: not built yet; run `make notebooks`"]
    source = read_source(path)
    shared = stripped(with_shared(read_source(path), path.stem, url), path.stem)
    notebook = nbformat.read(built, as_version=4)
    found = []
    for what, left, right in (("the setup cell or Colab line", source, shared),
                              ("the .ipynb", source, notebook)):
        if [(c.id, c.source, tags(c)) for c in left.cells] != [
                (c.id, c.source, tags(c)) for c in right.cells]:
            found.append(f"{path.stem}: {what} differs from the .py; run `make notebooks`")
    return found


def chosen(names: list[str], folder: Path) -> list[Path]:
    """The sources whose name starts with one of the given beginnings; all without any."""
    paths = sorted(folder.glob("[0-9][0-9]_*.py"))
    picked = [p for p in paths if not names or any(p.stem.startswith(Path(n).stem) for n in names)]
    if names and not picked:
        raise ChapterError(f"no chapter starts with {names}; there are {[p.stem for p in paths]}")
    return picked


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of chapter names; all if none")
    parser.add_argument("--check", action="store_true", help="compare, run nothing")
    parser.add_argument("--shared", action="store_true", help="only rewrite the shared parts")
    parser.add_argument("--folder", type=Path, default=CHAPTERS)
    options = parser.parse_args(arguments)
    url = address()
    try:
        paths = chosen(options.names, options.folder)
        if options.check:
            found = [line for path in paths for line in differences(path, url)]
            print("\n".join(found) or "all notebooks agree with their sources")
            return 1 if found else 0
        for path in paths:
            if options.shared:
                print(path.stem, "rewritten" if write_shared(path, url) else "up to date")
                continue
            start = time.monotonic()
            print(f"{build(path, url).name}: {time.monotonic() - start:.0f} s", flush=True)
    except ChapterError as error:
        print(f"ChapterError: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
