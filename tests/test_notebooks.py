"""The three gates of every chapter, and the builder itself on a small one.

1. The .py and the .ipynb hold the same source.
2. Run again in a fresh kernel, every output is the same (nbval, strict).
3. The book builds without a warning: `make test` builds it before pytest starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

from kvlab.kernels.choose import choose_dtype, half_dtype

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import address as address_tool  # noqa: E402
import build_notebooks as builder  # noqa: E402
import run_chapters  # noqa: E402

SOURCES = sorted((ROOT / "chapters").glob("[0-9][0-9]_*.py"))
EVERY = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
#: What makes an output differ between machines: a clock, or the device that is there.
CLOCK = re.compile(r"perf_counter|monotonic|times?\b|time_|timeit|measure|timed|clock|bench|"
                   r"seconds|throughput|backend|device", re.IGNORECASE)
#: How a cell that is not compared tells its reader why.
WHY = ("# A clock: yours will differ.\n", "# Depends on the machine: yours may differ.\n")


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in builder.read_source(path).cells if cell.cell_type == "code"]


@EVERY
def test_py_and_ipynb_hold_the_same_source(path):
    assert not builder.differences(path, builder.address())


def run_nbval(path: Path) -> subprocess.CompletedProcess:
    """Strict nbval in a process of its own: outputs compared exactly."""
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-x",
               "--nbval-cell-timeout=600", "--nbval-kernel-startup-timeout=120",
               "-p", "no:cacheprovider", "-p", "no:xdist", "--color=no", "-c", os.devnull,
               f"--rootdir={path.parent}", str(path)]
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith("PYTEST_") and k != "TRITON_INTERPRET"}  # as when built
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent,
                          env=environment)


def kernel_did_not_start(done: subprocess.CompletedProcess) -> bool:
    """Whether nbval failed before the first cell ran: not the chapter's fault."""
    return done.returncode != 0 and bool(re.search(
        r"Kernel (?:died|didn't respond)|Kernel dead on test start", done.stdout + done.stderr))


def gate(path: Path) -> subprocess.CompletedProcess:
    """nbval, with one retry if the kernel did not even start."""
    done = run_nbval(path)
    return run_nbval(path) if kernel_did_not_start(done) else done


