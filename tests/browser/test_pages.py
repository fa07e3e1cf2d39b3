"""Every page of the book: clean, small, readable in both themes, on a phone, without scripts."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest
from book_pages import HTML, broken_links, pages

pytestmark = [pytest.mark.book, pytest.mark.browser]

PAGE_BYTES = 3_000_000
SITE_BYTES = 60_000_000
#: What the theme and docutils bring, by rule and the start of the element's selector.
THEME = {
    "scrollable-region-focusable": ("#pst-primary-sidebar", ".bd-sidebar"),
    "label-content-name-mismatch": (".search-button-field",),
    "aria-required-children": (".citation-list",),  # docutils: a bibliography with links back
}


def ours(findings: list[dict]) -> list[dict]:
    """The findings without those of the theme."""
    kept = []
    for finding in findings:
        theirs = THEME.get(finding["rule"], ())
        nodes = [node for node in finding["nodes"] if not node.startswith(theirs or ("\0",))]
        if nodes:
            kept.append({"rule": finding["rule"], "nodes": nodes})
    return kept


def scroll_through(page) -> None:
    """Bring every figure into view once: they are drawn when they are looked at."""
    for figure in page.locator(".kvlab-figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator("svg").first.wait_for(timeout=90_000)
    page.wait_for_function(
        "document.querySelectorAll('.kvlab-figure:not([data-drawn])').length === 0", timeout=90_000
    )


@pytest.mark.parametrize("path", pages())
def test_a_page_is_clean_small_and_accessible(open_book, path):
    watched = open_book(path)
    scroll_through(watched.page)
    watched.check()
    assert ours(watched.axe()) == []
    assert watched.overflow() <= 0
    files = {unquote(urlsplit(url).path).lstrip("/") for url in watched.asked if url[:4] == "http"}
    weight = sum((HTML / name).stat().st_size for name in files)
    assert weight < PAGE_BYTES, {name: (HTML / name).stat().st_size for name in files}


@pytest.mark.parametrize("path", pages())
def test_a_page_on_a_phone_in_the_dark(open_book, path):
    watched = open_book(path, theme="dark", width=390)
    assert watched.page.evaluate("document.documentElement.dataset.theme") == "dark"
    scroll_through(watched.page)
    watched.check()
    assert watched.overflow() <= 0
    assert ours(watched.axe()) == []


@pytest.mark.parametrize("path", pages())
def test_nb_02_a_page_without_scripts(open_book, path):
    watched = open_book(path, scripts=False)
    page = watched.page
    assert page.locator("article h1").first.is_visible()
    widgets = page.locator('script[type="application/vnd.jupyter.widget-view+json"]').count()
    twins = page.locator("details.kvlab-twin")
    assert twins.count() >= widgets
    for number in range(twins.count()):
        assert twins.nth(number).locator("summary").is_visible()
    for figure in page.locator(".kvlab-figure").all():
        assert figure.locator(".kvlab-alt").inner_text().strip()
    assert watched.outside == []


@pytest.mark.parametrize("path", pages())
def test_printing_turns_each_widget_into_its_table(open_book, path):
    if "widget-view+json" not in (HTML / path).read_text("utf-8"):
        return
    watched = open_book(path)
    page = watched.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    for widget in page.locator(".kvlab-widget > .kvlab").all():
        assert not widget.is_visible()
    for twin in page.locator("details.kvlab-twin").all():
        assert twin.locator("table").is_visible()


@pytest.mark.parametrize("path", pages())
def test_links_inside_the_book_resolve(path):
    assert broken_links(path) == []


def test_the_site_is_not_heavy():
    files = [path for path in HTML.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < SITE_BYTES


def test_the_first_page_leads_to_the_introduction(open_book):
    watched = open_book("index.html")
    watched.page.wait_for_url("**/book/intro.html")
    watched.check()
