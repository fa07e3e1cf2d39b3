"""say, table and figure: what lands in a notebook's output."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from kvlab.notebook import NotebookError, display
from kvlab.notebook.page_figures import figure_html

SERIES = {"measured": ([1, 2], [3.0, 4.5]), "predicted": ([1, 3], [3.1, 9.0])}
WORDS = {"x": "s", "y": "ms", "title": "A title", "alt": "Two lines"}


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(display, "display", lambda thing, raw=False: outputs.append(thing))
    return outputs


def test_say_is_markdown(shown):
    display.say("**1**", "two")
    assert shown[0].data == "**1**\n\ntwo"


def test_a_table_has_a_caption_and_escapes_its_cells(shown):
    display.table([{"s": "<b>", "t": 2}], "Sizes & times", note="a < b")
    html = shown[0]["text/html"]
    assert "<caption>Sizes &amp; times</caption>" in html
    assert "&lt;b&gt;" in html
    assert "style=" not in html
    assert shown[0]["text/plain"].startswith("Sizes & times\n")


def test_a_named_index_heads_its_column(shown):
    display.table(pd.DataFrame({"s": [1], "t": [2]}).set_index("s"), "A table")
    assert "<th>s</th>" in shown[0]["text/html"]


@pytest.mark.parametrize("kind", ["lines", "markers", "bars", "steps"])
def test_a_figure_carries_its_words_and_its_numbers(shown, kind):
    display.figure(SERIES, kind=kind, **WORDS)
    figure, numbers = shown
    assert figure["text/plain"] == "Two lines"
    assert [trace["name"] for trace in figure[display.PLOTLY]["data"]] == list(SERIES)
    assert "4.5" in numbers.data
    assert numbers.data.startswith("<details")


def test_a_figure_without_words_is_refused(shown):
    with pytest.raises(NotebookError, match="alt="):
        display.figure(SERIES, **{**WORDS, "alt": ""})
    with pytest.raises(NotebookError, match="expected"):
        display.figure(SERIES, kind="pie", **WORDS)


def test_the_same_thing_has_the_same_colour(shown):
    display.figure(SERIES, colours={"measured": "weights"}, **WORDS)
    assert shown[0][display.PLOTLY]["data"][0]["line"]["color"] == display.COLOURS["weights"]


def test_a_figure_on_a_page_cannot_close_its_own_script():
    layout = {"meta": {"alt": 'a "quoted" <word>'}, "title": {"text": "</script><b>"}}
    html = figure_html({"data": [], "layout": layout})
    assert html.count("</script>") == 1
    data = html.split('json">')[1].split("</script>")[0]
    assert json.loads(data)["layout"] == layout
    assert "&quot;quoted&quot; &lt;word&gt;" in html