@EVERY
@pytest.mark.real
def test_a_fresh_run_gives_the_same_outputs(path):
    done = gate(path.with_suffix(".ipynb"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@EVERY
def test_cells_are_of_one_idea(path):
    lengths = [len([line for line in cell.source.splitlines() if line.strip(" )]},")
                    and not line.lstrip().startswith("#")])
               for cell in code_cells(path) if "setup" not in builder.tags(cell)]
    assert statistics.median(lengths) <= 8, f"median {statistics.median(lengths)} lines"
    assert max(lengths) <= 35, f"a cell of {max(lengths)} lines"


@EVERY
def test_a_cell_that_is_not_compared_says_why_and_shows_something(path):
    for cell in nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells:
        if "nbval-ignore-output" in builder.tags(cell):
            assert cell.source.startswith(WHY), f"first line: one of {WHY}\n{cell.source}"
            assert CLOCK.search(cell.source.split("\n", 1)[1]), f"no clock\n{cell.source}"
            assert cell.outputs, f"shows nothing: drop the tag\n{cell.source}"


@EVERY
def test_a_chapter_has_its_parts(path):
    notebook = builder.read_source(path)
    text = "\n".join(cell.source for cell in notebook.cells)
    number = int(path.name[:2])
    assert notebook.cells[0].source.startswith(f"# {number}. ")
    assert len(set(re.findall(rf'check\("({number}\.\d+)"', text))) >= 3, "three checked exercises"
    assert "show(" in text, "a widget"
    assert re.search("vLLM", text) and re.search("SGLang", text), "how the engines name it"
    assert re.search(r"^(?:#+ |\*\*).*References?", text, re.MULTILINE), "references"
    assert not re.search(r"^(?:```\{|:::)", text, re.MULTILINE), "MyST directives show raw in Colab"


def test_the_table_of_contents_and_the_readme_name_every_chapter():
    toc, readme = (ROOT / "_toc.yml").read_text(), (ROOT / "README.md").read_text()
    for path in SOURCES:
        assert f"file: chapters/{path.stem}\n" in toc, path.stem
        assert readme.count(f"chapters/{path.stem}.ipynb") == 2, path.stem


@EVERY
def test_nb_01_committed_notebook_renders_on_github(path):
    built = path.with_suffix(".ipynb")
    assert built.stat().st_size < builder.MAX_BYTES
    notebook = nbformat.read(built, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert widget_state_is_sound(json.loads(built.read_text(encoding="utf-8")))
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        assert cell.get("execution_count") is None
        for output in cell.get("outputs", []):
            assert builder.WIDGET_VIEW not in output.get("data", {})
            assert output.output_type != "error" and output.get("name") != "stderr"


def widget_state_is_sound(notebook: dict) -> bool:
    """GitHub refuses a notebook whose widget metadata holds models without `state` and version."""
    widgets = notebook["metadata"].get("widgets", {})
    return all({"state", "version_major", "version_minor"} <= set(block)
               for block in widgets.values())


def test_nb_01_models_without_state_are_refused():
    name = "application/vnd.jupyter.widget-state+json"
    assert not widget_state_is_sound({"metadata": {"widgets": {name: {"abc": {"model": 1}}}}})
    sound = {"state": {}, "version_major": 2, "version_minor": 0}
    assert widget_state_is_sound({"metadata": {"widgets": {name: sound}}})


# --- the builder, on a small chapter ---

SMALL = '''\
# %% [markdown]
# # 90. Small
#
# A question?

# %%
# setup

# %%
import ipywidgets
from IPython.display import HTML, display

display(ipywidgets.IntSlider())
display(HTML("<b>twin</b>"))

# %%
print(1 + 1)

# %%
print(1 + 1)

# %% tags=["nbval-ignore-output"]
import time

print(time.perf_counter(), object())
'''


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "90_small.py"
    path.write_text(SMALL, encoding="utf-8")
    shutil.copy(ROOT / "chapters" / "conftest.py", tmp_path)
    return path


URL = "https://github.com/someone/book"


def test_a_rebuild_is_byte_identical_and_holds_no_state(small):
    small.write_text(SMALL[:SMALL.index('# %% tags=["nbval')])
    built = builder.build(small, URL)
    first = built.read_bytes()
    assert builder.build(small, URL).read_bytes() == first
    notebook = nbformat.reads(first.decode(), as_version=4)
    assert "widgets" not in notebook.metadata and b"widget-view" not in first
    assert b"timing" not in first and b"iopub" not in first
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert "github/someone/book/blob/main/chapters/90_small.ipynb" in notebook.cells[0].source
    assert "<b>twin</b>" in json.dumps(notebook.cells[2].outputs)


def test_nb_05_clock_cells_are_ignored_and_results_compared(small):
    built = builder.build(small, URL)
    assert builder.differences(small, URL) == []
    done = gate(built)
    assert done.returncode == 0, done.stdout
    stale = built.read_text().replace('"2\\n"', '"3\\n"', 1)
    built.write_text(stale)
    assert gate(built).returncode != 0


def test_nb_05_a_kernel_that_does_not_start_is_tried_once_more(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="RuntimeError: Kernel died before replying",
                             stderr="")
    wrong = SimpleNamespace(returncode=1, stdout="mismatch 'text'", stderr="")
    fine = SimpleNamespace(returncode=0, stdout="", stderr="")
    module = sys.modules[__name__]
    for answers, expected, calls in (([failed, fine], fine, 2), ([failed, failed], failed, 2),
                                     ([wrong, fine], wrong, 1)):
        queue = list(answers)
        monkeypatch.setattr(module, "run_nbval", lambda path, queue=queue: queue.pop(0))
        assert gate(Path("x")) is expected
        assert len(answers) - len(queue) == calls


def test_an_edit_in_one_file_only_is_found(small):
    built = builder.build(small, URL)
    small.write_text(small.read_text().replace("print(1 + 1)", "print(1 + 2)", 1))
    assert "differs" in builder.differences(small, URL)[0]
    built.unlink()
    assert "not built" in builder.differences(small, URL)[0]


@pytest.mark.parametrize(("old", "new", "message"), [
    ("# # 90. Small", "# Small", "first cell"),
    ("# setup", "x = 1", "setup"),
    ('tags=["nbval-ignore-output"]', 'tags=["raises-exception"]', "unknown tags"),
    ("print(1 + 1)", "import sys; print(1, file=sys.stderr)", "stderr"),
    ("print(1 + 1)", f"print('x' * {builder.MAX_BYTES})", "more than"),
])
def test_what_the_builder_refuses(small, old, new, message):
    assert old in SMALL
    small.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(builder.ChapterError, match=message):
        builder.build(small, URL)


def test_a_run_on_other_versions_says_what_failed_and_where(small, capsys):
    """And goes on: the chapter after the broken one is run too."""
    text = builder.build(small, URL).read_text()
    small.with_name("89_broken.py").write_text(SMALL)
    broken = text.replace("print(1 + 1)", "print(1 / 0)", 1)
    small.with_name("89_broken.ipynb").write_text(broken)
    assert run_chapters.main([], small.parent) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "transformers" in lines[0]
    assert re.fullmatch(r"89_broken +failed +\d+ s  cell 3: ZeroDivisionError: .*", lines[1])
    assert re.fullmatch(r"90_small +passed +\d+ s", lines[2])
    assert lines[3] == "1 passed, 1 failed"
    assert run_chapters.main(["90"], small.parent) == 0


def test_the_setup_cell_changes_nothing_where_kvlab_is_there():
    program = builder.SETUP.format(address=URL) + "\nassert 'package' not in globals()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# --- one address ---


def test_one_address_everywhere():
    assert not address_tool.strangers(ROOT)


def test_make_address_rewrites_all_places(tmp_path):
    old = "https://github.com/OWNER/REPOSITORY"
    (tmp_path / "chapters").mkdir()
    (tmp_path / "_config.yml").write_text(f"repository:\n  url: {old}\n")
    source = tmp_path / "chapters" / "90_small.py"
    source.write_text(SMALL)
    builder.write_shared(source, old)
    (tmp_path / "README.md").write_text(
        f"[code]({old}) [Colab](https://colab.research.google.com/github/OWNER/REPOSITORY/blob/x)")
    assert len(address_tool.rewrite(tmp_path, URL)) == 3
    assert builder.address(tmp_path) == URL and not address_tool.strangers(tmp_path)
    assert not any("OWNER" in path.read_text() for path in tmp_path.rglob("*.*"))
    assert builder.write_shared(source, URL) is False
    source.write_text(source.read_text().replace("someone/book", "someone/else"))
    assert len(address_tool.strangers(tmp_path)) == 2


# --- links inside the project ---

LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def dead_links(path: Path, text: str, root: Path) -> list[str]:
    """Relative links of a Markdown text that lead nowhere. Links to other sites are not asked."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    dead = []
    for match in LINK.finditer(text):
        target = (match[1] or match[2]).split("#")[0].split("?")[0]
        if not target or re.match(r"[a-z]+:", target) or target.startswith(("{", "<")):
            continue
        base = root if target.startswith("/") else path.parent
        place = base / target.lstrip("/")
        # A chapter is linked as .ipynb; a page of the book as .md, .html or without an ending.
        if not any(p.exists() for p in (place, place.with_suffix(".md"), place.with_suffix(".py"))):
            dead.append(f"{path.name}: {target}")
    return dead


def test_nb_07_links_inside_the_project_lead_somewhere():
    dead = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "book").glob("*.md")]:
        dead += dead_links(path, path.read_text(encoding="utf-8"), ROOT)
    for path in SOURCES:
        for cell in builder.read_source(path).cells:
            if cell.cell_type == "markdown":
                dead += dead_links(path, cell.source, ROOT)
    assert not dead, dead


def test_nb_07_dead_links_fail_and_other_sites_are_not_asked(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](missing.md#x) [b](page.md#top) [c](https://example.org/429) `[d](no.md)`")
    assert dead_links(page, page.read_text(), tmp_path) == ["page.md: missing.md"]


# --- what differs between machines ---


@pytest.mark.parametrize(("capability", "dtype"), [
    ((7, 5), torch.float16), ((7, 0), torch.float16), ((8, 0), torch.bfloat16),
    ((8, 6), torch.bfloat16), ((9, 0), torch.bfloat16), ((12, 0), torch.bfloat16)])
def test_nb_08_dtype_by_compute_capability(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    chosen, why = half_dtype(capability)
    assert chosen is dtype and f"{capability[0]}.{capability[1]}" in why
    assert choose_dtype("cpu")[0] is torch.float32


# --- offline ---


@pytest.mark.parametrize("code", [
    "import socket; socket.create_connection(('example.org', 80), 5)",
    "import urllib.request; urllib.request.urlopen('http://192.0.2.1', timeout=5)",
])
def test_nb_06_programs_that_tests_start_have_no_network(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "network blocked" in done.stderr


def test_nb_06_neither_has_this_process():
    import socket

    with pytest.raises(OSError, match="network blocked"):
        socket.create_connection(("example.org", 443), 5)
