"""The shape inspector shows what Python computes, whatever the reader moves."""

from __future__ import annotations

import pytest

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook import NotebookError
from kvlab.notebook.widgets.costs import MODELS, Shapes
from kvlab.sheet import units
from kvlab.specs import LayerSpec

pytestmark = pytest.mark.browser


def expected_row(model: str, kv_heads: int, tokens: int) -> list[str]:
    spec = preset(model)
    layer = LayerSpec("full", kv_heads, spec.head_dim, spec.head_dim)
    each = costs.layer_kv_bytes_per_token(layer)
    whole = units.binary_bytes(spec.num_layers * tokens * each)
    return [f"2 x {kv_heads} x {spec.head_dim}", f"{each:,}", whole]


def test_first_view_is_the_twin(widget_page):
    widget = Shapes("smollm2-135m")
    watched = widget_page(widget)
    assert [r[1:4] for r in watched.table("SmolLM2-135M")[1:]] == [
        list(row[1:4]) for row in widget.twin().rows
    ]
    watched.check()


@pytest.mark.parametrize("model", MODELS)
def test_every_shape_of_the_slider_is_pythons(widget_page, model):
    watched = widget_page(Shapes(model))
    page, spec = watched.page, preset(model)
    slider = page.get_by_role("slider", name="KV heads")
    slider.focus()
    divisors = [d for d in range(1, spec.num_heads + 1) if spec.num_heads % d == 0]
    page.keyboard.press("Home")
    for kv_heads in divisors:
        row = watched.table(spec.name)[2]
        assert row[1:4] == expected_row(model, kv_heads, 8192)
        page.keyboard.press("ArrowRight")
    watched.check()


def test_followed_head_reads_its_group(widget_page):
    watched = widget_page(Shapes("smollm2-135m"))
    page = watched.page
    page.get_by_role("slider", name="follow query head").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "document.body.innerText.includes('Query head 4 reads KV head 4 // 3 = 1')"
    )
    assert page.get_by_role("img", name="query head 4 reads KV head 1").count() == 1
    page.get_by_role("button", name="MQA").click()
    assert page.get_by_role("img", name="query head 4 reads KV head 0").count() == 1
    watched.check()


def test_changing_the_model_takes_its_published_shape(widget_page):
    watched = widget_page(Shapes())
    watched.page.get_by_label("shape of").select_option("falcon-7b")
    assert watched.table("Falcon-7B")[2][0] == "here: 1 KV heads"
    assert watched.table("Falcon-7B")[2][1:4] == expected_row("falcon-7b", 1, 8192)
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(Shapes(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []


def test_without_scripts_the_table_says_it(widget_page):
    watched = widget_page(Shapes("llama-3-8b"), scripts=False)
    text = watched.page.locator("details.kvlab-twin").inner_text()
    assert "query head j reads KV head j // 4" in text


def test_heads_must_divide():
    with pytest.raises(NotebookError, match="divisor"):
        Shapes("llama-3-8b", num_kv_heads=5)
