"""Python inside a page: from a folder, with no network, the same answers as here."""

from __future__ import annotations

import json

import pytest

from kvlab.notebook import page_questions
from kvlab.notebook.widgets import LabWidget, Twin

pytestmark = pytest.mark.browser
SCRIPT = """
function render({ model, el }) {
  const root = frame({ model, el }, "Question");
  const out = h("pre", { id: "out" });
  root.append(startButton(async () => {
    const seen = [await ask(model, "echo", { text: "<b>2^70", number: 1.5, list: [null, true] })];
    try { await ask(model, "os.system", { command: "ls" }); }
    catch (error) { seen.push(error.name, error.message); }
    out.textContent = JSON.stringify(seen);
  }).element, out);
}
export default { render };
"""


@pytest.fixture
def question(tmp_path):
    script = tmp_path / "question.js"
    script.write_text(SCRIPT, "utf-8")
    name = str(script)

    class Question(LabWidget):
        script = name

        def twin(self) -> Twin:
            return Twin("Question", ("a", "b"), [(1, 2)])

    return Question()


def test_the_page_answers_as_python_does(widget_page, question):
    watched = widget_page(question)
    assert not any("pyodide" in url for url in watched.asked)
    watched.start()
    watched.page.wait_for_function("document.querySelector('#out').textContent", timeout=60_000)
    given, name, message = json.loads(watched.page.inner_text("#out"))
    assert given == {"text": "<b>2^70", "number": 1.5, "list": [None, True]}
    refused = json.loads(page_questions.answer_json("os.system", "{}"))["error"]
    assert (name, message) == (refused["name"], refused["message"])
    watched.check()
