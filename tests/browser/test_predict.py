"""A prediction holds its answer back until the reader commits, and remembers the guess."""

from __future__ import annotations

import pytest

from kvlab.notebook import NotebookError
from kvlab.notebook.widgets.practice import Predict

pytestmark = pytest.mark.browser
QUESTION = "How many bytes does one token keep?"


def widget() -> Predict:
    return Predict(QUESTION, 131072, "bytes", "Two rows a layer.")


def test_answer_appears_only_after_committing(widget_page):
    watched = widget_page(widget())
    page = watched.page
    region = page.locator("section.kvlab")
    assert "131,1" not in region.inner_text()
    page.get_by_label("Your guess").fill("65536")
    assert "131,1" not in region.inner_text()
    page.keyboard.press("Enter")
    said = page.get_by_role("status").inner_text()
    assert "131,100 bytes" in said
    assert "2 times too low" in said
    assert "Two rows a layer." in region.inner_text()
    watched.check()


def test_nothing_is_committed_without_a_number(widget_page):
    watched = widget_page(widget())
    watched.page.get_by_role("button", name="Commit").click()
    assert "Type a number" in watched.page.get_by_role("status").inner_text()
    assert "131,1" not in watched.page.locator("section.kvlab").inner_text()


def test_the_guess_is_remembered_and_can_be_withdrawn(widget_page):
    watched = widget_page(widget())
    page = watched.page
    page.get_by_label("Your guess").fill("131072")
    page.get_by_role("button", name="Commit").click()
    page.reload()
    watched.ready()
    assert "Exactly right" in page.get_by_role("status").inner_text()
    page.get_by_role("button", name="Guess again").click()
    page.reload()
    watched.ready()
    assert page.get_by_role("status").inner_text() == ""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(widget(), theme=theme, width=390)
    watched.page.get_by_label("Your guess").fill("1")
    watched.page.keyboard.press("Enter")
    assert watched.overflow() <= 0
    assert watched.axe() == []


def test_an_answer_must_be_a_number():
    with pytest.raises(NotebookError, match="expected a finite number"):
        Predict(QUESTION, float("nan"))
