"""The roofline in a browser says what Python says, by mouse and by keyboard."""

from __future__ import annotations

import pytest

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.widgets.costs import ROOFLINE_HEAD, Roofline
from kvlab.sheet import accounting_parameters

pytestmark = pytest.mark.browser


def expected(step: int, **traits) -> list[list[str]]:
    return [list(ROOFLINE_HEAD), *(list(row) for row in Roofline(**traits).rows(step))]


def test_first_state_and_twin(widget_page):
    watched = widget_page(Roofline())
    assert watched.table("step 256: context s = 2,304") == expected(256)
    assert watched.page.locator("svg[role=img] circle").count() == 3
    assert not watched.page.locator("details.kvlab-twin").evaluate("d => d.open")
    watched.check()


@pytest.mark.parametrize(("key", "step"), [("Home", 1), ("End", 512), ("ArrowRight", 257)])
def test_slider_by_keyboard(widget_page, key, step):
    watched = widget_page(Roofline())
    watched.page.get_by_role("slider", name="Step t").focus()
    watched.page.keyboard.press(key)
    assert watched.table(f"step {step}: context") == expected(step)
    watched.check()


@pytest.mark.parametrize(
    "traits",
    [
        {"card": "l4", "dtype": "fp8", "batch": 1},
        {"card": "h200-sxm", "dtype": "bf16", "batch": 256, "prompt": 8000},
        {"model": "smollm2-135m", "card": "rtx-4090", "dtype": "fp32", "batch": 4096},
    ],
)
def test_controls(widget_page, traits):
    watched = widget_page(Roofline())
    page = watched.page
    page.get_by_label("Model").select_option(traits.get("model", "llama-3-8b"))
    page.get_by_label("Card").select_option(traits["card"])
    page.get_by_label("Number format").select_option(traits["dtype"])
    page.get_by_label("Batch").fill(str(traits["batch"]))
    page.get_by_label("Prompt p").fill(str(traits.get("prompt", 2048)))
    assert watched.table("step 256: context") == expected(256, **traits)
    watched.check()


def test_a_card_without_the_format_falls_back_and_says_so(widget_page):
    watched = widget_page(Roofline())
    page = watched.page
    page.get_by_label("Card").select_option("t4")
    assert page.get_by_label("Number format").input_value() == "fp16"
    assert watched.table("NVIDIA T4") == expected(256, card="t4", dtype="fp16")
    assert page.locator("option[value=bf16]").is_disabled()
    watched.check()


def test_kv_overtakes_the_weights(widget_page):
    watched = widget_page(Roofline(batch=1))
    page = watched.page
    spec = preset("llama-3-8b")
    num_parameters, _ = accounting_parameters(spec, "coarse")
    crossing = costs.kv_weight_crossover_tokens(spec, num_parameters)
    page.get_by_text("more weights than KV are read").wait_for()
    page.get_by_label("Batch").fill(str(int(crossing / 2304) + 1))
    page.get_by_text("more KV than weights are read").wait_for()
    watched.check()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_small_dark_and_reachable(widget_page, theme, width):
    watched = widget_page(Roofline(), theme=theme, width=width)
    assert watched.overflow() <= 0
    watched.check()  # before axe, which asks for the page's own style sheet
    assert watched.axe() == []
