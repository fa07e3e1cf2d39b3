"""Build a page that holds one widget and its text twin, to look at it or to test it.

    python tools/widget_page.py kvlab.notebook.widgets.costs:CostTable    # prints the page's path
    python tools/widget_page.py kvlab.notebook.widgets.scenes:Pool num_blocks=8 --dark

The page uses the same page script, styles and vendored Python as the book, so what works here
works there, from a server or opened as a file. Tests call `build` (tests/browser/conftest.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

import vendor  # noqa: E402
from ipywidgets.embed import embed_data  # noqa: E402

from book.extension.page_python import page_script  # noqa: E402
from kvlab.notebook.widgets import LabWidget, shared_css  # noqa: E402

PAGE = """<!doctype html>
<html lang="en" data-theme="{theme}">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="_static/kvlab.css">
<style>body {{ background: var(--kv-bg); color: var(--kv-fg); margin: 1rem auto; max-width: 50rem;
padding: 0 0.5rem; font-family: system-ui, sans-serif }}</style>
<script defer src="_static/page.js"></script></head>
<body><main><h1>{title}</h1>
<script type="application/vnd.jupyter.widget-view+json">{view}</script>
{twin}
<script type="application/vnd.jupyter.widget-state+json">{state}</script>
</main></body></html>
"""


def build(widget: LabWidget, folder: Path, theme: str = "light") -> Path:
    """Write folder/index.html and folder/_static for one widget; return the page's path."""
    static = folder / "_static"
    static.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "book" / "static" / "page.js", static)
    (static / "kvlab.css").write_text(shared_css(), "utf-8")
    (static / "python.js").write_text(page_script(), "utf-8")
    vendor.main()
    if not (static / "vendor").exists():
        (static / "vendor").symlink_to(vendor.TARGET / "vendor")
    state = embed_data(views=[widget], drop_defaults=False)["manager_state"]
    safe = {"state": json.dumps(state), "view": json.dumps({"model_id": widget.model_id})}
    page = PAGE.format(
        theme=theme,
        title=type(widget).__name__,
        twin=widget.twin().html(widget.twin_id),
        **{name: text.replace("<", "\\u003c") for name, text in safe.items()},
    )
    path = folder / "index.html"
    path.write_text(page, "utf-8")
    return path


def main() -> None:
    """Command line: module:Class and traits as name=JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("widget", help="module:Class, as in kvlab.notebook.widgets.costs:CostTable")
    parser.add_argument("traits", nargs="*", help="name=JSON")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    module, name = options.widget.split(":")
    traits = {k: json.loads(v) for k, _, v in (t.partition("=") for t in options.traits)}
    widget = getattr(importlib.import_module(module), name)(**traits)
    folder = ROOT / "_build" / "widgets" / name
    print(build(widget, folder, theme="dark" if options.dark else "light"))


if __name__ == "__main__":
    main()
