"""The triangle of chapter 1: its controls, by keyboard, give the numbers of costs.py."""

from __future__ import annotations

import pytest

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.widgets.costs import Recompute

pytestmark = pytest.mark.browser
SMOL = preset("smollm2-135m")


def cells(page) -> list[list[str]]:
    rows = page.locator("section.kvlab tbody tr").all()
    return [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]


def expected(prompt: int, step: int) -> list[str]:
    context = prompt + step
    return [
        str(context),
        str(costs.logit_rows_discarded(context)),
        f"{costs.sum_of_contexts(prompt, step) - step:,}",
        f"{costs.kv_rows_recomputed(SMOL, prompt, step):,}",
    ]


def test_first_state_and_keyboard(widget_page):
    watched = widget_page(Recompute(SMOL))
    page = watched.page
    assert [row[0] for row in cells(page)] == expected(6, 5)
    page.get_by_label("step t", exact=False).last.focus()
    page.keyboard.press("End")
    assert [row[0] for row in cells(page)] == expected(6, 8)
    page.get_by_label("prompt p").focus()
    page.keyboard.press("Home")
    assert [row[0] for row in cells(page)] == expected(1, 8)
    watched.check()


def test_the_cache_takes_the_orange_cells_away(widget_page):
    watched = widget_page(Recompute(SMOL))
    page = watched.page
    waste = page.locator("section.kvlab svg rect[fill='var(--kv-waste)']")
    repeated = sum(6 + t - 1 for t in range(1, 6))
    assert waste.count() == repeated
    page.get_by_label("with a KV cache").check()
    assert waste.count() == 0
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(Recompute(SMOL, prompt=16, decode=16, step=16), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []
