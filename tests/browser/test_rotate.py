"""Chapter 4: the rotated pair says what kvlab's rotation says; the curves are the record."""

from __future__ import annotations

import re

import pytest

from kvlab.notebook.widgets.positions import DriftCurves, Rotate, pair_score, read_record
from kvlab.specs import RopeSpec

pytestmark = pytest.mark.browser
ROPE = RopeSpec(100_000.0, 64)


def says(page, pattern: str) -> re.Match:
    """The widget's live text, once it matches."""
    said = page.locator("section.kvlab [role=status]")
    said.filter(has_text=re.compile(pattern)).wait_for(timeout=5000)
    return re.search(pattern, said.inner_text())


def test_score_is_that_of_kvlab_for_every_shift(widget_page):
    watched = widget_page(Rotate(ROPE))
    page = watched.page
    start = pair_score(ROPE, 4, 6, 4)
    assert float(says(page, r"is (-?[\d.]+),")[1]) == pytest.approx(start, abs=6e-4)
    page.get_by_role("button", name="Query + 1").click()
    moved = pair_score(ROPE, 4, 7, 4)
    assert float(says(page, r"to (-?\d\.\d+)")[1]) == pytest.approx(moved, abs=6e-4)
    page.get_by_role("button", name="Both + 10").click()
    assert float(says(page, r"stays (-?\d\.\d+)")[1]) == pytest.approx(moved, abs=6e-4)
    assert watched.table("This pair now")[3][1] == "3"
    page.get_by_role("button", name="Reset").click()
    assert watched.table("This pair now")[1][1] == "6"
    watched.check()


def test_sliders_and_pair_by_keyboard(widget_page):
    watched = widget_page(Rotate(ROPE))
    page = watched.page
    page.get_by_label("query at m").focus()
    page.keyboard.press("End")
    page.get_by_label("key at n").focus()
    page.keyboard.press("Home")
    page.get_by_label("pair", exact=True).select_option("0")
    # The text follows the last move after a short pause: wait for the score that is due.
    said = page.locator("section.kvlab [role=status]")
    for _ in range(100):
        found = re.search(r"is (-?[\d.]+),", said.inner_text())
        if found and float(found[1]) == pytest.approx(pair_score(ROPE, 0, 64, 0), abs=6e-4):
            break
        page.wait_for_timeout(50)
    assert float(found[1]) == pytest.approx(pair_score(ROPE, 0, 64, 0), abs=6e-4)
    page.get_by_role("button", name="Query + 1").click()
    assert says(page, "end of the slider")
    watched.check()


def test_every_choice_of_the_drift_curves_is_the_record(widget_page):
    record = read_record()
    watched = widget_page(DriftCurves())
    page = watched.page
    for offset, layer in ((1, None), (64, None), (64, 0), (4, record["num_layers"] - 1)):
        curve = next(c for c in record["curves"] if c["offset"] == offset and c["layer"] == layer)
        page.get_by_label("decode positions moved by").select_option(str(offset))
        where = "all layers" if layer is None else f"layer {layer} only"
        page.get_by_label("in", exact=True).select_option(where)
        head, row = watched.table("KL against the right run")
        assert head[1:4] == ["0", "1", "2"]
        assert float(row[2]) == pytest.approx(curve["kl"][1], rel=0.06)
        assert says(page, rf"Moved by {offset} in {where}.*perplexity {curve['perplexity']:.1f}")
    assert record["date"] in page.locator("section.kvlab").inner_text()
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("widget", [lambda: Rotate(ROPE), DriftCurves], ids=["rotate", "drift"])
def test_reads_well_on_a_phone(widget_page, widget, theme):
    watched = widget_page(widget(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []
    assert watched.page.locator("details.kvlab-twin table").count() == 1
