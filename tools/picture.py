"""Take the README's picture: the cost table of chapter 2, as a page shows it.

    python tools/picture.py        writes book/static/page.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent))

import browser
import widget_page

from kvlab.widgets.cost_table import CostTable

PICTURE = Path(__file__).resolve().parent.parent / "book" / "static" / "page.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = widget_page.build(CostTable(), Path(folder))
        chromium = playwright.chromium.launch(executable_path=browser.find(),
                                              args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 860, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-kvlab-ready]", state="attached")
        title = page.locator("h1").bounding_box()
        top = title["y"] + title["height"] + 8
        page.screenshot(path=PICTURE, clip={"x": 22, "y": top, "width": 816, "height": 470})
        chromium.close()


if __name__ == "__main__":
    main()
