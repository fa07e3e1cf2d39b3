"""The exercises page: right and wrong answers, by keyboard, checked by Python in the browser."""

from __future__ import annotations

import pytest

from book.extension.page_widgets import Progress
from kvlab.notebook import exercises

pytestmark = pytest.mark.browser


def start(watched) -> None:
    watched.page.get_by_role("button", name="Start").click()
    watched.page.locator("fieldset:enabled").first.wait_for(timeout=60_000)


def test_value_answers_are_checked_and_remembered(widget_page):
    watched = widget_page(Progress())
    page = watched.page
    start(watched)
    box = page.get_by_label("Answer to 1.1", exact=True)
    box.fill("150")
    page.keyboard.press("Enter")
    page.get_by_text("you counted every row").wait_for()
    box.fill(str(exercises.find("1.1").solution))
    page.keyboard.press("Enter")
    page.get_by_text("1.1 right.").wait_for()
    assert page.get_by_text("1 of", exact=False).first.is_visible()
    page.reload()
    watched.ready()
    assert "1 of" in page.locator("section.kvlab p").first.inner_text()
    watched.check()


def test_a_function_runs_in_the_page(widget_page):
    watched = widget_page(Progress())
    page = watched.page
    start(watched)
    box = page.get_by_label("Answer to 1.4, a Python function")
    check = page.get_by_role("button", name="Check the answer to 1.4")
    box.fill("def uncached_step(P, h, d_h, L, s):\n    return 2 * P * s")
    check.click()
    page.get_by_text("is missing").wait_for()
    box.fill(
        "def uncached_step(P, h, d_h, L, s):\n    return 2 * P * s + 4 * h * d_h * L * s * s / 2"
    )
    check.click()
    page.get_by_text("1.4 right.").wait_for()
    box.fill("def uncached_step(:")
    check.click()
    page.get_by_text("cannot be read: SyntaxError").wait_for()
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(Progress(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []
