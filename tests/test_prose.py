"""No typed result stands in prose: numbers in sentences come from code, or are inputs."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest
from prose import chapter_results, literals, typed_results

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9][0-9]_*.py"))
PAGES = sorted([*(ROOT / "book").glob("**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
#: What pages may say of the running example without computing it: its inputs (prompt, forwards).
RUNNING_EXAMPLE = {2048.0, 512.0}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapters_type_no_results(path):
    exercises = ROOT / "kvlab" / "notebook" / "exercises" / f"ch{path.name[:2]}.py"
    code = exercises.read_text(encoding="utf-8") if exercises.is_file() else ""
    found = chapter_results(jupytext.read(path, fmt="py:percent"), code)
    assert not found, "show these through say(f'...') or a table:\n" + "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_type_no_results(path):
    found = typed_results(path.read_text(encoding="utf-8"), RUNNING_EXAMPLE)
    assert not found, f"{path.name}: " + "\n".join(f"line {n}: {text!r}" for n, text in found)


@pytest.mark.parametrize("text", [
    "The cache takes 320 MiB.",
    "It is 2,224 times less work.",
    "About 98.15 % of the bytes are weights.",
    "A step takes 4.9 ms.",
    "KV per token is 131,072 bytes",
    "Attention is 7% of it.",
    "This is 4x too large.",
    "A ratio of 1157.",
    "In chapter 3 we saw 524288.",
])
def test_typed_results_are_found(text):
    assert typed_results(text)


@pytest.mark.parametrize("text", [
    "Llama-3-8B in bf16 on an H100, sm_75, T4, A100-80GB, fp8_e4m3.",
    "# 3. GQA shapes\n\n## 3.1 Heads",
    "1. first\n2. second",
    "See chapter 5, exercises 3.1 and 3.2, step 12, layer 31.",
    "Needs Python 3.11, Triton 3.5 and Sphinx 7.4.7.",
    "Shazeer (2019) and Kwon et al. 2023.",
    "`131,072` bytes and $2P = 16{,}060$ and [here](https://example.org/1234).",
    "```\n4096 bytes\n```",
    "Three of the 9 heads, 2 blocks, 64-bit offsets, the 2nd token.",
    '<img width="720" src="a.png">',
    "vLLM's scheduler.py L566-L575 at a556f3f.",
])
def test_what_is_no_result_passes(text):
    assert not typed_results(text)


def test_inputs_may_be_named():
    code = "run = report(prompt=2048, decode=512)\nassert run == 2224\nok = run < 7.16e14"
    assert literals(code) == {2048.0, 512.0}
    assert not typed_results("A prompt of 2,048 tokens.", literals(code))
    assert typed_results("It is 2,224 times.", literals(code))
