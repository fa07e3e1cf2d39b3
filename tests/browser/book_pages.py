"""What the browser tests know of the built book: its pages, their files, their links."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"


def pages() -> list[str]:
    """Every page of _toc.yml, as paths below _build/html."""
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item)
        elif isinstance(node, dict):
            found.extend(str(node[key]) for key in ("root", "file") if key in node)
            for key in ("parts", "chapters", "sections"):
                walk(node.get(key, []))

    walk(yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8")))
    return [f"{name}.html" for name in found]


class Anchors(HTMLParser):
    """Links and ids of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))


def broken_links(page: str) -> list[str]:
    """Links of a page to files or anchors of the book that do not exist."""
    here = HTML / page
    known: dict[Path, set[str]] = {}
    broken = []
    for link in Anchors(here).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (here.parent / unquote(parts.path)).resolve() if parts.path else here.resolve()
        if not target.exists():
            broken.append(link)
        elif parts.fragment and target.suffix == ".html":
            if target not in known:
                known[target] = Anchors(target).ids
            if unquote(parts.fragment) not in known[target]:
                broken.append(link)
    return broken
