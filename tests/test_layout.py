"""The house's rules: who imports whom, how long a file may be, and that no machine is named.

The order is that of the package's layers. A file imports only from its own layer and those above
it; within a layer there are no circles. A new file must be given a place here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kvlab.answers import FUNCTIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvlab"
MAX_LINES = 260

#: Layers, first to last. Those of STDLIB also run inside the rendered page, by Pyodide.
STDLIB = (
    ("errors", "__init__"),
    ("specs", "units"),
    ("configs", "configs.*"),
    ("costs", "kv_formats", "kv_costs"),
    ("roofline", "accounting"),
    ("reports*", "audit*"),
    ("sequence", "prefix*", "blocks", "slots", "integrity", "block_tables", "paging*"),
    ("request", "schedule", "policy", "admission", "drafts", "scheduler*", "invariants"),
    ("batch", "trace*", "workload*"),
    ("answers",),
)
TORCH = (
    ("formulas", "rope_scaling", "positions"),
    ("devices", "hf"),
    ("rope", "cache*", "paged_cache*", "kernels.*", "kernels"),
    ("attention*", "paged_attention*", "backends"),
    ("model*",),
    ("checkpoint", "checkpoint.*"),
    ("generate*", "padding", "sampling*", "decoding*"),
    ("engine*",),
    ("faults", "faults.*", "exercises", "exercises.*"),
    ("pagefiles", "modelstext", "plots*", "measure*", "widgets", "widgets.*"),
    ("sphinxext", "booktext*", "cli*", "__main__"),
)
LAYERS = STDLIB + TORCH
STDLIB_EXTRA = {"kvlab.exercises"}  # leaves that the page runs as well


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(name: str) -> int | None:
    exact = [i for i, names in enumerate(LAYERS) if name in names]
    found = exact or [i for i, names in enumerate(LAYERS)
                      if any(fnmatch(name, pattern) for pattern in names)]
    return found[0] if found else None


def place(name: str) -> int:
    """The layer's number; a file without a layer comes last (another test names it)."""
    found = layer_of(name)
    return len(LAYERS) if found is None else found


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names that a file imports at its top level, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write imports in full"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def own(target: str) -> str | None:
    """The kvlab module that an imported name belongs to, or None for someone else's."""
    if target.split(".")[0] != "kvlab":
        return None
    name = target.removeprefix("kvlab").removeprefix(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


def test_every_file_has_a_place():
    lost = [name for name in MODULES if layer_of(name) is None]
    assert not lost, f"give {lost} a layer in tests/test_layout.py"


def test_files_import_only_from_layers_above():
    wrong = []
    for name, path in MODULES.items():
        for target, line in imports(path):
            other = own(target)
            if other and other != name and place(other) > place(name):
                wrong.append(f"kvlab/{path.relative_to(PACKAGE)}:{line} imports {other}")
    assert not wrong, wrong


def test_no_circles():
    edges = {name: {own(t) for t, _ in imports(path)} - {None, name, "__init__"}
             for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name):], name))
        if name not in done:
            for other in edges[name]:
                # A package's __init__ may gather its own files, which import from each other.
                if not (trail and name.startswith(other + ".")):
                    visit(other, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("names", STDLIB, ids=lambda names: names[0])
def test_stdlib_only_files_import_nothing_else(names):
    wrong = []
    for name, path in MODULES.items():
        if layer_of(name) is None or LAYERS[layer_of(name)] is not names:
            continue
        wrong += [f"{path.name}:{line} imports {target}" for target, line in imports(path)
                  if target.split(".")[0] not in sys.stdlib_module_names and not own(target)]
    assert not wrong, wrong


def test_what_the_page_asks_for_runs_with_the_standard_library_alone():
    """In a bare Python, with no site-packages, as inside the page."""
    modules = sorted({str(target).partition(":")[0] for target in FUNCTIONS.values()})
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True,
                          text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-1500:]


def test_no_imports_inside_functions_but_the_guarded_triton():
    wrong = []
    for path in MODULES.values():
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, or would add; deleted ones left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / line for line in dict.fromkeys(listed) if (ROOT / line).is_file()]


def test_files_are_one_noun_long():
    counts = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
              for path in MODULES.values()}
    long = {str(path): count for path, count in counts.items() if count > MAX_LINES}
    assert not long, f"two nouns in one file (more than {MAX_LINES} lines): {long}"


MACHINE = re.compile(
    r"/(?:work|home|Users|farm)/[A-Za-z]|/root/|/tmp/[a-z]|site-packages/|(?:\d{1,3}\.){3}\d{1,3}:\d+")
REGISTRY = re.compile(r"files\.pythonhosted\.org|registry\.npmjs\.org|/simple/|artifactory|proxy\.")
SKIPPED = {"LICENSE", "LICENSE-prose", "tests/test_layout.py"}


def test_no_machine_is_named():
    """No folder of somebody's machine, no package mirror."""
    wrong = []
    for path in tracked():
        name = str(path.relative_to(ROOT))
        if name in SKIPPED or path.suffix in {".png", ".woff2", ".svg", ".gz"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE.search(line) or REGISTRY.search(line):
                wrong.append(f"{name}:{number}: {line.strip()[:80]}")
    assert not wrong, wrong


def test_nothing_unfinished():
    marks = re.compile(r"\b(?:TODO|FIXME|XXX|nbval-skip)\b|mark\.xfail")
    wrong = []
    for path in tracked("*.py", "*.js", "*.md", "Makefile"):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if marks.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not wrong, wrong


def test_requirements_are_pinned_and_agree_with_constraints():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name.lower().replace("_", "-")] = version
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and line[0] not in "#-":
            name, version = line.split("==")
            assert pins[name.lower().replace("_", "-")] == version, line


def test_environment_yml_installs_the_same_pins():
    assert "- -r requirements.txt" in (ROOT / "environment.yml").read_text()
