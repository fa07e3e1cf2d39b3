"""What all widgets share: one valid module each, a text twin, nothing from outside."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest
from IPython.display import HTML

from book.extension import page_widgets
from kvlab.notebook import display, widgets
from kvlab.notebook.widgets import LabWidget, Twin
from kvlab.notebook.widgets.costs import CostTable
from kvlab.notebook.widgets.practice import Predict

FOLDER = Path(widgets.__file__).parent
#: Those of chapters by name, those that only pages show by path.
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.js")) + [
    str(page_widgets.HERE / name) for name in ("audit.js", "progress.js")
]
OURS = (widgets.__name__, "book.")  # not those that tests define


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_widget_is_one_module_that_parses(script, tmp_path):
    path = tmp_path / "widget.mjs"
    path.write_text(widgets.module_text(script), "utf-8")
    done = subprocess.run(["node", "--check", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_text("utf-8").count("export default") == 1


@pytest.mark.parametrize("name", [*SCRIPTS, *(f"shared/{part}" for part in widgets.SHARED)])
def test_scripts_write_text_only_and_ask_nobody(name):
    text = (FOLDER / name).read_text("utf-8")
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "Function("):
        assert forbidden not in text
    addresses = set(re.findall(r"https?://[\w.]+", text))
    assert addresses <= {"http://www.w3.org"}
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts)\b", text)


def test_every_script_has_its_class():
    for path in FOLDER.glob("[a-z]*.py"):
        importlib.import_module(f"{widgets.__name__}.{path.stem}")
    classes = [c for c in LabWidget.__subclasses__() if c.__module__.startswith(OURS)]
    assert sorted(c.script for c in classes) == sorted(SCRIPTS)


def test_a_twin_escapes_what_it_is_given():
    html = Twin("<b>", ("a&b", "c"), [("<script>", 1)], note="x < y").html("t")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert html.startswith("<details open")
    assert Twin("a", ("b",), [], folded=True).html().startswith("<details class")


def test_show_displays_the_widget_and_then_its_twin(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widget = CostTable()
    widgets.show(widget)
    assert shown[0] is widget
    assert isinstance(shown[1], HTML)
    assert widget.twin_id in shown[1].data


def test_repr_and_ids_are_the_same_in_every_run():
    widget = Predict("How many?", 3)
    assert repr(widget) == "Predict()"
    assert re.fullmatch(r"[0-9a-f]{32}", widget.model_id)
    assert re.fullmatch(r"Predict-\d+", widget.twin_id)


def test_a_widget_without_a_twin_says_so():
    class Mute(LabWidget):
        script = "predict.js"

    with pytest.raises(NotImplementedError, match="write twin"):
        Mute().twin()


def test_the_kernel_answers_with_the_same_functions(monkeypatch):
    widget = Predict("How many?", 3)
    sent = []
    monkeypatch.setattr(widget, "send", sent.append)
    ask = {"kind": "kvlab-ask", "id": "1", "function": "echo", "arguments": {"a": 1}}
    widgets._reply(widget, ask, [])
    widgets._reply(widget, {"kind": "something else"}, [])
    assert sent == [{"kind": "kvlab-answer", "id": "1", "text": '{"ok": {"a": 1}}'}]


def test_python_and_css_agree_on_the_colours():
    css = widgets.shared_css().split("html[data-theme")[0]
    for name, colour in display.COLOURS.items():
        if name != "padding":  # a grey: lighter as a surface than as a line
            assert f"--kv-{name}: {colour.lower()};" in css
