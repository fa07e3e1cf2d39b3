"""The cost table in a browser says what Python says, by mouse and by keyboard."""

from __future__ import annotations

import pytest

from kvlab import costs
from kvlab.notebook.widgets.costs import CostTable

pytestmark = pytest.mark.browser
HEAD = ["", "without cache", "with cache", "ratio"]


def expected(step: int, **traits) -> list[list[str]]:
    widget = CostTable(**traits)
    return [HEAD, *(list(row) for row in widget.rows(step))]


def test_first_state_is_the_middle_of_the_run(widget_page):
    watched = widget_page(CostTable())
    assert watched.table("after step 24 of") == expected(24)
    assert not watched.page.locator("details.kvlab-twin").evaluate("d => d.open")
    watched.check()


@pytest.mark.parametrize(("key", "step"), [("Home", 1), ("End", 48), ("ArrowRight", 25)])
def test_slider_by_keyboard(widget_page, key, step):
    watched = widget_page(CostTable())
    watched.page.get_by_role("slider", name="Step t").focus()
    watched.page.keyboard.press(key)
    assert watched.table(f"after step {step} of") == expected(step)
    watched.check()


def test_step_buttons_by_keyboard(widget_page):
    watched = widget_page(CostTable())
    page = watched.page
    page.get_by_role("button", name="one step forward").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    assert watched.table("after step 26 of") == expected(26)
    page.get_by_role("button", name="one step back").focus()
    page.keyboard.press("Enter")
    assert watched.table("after step 25 of") == expected(25)


@pytest.mark.parametrize(
    "traits",
    [
        {"prompt": 0, "decode": 1},
        {"prompt": 131072, "decode": 32768},
        {"prompt": 100, "decode": 7, "accounting": "exact"},
        {"model": "smollm2-135m", "prompt": 5, "decode": 128, "accounting": "exact"},
    ],
)
def test_controls_at_their_extremes(widget_page, traits):
    watched = widget_page(CostTable())
    page = watched.page
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Model").select_option(traits.get("model", "llama-3-8b"))
    page.get_by_label("Prompt p").fill(str(traits["prompt"]))
    page.get_by_label("Decode steps").fill(str(traits["decode"]))
    page.get_by_label("Accounting").select_option(traits.get("accounting", "coarse"))
    page.get_by_role("slider", name="Step t").focus()
    page.keyboard.press("End")
    step = traits["decode"]
    assert watched.table(f"after step {step:,} of") == expected(step, **traits)
    watched.check()


def test_what_is_no_number_is_refused_and_named(widget_page):
    watched = widget_page(CostTable())
    page = watched.page
    before = watched.table("after step 24 of")
    page.get_by_text("Settings", exact=True).click()
    for given in ("", "-1", "2.5", "1e99"):
        page.get_by_label("Prompt p").fill(given)
        assert page.get_by_role("alert").first.inner_text()
        assert watched.table("after step 24 of") == before
    watched.check()


def test_play_runs_to_the_end_and_stops_there(widget_page):
    watched = widget_page(CostTable(decode=12, prompt=8), reduced_motion=False)
    page = watched.page
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('input[type=range]').value === '12'")
    page.get_by_role("button", name="Play").wait_for()
    assert watched.table("after step 12 of") == expected(12, decode=12, prompt=8)


def test_play_does_not_move_where_motion_is_unwanted(widget_page):
    watched = widget_page(CostTable(), reduced_motion=True)
    watched.page.get_by_role("button", name="Play").click()
    assert watched.table("after step 48 of") == expected(48)


def sides(page) -> list[float]:
    """The area of the squares left and right of the middle, from the picture's own paths."""
    return page.locator(".kvlab svg").first.evaluate(
        """image => {
        const sums = [0, 0];
        for (const path of image.querySelectorAll("path")) {
            const squares = /M([\\d.-]+) [\\d.-]+h([\\d.-]+)v([\\d.-]+)/g;
            for (const [, x, w, tall] of (path.getAttribute("d") ?? "").matchAll(squares)) {
                sums[Number(x) < 300 ? 0 : 1] += Math.abs(w * tall);
            }
        }
        return sums;
    }"""
    )


@pytest.mark.parametrize(("prompt", "decode", "step"), [(16, 48, 5), (16, 48, 48), (2048, 512, 512)])
def test_area_is_the_tokens_sent_through_the_model(widget_page, prompt, decode, step):
    watched = widget_page(CostTable(prompt=prompt, decode=decode, step=step))
    left, right = sides(watched.page)
    assert left / right == pytest.approx(costs.sum_of_contexts(prompt, step) / step, rel=1e-6)


def test_play_moves_nothing_else_and_every_mark_stays_in_its_box(widget_page):
    watched = widget_page(CostTable(prompt=16, decode=48, step=1))
    page = watched.page
    page.evaluate(
        "globalThis.shift = 0; new PerformanceObserver(list => list.getEntries().forEach("
        "e => { globalThis.shift += e.value; })).observe({type: 'layout-shift'})"
    )
    page.get_by_role("slider", name="Step t").focus()
    for step in range(2, 49):
        page.keyboard.press("ArrowRight")
        said = page.locator(".kvlab-said .kvlab-say").inner_text()
        row = CostTable(prompt=16, decode=48).rows(step)[3]
        assert said.startswith(
            f"Step {step}: {row[1]} without a cache so far, {row[3]} times the {row[2]} with one"
        )
        outside = page.locator(".kvlab svg").first.evaluate(
            """image => [...image.children].filter(mark => {
            const [b, v] = [mark.getBBox(), image.viewBox.baseVal];
            return b.x < 0 || b.y < 0 || b.x + b.width > v.width || b.y + b.height > v.height;
        }).length"""
        )
        assert outside == 0, step
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").wait_for()
    page.get_by_role("button", name="Pause").click()
    assert page.evaluate("globalThis.shift") < 0.1


def test_every_button_answers(widget_page):
    watched = widget_page(CostTable(prompt=16, decode=48, step=20))
    page = watched.page
    for name in ("Running example", "Short prompt", "Zoom in", "Zoom out", "one step back"):
        before = page.locator(".kvlab").inner_text()
        page.get_by_role("button", name=name).click()
        assert page.locator(".kvlab").inner_text() != before, name


def test_picture_and_bar_fit_a_phone(widget_page):
    page = widget_page(CostTable(), width=390).page
    top = page.locator(".kvlab").bounding_box()["y"]
    bar = page.locator(".kvlab-transport").bounding_box()
    assert bar["y"] + bar["height"] - top < 844


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(CostTable(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []


def test_without_scripts_the_table_is_there(widget_page):
    watched = widget_page(CostTable(), scripts=False)
    rows = CostTable().twin().rows
    table = watched.page.locator("details.kvlab-twin table")
    assert table.is_visible()
    for row in rows:
        for cell in row:
            assert table.get_by_text(str(cell), exact=True).count()
