"""The block pool in a browser: the recorded trace, blocks.py in the page, and breaking it."""

from __future__ import annotations

import re

import pytest

from kvlab.notebook.pool_lab import BREAKS, TOUR, pool_trace
from kvlab.notebook.widgets.scenes import Pool

pytestmark = pytest.mark.browser


def words_of(block: dict, size: int) -> str:
    """What the picture says of a block to a screen reader."""
    if block["id"] == 0:
        return "block 0: the null block, never handed out"
    if block["ref"]:
        held = f", held {block['ref']} times" if block["ref"] > 1 else ""
        text = (
            f"held by {' '.join(block['owners'])}{held}, {block['filled']} of {size} slots filled"
        )
        return f"block {block['id']}: {text}" + (", published" if block["cached"] else "")
    return f"block {block['id']}: {'cached' if block['cached'] else 'free'}"


def shows(watched, state: dict, size: int = 4) -> None:
    """Text, blocks, tables and free list on the page are those of a state of Python's."""
    page = watched.page
    page.locator("section.kvlab p", has_text=state["text"]).first.wait_for()
    drawn = page.locator(".kvp-block .kvlab-hidden").all_text_contents()
    assert drawn == [words_of(block, size) for block in state["blocks"]]
    names = page.locator(".kvp-name").all_text_contents()
    assert names == [
        f"{s['name']} table [{', '.join(map(str, s['table']))}]" for s in state["sequences"]
    ]
    ids = [f"{i}*" if state["blocks"][i]["cached"] else str(i) for i in state["free"]]
    page.get_by_text(f"Free list, next out first (* cached): {' '.join(ids) or 'empty'}").wait_for()


def test_every_recorded_state_by_keyboard(widget_page):
    watched = widget_page(Pool(step=0))
    slider = watched.page.get_by_role("slider", name="operation")
    slider.focus()
    for state in pool_trace(TOUR)["states"]:
        shows(watched, state)
        watched.page.get_by_text("check_integrity(): all is well.").wait_for()
        watched.page.keyboard.press("ArrowRight")
    watched.check()


def test_a_token_leads_to_its_slot(widget_page):
    watched = widget_page(Pool())
    page = watched.page
    for seq in pool_trace(TOUR)["states"][10]["sequences"]:
        for position in (0, 4, 9, seq["computed"] - 1):
            token = page.get_by_role("button", name=f"{seq['name']}, position {position}:")
            token.focus()
            page.keyboard.press("Enter")
            block = seq["table"][position // 4]
            page.get_by_text(
                f"block {block}, offset {position} % 4 = {position % 4}, "
                f"slot {block} × 4 + {position % 4} = {block * 4 + position % 4}."
            ).wait_for()
            chosen = page.locator(".kvp-block.kvp-chosen .kvlab-hidden").text_content()
            assert chosen.startswith(f"block {block}:")
            assert page.locator(".kvp-cell.kvp-here").count() == 1
    watched.check()


def test_the_twin_holds_every_step(widget_page):
    watched = widget_page(Pool())
    assert watched.page.locator("details.kvlab-twin tr").count() == len(TOUR) + 2
    watched.check()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390), ("light", 390)])
def test_it_fits_and_can_be_used_by_all(widget_page, theme, width):
    watched = widget_page(Pool(), theme=theme, width=width)
    assert watched.overflow() <= 0
    watched.check()
    assert watched.axe() == []  # last: axe fetches the style sheet, which a page from disk forbids


def test_blocks_py_runs_in_the_page_and_speaks_when_broken(widget_page):
    watched = widget_page(Pool(step=10))
    page = watched.page
    assert page.get_by_role("button", name="Arrive").is_disabled()
    watched.start()
    operations = list(TOUR[:10])

    def press(button: str, operation: dict) -> None:
        operations.append(operation)
        page.get_by_role("button", name=button, exact=True).click()
        shows(watched, pool_trace(operations)["states"][-1])

    press("Arrive", {"op": "arrive", "text": "story", "length": 9})
    page.get_by_label("sequence", exact=True).select_option("B")
    press("Append", {"op": "append", "name": "B"})
    press("Fork", {"op": "fork", "name": "B"})
    page.get_by_label("sequence", exact=True).select_option("B")
    press("Append", {"op": "append", "name": "B"})
    press("Roll back 3", {"op": "truncate", "name": "B", "drop": 3})
    press("Preempt", {"op": "preempt", "name": "B"})
    page.get_by_label("sequence", exact=True).select_option("C")
    press("Free", {"op": "free", "name": "C"})

    page.get_by_label("by hand").select_option("miscount")
    page.get_by_role("button", name="Break it").click()
    broken = pool_trace([*operations, {"op": "break", "what": "miscount", "number": 1}])
    for finding in broken["states"][-1]["findings"]:
        page.locator("li", has_text=finding).first.wait_for()
    page.get_by_text(re.compile(r"check_integrity\(\) found \d")).wait_for()

    page.get_by_role("button", name="Empty pool").click()
    page.get_by_text("check_integrity(): all is well.").wait_for()
    page.get_by_label("block size, tokens").fill("2")
    page.get_by_label("text", exact=True).select_option("recipe")
    page.get_by_role("button", name="Arrive").click()
    one = [{"op": "arrive", "text": "recipe", "length": 9}]
    shows(watched, pool_trace(one, block_size=2)["states"][-1], size=2)

    page.get_by_role("button", name="Random workload").click()
    shows(watched, pool_trace(block_size=2, seed=7, length=40)["states"][0], size=2)
    page.get_by_role("slider", name="operation").focus()
    page.keyboard.press("End")
    shows(watched, pool_trace(block_size=2, seed=7, length=40)["states"][-1], size=2)
    watched.check()


def test_every_way_to_break_it_is_on_the_menu(widget_page):
    watched = widget_page(Pool())
    menu = watched.page.get_by_label("by hand")
    values = menu.locator("option").evaluate_all("options => options.map((o) => o.value)")
    assert values == list(BREAKS)
    watched.check()
