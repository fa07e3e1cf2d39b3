"""The book's own Sphinx extension (_config.yml names it): what the pages need of kvlab.

- fills the pages of book/ with what is computed: `{{ formula_sheet }}`, `{{ run.ratio }}`, ...;
- writes kvlab.css and python.js, and keeps every page within its own folder: images from other
  addresses become their words, and scripts that the theme ships but the book does not use go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from book.extension import page_text
from book.extension.page_python import PACKAGE, page_script
from kvlab.notebook.widgets import shared_css
from kvlab.specs import DATA_DIR

#: Files of kvlab, data/ and this folder that a page may depend on.
WATCHED = (".py", ".js", ".css", ".json", ".txt", ".log")
#: Icons come as a font with the theme's style sheet; its 1.5 MB script draws them once more.
HELPERS = ("thebe", "sphinx-design", "design-tabs")
UNUSED = ("scripts/fontawesome.js",)

#: A line `{{ name }}` in book/*.md -> the function whose Markdown takes its place.
BLOCKS: dict[str, Callable[[], str]] = {
    "formula_sheet": page_text.formula_sheet,
    "formats_table": page_text.formats_table,
    "models_table": page_text.models_table,
    "symbols_table": page_text.symbols_table,
    "other_letters": page_text.other_letters,
    "field_guide": page_text.field_guide,
    "api": page_text.api,
}


class LocalImages(SphinxTransform):
    """An image at another address (a badge) becomes its alternative text."""

    default_priority = 200

    def apply(self) -> None:
        for image in list(self.document.findall(nodes.image)):
            if "://" in image.get("uri", ""):
                image.replace_self(nodes.Text(image.get("alt", "") or image["uri"]))


def prepare(app: Sphinx, config) -> None:
    """Numbers for the prose of book/*.md (`{{ run.ratio }}`), and the files made for the pages."""
    config.myst_substitutions = {
        **config.myst_substitutions,
        "run": page_text.running_example(),
    }
    folder = Path(app.srcdir) / ".cache" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kvlab.css").write_text(shared_css(), "utf-8")
    (folder / "python.js").write_text(page_script(), "utf-8")
    config.html_static_path = [*config.html_static_path, str(folder)]


def outdated(app: Sphinx, env, added: set, changed: set, removed: set) -> list[str]:
    """Every page again when kvlab or data/ changed: Sphinx looks at the page's own file only."""
    digest = hashlib.sha256()
    for folder in (PACKAGE, DATA_DIR, Path(__file__).parent):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in WATCHED):
            digest.update(path.read_bytes())
    last, env.kvlab_digest = getattr(env, "kvlab_digest", ""), digest.hexdigest()
    return [] if last == env.kvlab_digest else sorted(env.found_docs)


def fill_blocks(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a block's Markdown into the page's source, so that its headings are the page's own."""
    if not docname.startswith("book/"):
        return
    lines = source[0].split("\n")
    for number, line in enumerate(lines):
        name = line.removeprefix("{{").removesuffix("}}").strip()
        if line.startswith("{{") and line.endswith("}}") and name in BLOCKS:
            lines[number] = BLOCKS[name]()
    source[0] = "\n".join(lines)


def local_scripts(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Leave out two helpers of the theme: live code, from another address, and unused tabs."""
    for kind in ("script_files", "css_files"):
        context[kind] = [
            file
            for file in context.get(kind, [])
            if not any(name in str(getattr(file, "filename", file)).lower() for name in HELPERS)
            and "THEBE" not in str(getattr(file, "attributes", {}).get("body", ""))
        ]


def drop_unused(app: Sphinx, error: Exception | None) -> None:
    """Empty the scripts that no page needs and remove source maps."""
    if error is not None or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    for name in UNUSED:
        if (static / name).exists():
            (static / name).write_text("/* not needed: the icons are a font */\n", "utf-8")
    for path in static.rglob("*.map"):
        path.unlink()


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_transform(LocalImages)
    app.connect("config-inited", prepare)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", fill_blocks)
    app.connect("html-page-context", local_scripts, priority=900)
    app.connect("build-finished", drop_unused)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
