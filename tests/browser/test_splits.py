"""The split widget in a browser: what it shows is what the split rule in Python says."""

from __future__ import annotations

import pytest

from kvlab.configs import hardware, preset
from kvlab.notebook.widgets.splits import CARDS, CONTEXTS, SEQUENCES, SPLITS, Splits, launch_facts

pytestmark = pytest.mark.browser
LLAMA = preset("llama-3-8b")


def facts(card="a100-80gb", num_seqs=1, context=4096, splits=1) -> dict:
    return launch_facts(LLAMA, hardware(card).num_multiprocessors, num_seqs, context, splits)


def shown(watched) -> dict[str, str]:
    return {row[0]: row[1] for row in watched.table("This launch")[1:]}


def agrees(watched, found: dict) -> None:
    table = shown(watched)
    assert table["programs = sequences × KV heads × splits"] == f"{found['programs']:,}"
    assert table["slots on the card"] == f"{found['slots']:,}"
    assert table["waves"] == f"{found['waves']:,}"
    assert table["slots busy, over the launch"] == f"{found['busy'] * 100:,.0f} %"
    assert table["turns one after another"] == f"{found['waves'] * found['per_split']:,}"


def test_first_state_is_one_sequence_without_a_split(widget_page):
    watched = widget_page(Splits())
    agrees(watched, facts())
    assert watched.page.locator("section.kvlab svg").first.locator("rect").count() == 216
    watched.sentence("Turn 1: 8 of 216 slots read a tile").wait_for()
    watched.check()


@pytest.mark.parametrize("card", CARDS)
def test_the_rule_as_python_chooses_it(widget_page, card):
    watched = widget_page(Splits())
    page = watched.page
    page.get_by_label("card", exact=True).select_option(card)
    for num_seqs in (SEQUENCES[0], SEQUENCES[-1]):
        for context in (CONTEXTS[0], CONTEXTS[-1]):
            page.get_by_label("sequences", exact=True).select_option(str(num_seqs))
            page.get_by_label("tokens in each").select_option(str(context))
            page.get_by_label("splits", exact=True).select_option("0")
            agrees(watched, facts(card, num_seqs, context, 0))
    watched.check()


def test_by_keyboard_to_the_last_turn_everything_is_read(widget_page):
    watched = widget_page(Splits())
    page = watched.page
    for splits in (str(n) for n in SPLITS):
        page.get_by_label("splits", exact=True).select_option(splits)
        page.get_by_role("slider", name="turn").focus()
        page.keyboard.press("End")
        watched.sentence("So far 100 % of K and V.").wait_for()
        page.keyboard.press("ArrowLeft")
        watched.sentence("So far 100 % of K and V.").wait_for(state="detached")
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(Splits(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []


def test_without_scripts_the_table_is_there(widget_page):
    watched = widget_page(Splits(), scripts=False)
    table = watched.page.locator("details.kvlab-twin table")
    assert table.is_visible()
    assert table.get_by_text("8 on 216").count()
