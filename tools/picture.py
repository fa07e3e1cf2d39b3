"""Take the README's picture from the built book: the cost table of chapter 2.

    make book && python tools/picture.py         writes book/static/page.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from browser import find
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "book" / "static" / "page.png"
PAGE = "chapters/02_cache_append.html"


def take(html: Path, target: Path) -> None:
    """One screen of the chapter, 1280 by 860, with its first widget near the top."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find(), args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.goto((html / PAGE).as_uri())
        page.wait_for_selector("html[data-kvlab-ready]", state="attached", timeout=60_000)
        page.evaluate(
            "scrollTo({top: document.querySelector('.kvlab').getBoundingClientRect().top - 130})"
        )
        page.wait_for_timeout(1_000)
        page.screenshot(path=target)
        browser.close()


def main() -> None:
    """Command line: the built book's folder, where it is not _build/html."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, default=ROOT / "_build" / "html")
    take(parser.parse_args().html.resolve(), TARGET)
    print(TARGET.relative_to(ROOT))


if __name__ == "__main__":
    main()
