"""The questions a widget may ask, and the files that answer them inside a page."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from book.extension import page_python
from kvlab.notebook import NotebookError, page_questions

SMALL = {"echo": {"a": [1, 2]}}


def test_every_listed_function_exists_and_says_what_it_does():
    for place in page_questions.FUNCTIONS.values():
        module, name = place.split(":")
        assert getattr(importlib.import_module(module), name).__doc__


def test_an_answer_is_json():
    assert json.loads(page_questions.answer_json("echo", '{"a": [1, 2]}')) == {"ok": {"a": [1, 2]}}


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("eval", "{}", "NotebookError"),
        ("kvlab.notebook.page_questions:echo", "{}", "NotebookError"),
        ("__import__", '{"name": "os"}', "NotebookError"),
        ("echo", "[1]", "NotebookError"),
        ("echo", "null", "NotebookError"),
        ("echo", "not json", "JSONDecodeError"),
    ],
)
def test_what_is_not_listed_is_refused_by_name(function, arguments, name):
    reply = json.loads(page_questions.answer_json(function, arguments))
    assert reply["error"]["name"] == name
    assert reply["error"]["message"]


def test_page_files_stand_alone(tmp_path):
    """Every question's module imports with the standard library only, as in the page."""
    for path, text in page_python.page_files().items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    modules = sorted({place.split(":")[0] for place in page_questions.FUNCTIONS.values()})
    program = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import kvlab, kvlab.specs; print(kvlab.__file__); print(kvlab.specs.DATA_DIR)\n"
        "from kvlab.configs import preset; print(preset('llama-3-8b').num_layers)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where, data, layers = done.stdout.split()
    assert where.startswith(str(tmp_path))
    assert data.startswith(str(tmp_path))
    assert layers == "32"


def test_page_files_are_small():
    assert len(page_python.page_script()) < 1_000_000


def test_a_heavy_import_is_named(monkeypatch):
    monkeypatch.setitem(page_questions.FUNCTIONS, "bad", "kvlab.cache:ContiguousKVCache")
    with pytest.raises(NotebookError, match=r"kvlab\.\w+ imports torch"):
        page_python.page_modules()
