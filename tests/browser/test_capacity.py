"""The planner, and pasted configs: the page's Python gives what the command line gives."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvlab.configs import DATA_DIR, find_model, model_names
from kvlab.notebook.widgets.sheet import Capacity
from kvlab.sheet import ask_capacity, kv_report, units

pytestmark = pytest.mark.browser
BROKEN = {
    "not json": "{",
    "a list": "[1, 2]",
    "plain text": "hello",
    "no layers": '{"model_type": "llama", "hidden_size": 64}',
    "a string for a number": '{"num_hidden_layers": "2", "hidden_size": 64}',
    "heads that do not divide": (
        '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 6}'
    ),
    "an encoder": '{"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64}',
    "too deep": '{"text_config": ' * 3000 + "1" + "}" * 3000,
}


def command_line(path) -> tuple[int, str, str]:
    """`kvlab kv PATH --json`: exit status, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "kvlab", "kv", str(path), "--json"], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def ask(page, function: str, arguments: dict) -> dict:
    """A question as the widget asks it: the transport's own text."""
    text = page.evaluate("([name, args]) => kvlabPage.ask(name, args)", [function, arguments])
    return json.loads(text)


def plan(watched) -> dict[str, str]:
    return dict(watched.table("The plan, on each card")[1:])


def test_first_view_needs_no_python(widget_page):
    widget = Capacity()
    watched = widget_page(widget)
    shown = plan(watched)
    for label, value in widget.twin().rows:
        assert shown[label] == value
    assert "do not fit; 56 would" in watched.page.locator("section.kvlab").inner_text()
    watched.check()


def test_pasted_configs_give_what_the_command_line_gives(widget_page, tmp_path):
    watched = widget_page(Capacity())
    watched.start()
    for stem in model_names():
        path = DATA_DIR / "models" / f"{stem}.json"
        answer = ask(watched.page, "kv", {"config": path.read_text("utf-8")})
        if stem in ("llama-3-8b", "gemma-3-27b", "deepseek-v3", "jamba-v0.1", "falcon-7b"):
            status, printed, _ = command_line(path)
            assert status == 0
            assert answer == {"ok": json.loads(printed)}
        else:  # the same function as the command line calls, without a process for each
            from_here = json.loads(json.dumps(_report(path)))
            assert answer == {"ok": from_here}
    for name, text in BROKEN.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text, "utf-8")
        status, _, complaint = command_line(path)
        error = ask(watched.page, "kv", {"config": text})["error"]
        assert status == 2
        if text[:1] in "{[":
            assert complaint.strip() == f"kvlab: {error['message']}"
        assert error["name"] in ("ConfigError", "SheetError")
    watched.check()


def _report(path) -> dict:
    return kv_report(find_model(path))


def test_pasting_and_planning_by_hand(widget_page):
    watched = widget_page(Capacity())
    watched.start()
    page = watched.page
    page.get_by_text("Paste a config.json").click()
    box = page.get_by_role("textbox", name="config.json")
    read = page.get_by_role("button", name="Read this config")

    box.fill((DATA_DIR / "models" / "llama-3.1-70b.json").read_text("utf-8"))
    read.click()
    page.wait_for_function("document.body.innerText.includes('the weights alone do not fit')")
    page.get_by_label("cards (tensor parallel)").select_option("4")
    expected = ask_capacity(
        model="llama-3.1-70b", card="h100-sxm", tp=4, tokens=8192, sequences=64, utilisation="0.90"
    )
    text = units.both_bytes(expected["pool_bytes"])
    page.wait_for_function("t => document.body.innerText.includes(t)", arg=text)
    assert plan(watched)["sequences that fit"] == f"{expected['sequences_that_fit']:,}"

    box.fill('{"num_hidden_layers": 2, "hidden_size": 5120, "num_attention_heads": 24}')
    read.click()
    alert = page.get_by_role("alert").filter(has_text="ConfigError")
    alert.wait_for()
    assert "head_dim: missing, and hidden_size 5120" in alert.inner_text()
    assert plan(watched) == {}

    page.get_by_role("combobox", name="model").select_option("gpt-oss-20b")
    page.wait_for_function("document.body.innerText.includes('gpt-oss-20b: 64 sequences')")
    watched.check()


def test_pasted_markup_stays_text(widget_page):
    watched = widget_page(Capacity())
    watched.start()
    page = watched.page
    page.evaluate("globalThis.pwned = 0")
    page.get_by_text("Paste a config.json").click()
    hostile = '<img src=x onerror="globalThis.pwned=1"><script>globalThis.pwned=1</script>'
    config = {"_name": hostile, "model_type": hostile, "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "vocab_size": 10}  # fmt: skip
    before = page.locator("img, script").count()
    for text in (json.dumps(config), json.dumps({**config, "num_hidden_layers": hostile}), hostile):
        page.get_by_role("textbox", name="config.json").fill(text)
        page.get_by_role("button", name="Read this config").click()
        page.wait_for_function(
            "t => [...document.querySelectorAll('.kvlab [role=alert], .kvlab li')]"
            ".some((e) => e.textContent.includes(t))",
            arg="onerror" if text[:1] == "{" else "expected JSON text",
        )
    assert page.locator("img, script").count() == before
    assert page.evaluate("globalThis.pwned") == 0
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(widget_page, theme):
    watched = widget_page(Capacity(), theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []


def test_without_scripts_the_table_says_it(widget_page):
    watched = widget_page(Capacity(), scripts=False)
    text = watched.page.locator("details.kvlab-twin").inner_text()
    assert "left for the cache" in text and "56.73 GiB (60.91 GB)" in text
