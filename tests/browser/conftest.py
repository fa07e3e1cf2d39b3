"""Fixtures of the browser tests: the built book on loopback, a Chromium, pages that are watched.

For the owner of a widget NAME, a file tests/browser/test_NAME.py:

    def test_slider_shows_what_python_says(widget_page):
        widget = Pool(num_blocks=8)
        watched = widget_page(widget)                # a page with this widget alone, from a folder
        page = watched.page                          # a Playwright page
        page.get_by_role("slider", name="Step").focus()
        page.keyboard.press("ArrowRight")
        assert watched.table("Pool after step 1") == [["block", ...], ["0", ...]]
        watched.check()                              # no console error, nothing asked outside

`watched.table(caption)` gives a table's cells as text, head first. A widget that asks Python is
started with `watched.start()`. `open_book("chapters/05_paged_blocks.html")` opens a built page.
Both fixtures take theme="dark", width=390, scripts=False, reduced_motion=True.
"""

from __future__ import annotations

import functools
import http.server
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).resolve().parent)]

import browser as chromium  # noqa: E402  (tools/browser.py finds the program)
import widget_page as builder  # noqa: E402


@dataclass
class Watched:
    """A page and everything that went wrong on it."""

    page: Page
    problems: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def ready(self) -> Watched:
        """Wait until page.js has drawn the page's widgets."""
        self.page.wait_for_selector("html[data-kvlab-ready]", state="attached", timeout=60_000)
        return self

    def start(self) -> None:
        """Press the first Start button, and wait until Python answers (slow on a busy machine)."""
        self.page.get_by_role("button", name="Start", exact=True).first.click()
        self.page.wait_for_function("globalThis.kvlabPage.running", timeout=180_000)

    def table(self, caption: str | re.Pattern) -> list[list[str]]:
        """The cells of the table whose caption holds this text, row by row, head first."""
        table = self.page.locator("table").filter(
            has=self.page.locator("caption", has_text=caption)
        )
        return table.first.evaluate(
            "t => [...t.rows].map(r => [...r.cells].map(c => c.textContent.trim()))"
        )

    def sentence(self, text: str) -> Locator:
        """The sentence under a widget's picture that holds this text, as the eye sees it."""
        return self.page.locator(".kvlab-say", has_text=text)

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")

    def axe(self, within: str = "document") -> list[dict]:
        """Serious and critical findings of axe-core: rule, and the elements it names."""
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate(f"axe.run({within}, {{resultTypes: ['violations']}})")
        return [
            {"rule": v["id"], "nodes": [" ".join(map(str, n["target"])) for n in v["nodes"]]}
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
        ]

    def check(self) -> None:
        """Nothing went wrong and nothing was asked of another address."""
        assert self.problems == []
        assert self.outside == []


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the built book, served on loopback."""
    assert (HTML / "index.html").exists(), "the book is not built: run `make book` first"
    handler = functools.partial(_Quiet, directory=str(HTML))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    """One Chromium for all tests of a worker."""
    path = chromium.find()
    assert path, "no Chromium on this machine: run `make browser` first"
    with sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield program
        program.close()


@pytest.fixture
def watch(chrome: Browser) -> Iterator[Callable[..., Watched]]:
    """watch(url, own, ...) opens a page; only addresses that begin with `own` are let through."""
    contexts = []

    def open_page(
        url: str,
        own: str,
        theme: str = "light",
        width: int = 1280,
        scripts: bool = True,
        reduced_motion: bool = False,
    ) -> Watched:
        context = chrome.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            java_script_enabled=scripts,
            reduced_motion="reduce" if reduced_motion else "no-preference",
        )
        contexts.append(context)
        watched = Watched(context.new_page())
        page = watched.page

        def note(request: Request) -> None:
            inside = request.url.startswith((own, "data:", "blob:"))
            (watched.asked if inside else watched.outside).append(request.url)

        context.route(
            re.compile(r"^(?!data:|blob:)"),
            lambda route: route.continue_()
            if route.request.url.startswith(own)
            else route.abort("blockedbyclient"),
        )
        page.on("request", note)
        page.on(
            "console",
            lambda m: watched.problems.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: watched.problems.append(str(error)))
        page.goto(url)
        return watched.ready() if scripts else watched

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def open_book(watch: Callable[..., Watched], site: str) -> Callable[..., Watched]:
    """open_book("book/intro.html", theme="dark", width=390): a page of the built book."""
    return lambda path, **options: watch(f"{site}/{path}", site, **options)


@pytest.fixture
def widget_page(watch: Callable[..., Watched], tmp_path: Path) -> Callable[..., Watched]:
    """widget_page(widget): a page that holds one widget and its text twin, opened as a file."""

    def build(widget, theme: str = "light", **options) -> Watched:
        path = builder.build(widget, tmp_path, theme=theme)
        return watch(path.as_uri(), tmp_path.as_uri(), theme=theme, **options)

    return build
