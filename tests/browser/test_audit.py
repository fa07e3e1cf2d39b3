"""The audit on a page: the answers of Python in the browser, and pasted text that stays text."""

from __future__ import annotations

import json

import pytest

from book.extension.page_widgets import Audit
from kvlab.sheet import ask_audit

pytestmark = pytest.mark.browser


def start(watched) -> None:
    watched.page.get_by_role("button", name="Start").click()
    watched.page.locator("fieldset:enabled").wait_for(timeout=60_000)


def test_the_first_answer_is_there_before_python_runs(widget_page):
    watched = widget_page(Audit())
    assert "the log agrees." in watched.page.locator("p.kvlab-verdict").inner_text()
    watched.check()


def test_documented_logs_by_keyboard_give_what_python_gives(widget_page):
    widget = Audit()
    watched = widget_page(widget)
    page = watched.page
    start(watched)
    for example in widget.examples:
        page.get_by_label("a documented log").select_option(example["file"])
        answer = ask_audit(example["text"], model=example["model"])
        words = {True: "the log agrees", False: "does not agree", None: "cannot be told"}
        word = words[answer["agrees"]]
        page.wait_for_function(
            "words => { const t = document.querySelector('p.kvlab-verdict').textContent;"
            " return words.every((word) => t.includes(word)); }",
            arg=[word, answer["model"], answer["engine"]],
        )
        assert page.locator("section.kvlab tbody tr").count() == len(answer["checks"])
    watched.check()


def test_pasted_markup_stays_text_and_errors_are_named(widget_page):
    watched = widget_page(Audit())
    page = watched.page
    start(watched)
    page.get_by_role("textbox", name="start-up log").fill("<img src=x onerror=document.title='run'>")
    page.get_by_role("button", name="Check").focus()
    page.keyboard.press("Enter")
    alert = page.locator("p[role=alert]")
    page.wait_for_function("document.querySelector('p[role=alert]').textContent.length > 0")
    assert alert.inner_text().startswith("SheetError:")
    page.get_by_text("Paste a config.json instead").click()
    page.get_by_role("textbox", name="config.json").fill(json.dumps({"model_type": "<b>x</b>"}))
    page.get_by_role("textbox", name="start-up log").fill("GPU KV cache size: 16 tokens\n# GPU blocks: 1")
    page.get_by_role("button", name="Check").click()
    page.wait_for_function(
        "!document.querySelector('p[role=alert]').textContent.startsWith('SheetError')"
    )
    assert "Error" in alert.inner_text()
    assert page.title() != "run" and page.locator("section.kvlab b, section.kvlab img").count() == 0
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(Audit(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []
