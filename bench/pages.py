"""The built book in a Chromium: what a page weighs, and how soon a widget has drawn a change."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Browser, sync_playwright

from kvlab.errors import KvlabError

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
sys.path.insert(0, str(ROOT / "tools"))

import browser as chromium  # noqa: E402  (tools/browser.py finds the program)

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]

#: Moves a slider n times. Two times for each move, in milliseconds: until the new state stands
#: in the page (script and layout), and until the browser has painted it and is idle again.
MOVE = """async (slider, n) => {
  const painted = () => new Promise(done => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = done;
    channel.port2.postMessage(0);
  }));
  const script = [], frame = [];
  for (let move = 0; move < n; move++) {
    await painted();
    if (slider.value === slider.max) slider.value = slider.min; else slider.stepUp();
    const start = performance.now();
    slider.dispatchEvent(new Event('input', {bubbles: true}));
    document.body.getBoundingClientRect();
    script.push(performance.now() - start);
    await painted();
    frame.push(performance.now() - start);
  }
  return {script, frame};
}"""


#: The widget's name, from the text twin that stands with it, and the slider's own label.
NAME = """slider => {
  const twin = slider.closest('.kvlab-widget').parentElement.querySelector('[data-kvlab-twin]');
  const label = slider.labels[0].cloneNode(true);
  label.querySelectorAll('output').forEach(value => value.remove());
  return `${twin.dataset.kvlabTwin.split('-')[0]}: ${label.textContent.trim()}`;
}"""


class BookNotBuilt(KvlabError):
    """There are no pages to measure."""


def pages(moves: int = 60) -> dict[str, object]:
    """Every page: bytes it loads before anything is pressed. Every slider: its moves' times."""
    found = sorted((HTML / "chapters").glob("*.html")) + sorted((HTML / "book").glob("*.html"))
    program = chromium.find()
    if not found or program is None:
        raise BookNotBuilt(
            f"{len(found)} built pages and {'a' if program else 'no'} Chromium found; expected "
            "both: run `make book browser` first, or leave this case out with --only"
        )
    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=program, args=FLAGS)
        measured = {path.relative_to(HTML).as_posix(): _page(chrome, path, moves) for path in found}
        version = chrome.version
        chrome.close()
    site = sum(path.stat().st_size for path in HTML.rglob("*") if path.is_file())
    return {"what": "the built book", "chromium": version, "site_bytes": site, "pages": measured}


def _page(chrome: Browser, path: Path, moves: int) -> dict[str, object]:
    page = chrome.new_page(viewport={"width": 1280, "height": 900})
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-kvlab-ready]", state="attached", timeout=60_000)
    files = {Path(unquote(urlsplit(url).path)) for url in asked if url.startswith("file:")}
    sliders = {}
    for slider in page.locator("input[type=range]").all():
        if not slider.is_visible() or not slider.is_enabled():
            continue
        times = slider.evaluate(MOVE, moves)
        sliders[slider.evaluate(NAME)] = {
            kind: {
                "median_seconds": round(statistics.median(values) / 1e3, 6),
                "worst_seconds": round(max(values) / 1e3, 6),
            }
            for kind, values in times.items()
        }
    page.close()
    return {"bytes": sum(file.stat().st_size for file in files), "sliders": sliders}
