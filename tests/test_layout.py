"""The house's rules: what the core may hold, who imports whom, and that what is named exists.

The core stands at the top of kvlab/, is listed by the docstring of kvlab/__init__.py in reading
order, and imports none of the wings. `tools/house.py` reads the files; here are the rules.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from small_models import tiny_spec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import house as drawing_tool  # noqa: E402
from house import House, imported, parsed  # noqa: E402

#: Files at the top of kvlab/, its two doors (__init__, __main__) included.
MAX_CORE_FILES = 20
#: What `import kvlab.engine` loads of kvlab, and how long that is, docstrings and all.
MAX_LOADED_MODULES = 20
MAX_LOADED_LINES = 4_000
#: Files of which some function runs in one engine step, those in READ_BEFORE aside: what the model
#: calls in any forward, known from the first chapters, and the errors.
MAX_STEP_FILES = 9
READ_BEFORE = {"rope.py", "attention.py", "fast.py", "errors.py"}
#: Files of kernels/ that run in a step besides, where the Triton kernel reads the cache.
MAX_STEP_KERNEL_FILES = 4
#: The whole package: lines of Python, `raise` statements, classes that derive from Exception.
MAX_PACKAGE_LINES = 17_100
MAX_RAISES = 150
MAX_ERROR_CLASSES = 25

#: Folders of kvlab/ that the core does not know.
WINGS = ("configs", "checkpoint", "sheet", "faults", "notebook")
#: These run in a bare Python, and so inside the rendered page: with all that they load they import
#: the standard library alone. So does every function that a page may ask for (`page_modules`).
STDLIB_ONLY = ("errors", "specs", "costs", "blocks", "tables", "request", "scheduler", "batch",
               "integrity", "configs")

HOUSE = House()


def name_in_repository(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, or would add; deleted ones left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / line for line in dict.fromkeys(listed) if (ROOT / line).is_file()]


# --- the core, in reading order ---


def is_empty(house: House, name: str) -> bool:
    """Whether a file holds nothing but a docstring, as many an __init__ does."""
    return len(parsed(house.modules[name]).body) <= 1


def listed_to_the_engine(house: House) -> list[str]:
    listed = house.listed()
    assert "engine" in listed, "the docstring of kvlab/__init__.py lists engine.py"
    return listed[: listed.index("engine") + 1]


def test_the_top_of_the_package_is_the_core():
    at_the_top = [path.name for path in HOUSE.modules.values() if path.parent == HOUSE.package]
    assert len(at_the_top) <= MAX_CORE_FILES, sorted(at_the_top)
    folders = {path.name for path in HOUSE.package.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= {*WINGS, "kernels"}, "a folder that is no wing"


def test_the_docstring_lists_what_an_engine_loads():
    loaded = {name for name in HOUSE.loaded("engine") if not is_empty(HOUSE, name)}
    listed = listed_to_the_engine(HOUSE)
    assert len(listed) == len(set(listed)), "a file is listed twice"
    assert set(listed) == loaded, {"not listed": loaded - set(listed),
                                   "not loaded": set(listed) - loaded}


def test_the_docstring_lists_the_whole_core_in_reading_order():
    listed = HOUSE.listed()
    assert set(listed) >= HOUSE.core, f"not listed: {HOUSE.core - set(listed)}"
    wrong = [f"{name} imports {other}, which is listed after it"
             for number, name in enumerate(listed) if name in HOUSE.modules
             for other in listed[number + 1:] if other in HOUSE.imports[name]]
    assert not wrong, wrong


def test_what_an_engine_loads_is_read_in_an_evening():
    loaded = HOUSE.loaded("engine") | {""}
    lines = sum(len(HOUSE.modules[name].read_text(encoding="utf-8").splitlines())
                for name in loaded)
    assert len(loaded) <= MAX_LOADED_MODULES, sorted(loaded)
    assert lines <= MAX_LOADED_LINES


def test_at_run_time_an_engine_loads_the_same():
    code = ("import json, sys, kvlab.engine\n"
            "print(json.dumps([n for n in sys.modules if n.split('.')[0] == 'kvlab']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    seen = {name.removeprefix("kvlab").removeprefix(".") for name in json.loads(done.stdout)}
    assert seen == HOUSE.loaded("engine") | {""}


def test_the_core_imports_no_wing():
    wrong = [f"{name} imports {other}"
             for name in sorted(HOUSE.core | {n for n in HOUSE.modules if n.startswith("kernels")})
             for other in HOUSE.imports[name] if other.split(".")[0] in WINGS]
    assert not wrong, wrong


def files_that_run(call: Callable[[], object]) -> set[str]:
    """The files of kvlab, below its folder, with a function that runs during a call."""
    found: set[str] = set()
    package = f"{HOUSE.package}/"

    def note(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.add(frame.f_code.co_filename.removeprefix(package))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def files_of_a_step(**settings) -> set[str]:
    """Files to open in order to follow a step in which one request decodes and one comes in.

    They share their first block, so the step also finds a prefix.
    """
    from kvlab.engine import Engine
    from kvlab.model import Decoder

    engine = Engine(Decoder.random(tiny_spec()), num_blocks=17, block_size=4, **settings)
    engine.add_request([1, 2, 3, 4, 5], max_new_tokens=8)
    engine.step()
    engine.add_request([1, 2, 3, 4, 5, 6], max_new_tokens=8)
    files = files_that_run(engine.step)
    assert {"engine.py", "scheduler.py", "model.py"} <= files
    return files - READ_BEFORE


def test_a_step_is_followed_in_few_files():
    files = files_of_a_step()
    assert len(files) <= MAX_STEP_FILES, sorted(files)


def test_a_step_with_the_kernel_is_followed_in_few_files_more():
    pytest.importorskip("triton")
    from kvlab.kernels.choose import KernelPagedAttention

    files = files_of_a_step(attention=KernelPagedAttention)
    kernels = {name for name in files if name.startswith("kernels/")}
    assert 0 < len(kernels) <= MAX_STEP_KERNEL_FILES, sorted(kernels)
    assert len(files - kernels) <= MAX_STEP_FILES, sorted(files)


def test_the_drawing_in_the_contributing_guide_is_made_from_the_imports():
    text = drawing_tool.GUIDE.read_text(encoding="utf-8")
    drawn = drawing_tool.drawing(HOUSE)
    assert drawing_tool.with_drawing(text, drawn) == text, "run `python tools/house.py`"
    assert HOUSE.core <= {name for name, _ in HOUSE.drawn()}, "a box for each file of the core"


# --- the whole package ---


def error_classes(house: House) -> list[str]:
    """Classes that derive from an exception, directly or through others of the package."""
    bases: dict[str, set[str]] = {}
    for path in house.modules.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).split(".")[-1] for base in node.bases}
                bases[node.name] = bases.get(node.name, set()) | names
    built_in = {name for name, value in vars(builtins).items()
                if isinstance(value, type) and issubclass(value, BaseException)}
    found: set[str] = set()
    while more := {name for name, parents in bases.items()
                   if name not in found and parents & (built_in | found)}:
        found |= more
    return sorted(found)


def raises(house: House) -> dict[str, int]:
    """How many `raise` statements each file has."""
    return {name: sum(isinstance(node, ast.Raise) for node in ast.walk(parsed(path)))
            for name, path in house.modules.items()}


def test_the_package_is_small():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines())
             for name, path in HOUSE.modules.items()}
    assert sum(lines.values()) <= MAX_PACKAGE_LINES
    assert sum(raises(HOUSE).values()) <= MAX_RAISES, raises(HOUSE)
    assert len(error_classes(HOUSE)) <= MAX_ERROR_CLASSES, error_classes(HOUSE)


def circle(house: House) -> str | None:
    """A chain of imports that comes back to its beginning, or None."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> str | None:
        if name in trail:
            return " -> ".join((*trail[trail.index(name):], name))
        if name in done:
            return None
        found = None
        for other in sorted(house.imports[name]):
            # A folder's __init__ may gather its own files, which import from each other.
            if not (trail and name.startswith(f"{other}.")):
                found = found or visit(other, (*trail, name))
        done.add(name)
        return found

    return next(filter(None, (visit(name, ()) for name in house.imports)), None)


def test_no_circles():
    assert circle(HOUSE) is None, circle(HOUSE)


def test_no_imports_inside_functions():
    wrong = []
    for path in HOUSE.modules.values():
        for function in ast.walk(parsed(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                wrong += [f"{name_in_repository(path)}:{node.lineno}" for node in ast.walk(function)
                          if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not wrong, wrong


# --- nothing stands there that nobody uses ---

#: A module named in a string or in a text: "kvlab.faults", "kvlab.sheet.kv:ask_kv".
NAMED = re.compile(r"\bkvlab((?:\.[A-Za-z_]\w*)+)(:\w+)?")
#: A file named after a chapter, which asks for it by number: check("3.1", ...).
CHAPTER_PART = re.compile(r"\.ch(\d\d)(?:_\w+)?$")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def named_in_strings(house: House, path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether a function of it is named) of each string in a file that names a module.

    That is how a page asks for a function, and how one program starts another. Docstrings and the
    texts of a sentence do not count: a name is the whole string, or follows "import" or "from". A
    folder's __init__ that loads files of its own by name, import_module(f"{__name__}.{name}"),
    names them without the folder.
    """
    tree = parsed(path)
    told = {id(node) for node in docstrings(tree)}
    by_name = "import_module(f'{__name__}." in ast.unparse(tree)
    folder = ".".join(path.relative_to(house.package).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            if by_name and f"{folder}.{node.value}" in house.modules:
                yield f"{folder}.{node.value}", False
            for match in NAMED.finditer(node.value):
                before = node.value[: match.start()].rstrip()
                if match[0] == node.value or before.endswith(("import", "from", "-m")):
                    yield house.own(match[0].split(":")[0]) or "", match[2] is not None


def page_modules(house: House) -> set[str]:
    """What a widget may ask for, named "kvlab.module:function" in the notebook wing."""
    return {module for name, path in house.modules.items() if name.split(".")[0] == "notebook"
            for module, function in named_in_strings(house, path) if function} - {""}


def users(house: House, outside: list[Path]) -> dict[str, set[str]]:
    """Who uses each module: names of other modules, and paths of files `outside` the package.

    Importing a name through a folder's __init__ is using the module that defines it as well.
    """
    doors: dict[str, dict[str, str]] = {}  # folder -> {name that it offers: where it comes from}
    for folder, path in house.modules.items():
        if path.stem == "__init__":
            doors[folder] = {target.rpartition(".")[2]: other for target, _ in imported(path)
                             if (other := house.own(target)) not in (None, folder)}
    found: dict[str, set[str]] = {name: set() for name in house.modules}

    def use(target: str, user: str) -> None:
        name = house.own(target)
        while name is not None:
            if name != user:
                found[name].add(user)
            name = doors.get(name, {}).get(target.rpartition(".")[2])

    for name, path in house.modules.items():
        for target, _ in imported(path):
            use(target, name)
        for module, _ in named_in_strings(house, path):
            found[module].add("a program or a page")
    for name in house.modules:
        for path in outside if (chapter := CHAPTER_PART.search(name)) else ():
            if path.name.startswith(f"{chapter[1]}_"):
                found[name].add(str(path))
    for path in outside:
        if path.suffix == ".py":
            for target, _ in imported(path):
                use(target, str(path))
        for match in NAMED.finditer(path.read_text(encoding="utf-8")):
            use(f"kvlab{match[1]}", str(path))
    return found


def entrances(house: House) -> set[str]:
    """Modules that are run, not imported."""
    return {name for name in house.modules if name.split(".")[-1] == "__main__"}


def lonely(house: House, outside: list[Path]) -> list[str]:
    """Files whose only user is one other file of the same wing. A folder's __init__ may gather."""
    found = []
    for name, by in users(house, outside).items():
        if house.modules[name].stem in ("__init__", "__main__") or len(by) != 1:
            continue
        [user] = by
        wing = name.split(".")[0] if "." in name else ""
        if user in house.modules and house.modules[user].stem != "__init__" \
                and (user.split(".")[0] if "." in user else "") == wing:
            found.append(f"{name} is used by {user} alone")
    return found


def unreached(house: House, outside: list[Path]) -> set[str]:
    """Modules that no chapter, page, command or tool reaches, through however many others."""
    asked = {name for name, by in users(house, outside).items() if by - set(house.modules)}
    return set(house.modules) - {""} - house.loaded(*asked, *entrances(house))


def outside_the_package() -> list[Path]:
    """Chapters, pages, tools, the bench and the settings; tests do not make a thing used."""
    return tracked("chapters/*.py", "book/*.py", "book/*.md", "book/*.js", "bench/*.py",
                   "tools/*.py", "Makefile", "pyproject.toml", "_config.yml", "README.md")


def test_no_file_has_one_other_file_for_its_only_user():
    assert not lonely(HOUSE, outside_the_package())


def test_every_module_is_reached():
    assert not unreached(HOUSE, outside_the_package())


# --- what also runs in the page ---


@pytest.mark.parametrize("first", STDLIB_ONLY)
def test_stdlib_only_files_import_nothing_else(first):
    names = [name for name in HOUSE.modules if name == first or name.startswith(f"{first}.")]
    assert names, f"{first} is gone: say so in STDLIB_ONLY"
    wrong = [name for name in names if not HOUSE.only_standard_library(name)]
    assert not wrong, wrong


def test_what_the_page_asks_for_imports_nothing_else():
    asked = page_modules(HOUSE)
    assert asked, 'the notebook wing names no "kvlab.module:function"'
    wrong = [name for name in asked if not HOUSE.only_standard_library(name)]
    assert not wrong, wrong


def test_all_that_runs_in_a_bare_python_without_site_packages():
    modules = sorted({*page_modules(HOUSE), *STDLIB_ONLY} & set(HOUSE.modules))
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module('kvlab.' + name)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True,
                          text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-1500:]


# --- what is named exists ---

#: A path or a file's name in a text: `kvlab/costs.py`, `kv.py`, `checkpoint/`. One that is followed
#: by "at `commit`" is another project's.
OURS = ("kvlab", "book", "tools", "tests", "chapters", "data", "bench", *WINGS, "kernels")
PATHS = re.compile(rf"(?<![\w/.~-])((?:{'|'.join(OURS)})/[\w./*-]*|\w+\.py\b(?!` at `))")
#: Stand-ins in texts that tell how a thing is done; built pages; where a wheel carries data/.
STAND_INS = re.compile(r"NN|NAME|[*]|\.html$|^kvlab/data$")
#: Files that builds and downloads make, and the address that a page's Python believes to be at.
NOT_MODULES = ("kvlab.css", "kvlab.json", "kvlab.invalid")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a file says to its readers: all of a page, comments and docstrings."""
    whole = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(whole.splitlines(), 1)
        return
    for node in docstrings(parsed(path)):
        if isinstance(node.value, str):
            yield from enumerate(whole.splitlines()[node.lineno - 1: node.end_lineno], node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(whole).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def attributes(house: House, module: str) -> set[str]:
    """Names that a module defines or imports at its top."""
    found = {target.rpartition(".")[2] for target, _ in imported(house.modules[module])}
    for node in parsed(house.modules[module]).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        for part in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ():
            if isinstance(part, ast.Name):
                found.add(part.id)
    return found


def stale(text: str, house: House, files: frozenset[str]) -> list[str]:
    """Names of ours in a text that do not exist: modules, their parts, files, folders.

    files: paths in the repository. A path may be written from any folder above the file.
    """
    found = []
    for match in NAMED.finditer(text):
        target = f"kvlab{match[1]}"
        if target in NOT_MODULES:
            continue
        module = house.own(target) or ""
        rest = target.removeprefix("kvlab").removeprefix(".").removeprefix(module).strip(".")
        if rest and rest.split(".")[0] not in attributes(house, module):
            found.append(target)
    for match in PATHS.finditer(text):
        path = match[1].rstrip(".")
        if STAND_INS.search(path):
            continue
        ends = {f"/{name}" for name in files}
        if path.endswith("/") or "." not in path.rpartition("/")[2]:
            there = any(f"/{path.rstrip('/')}/" in name or name.startswith(f"/{path.rstrip('/')}/")
                        or name.rpartition(".")[0].endswith(f"/{path}") for name in ends)
        else:
            there = any(name.endswith(f"/{path}") for name in ends)
        if not there:
            found.append(path)
    return found


def test_texts_name_only_what_exists():
    files = frozenset(name_in_repository(path) for path in tracked())
    wrong = []
    for path in tracked("*.py", "*.js", "*.css", "*.md", "*.yml", "*.toml", "Makefile"):
        if path == Path(__file__):
            continue  # it holds examples
        wrong += [f"{name_in_repository(path)}:{line}: {name}" for line, text in texts(path)
                  for name in stale(text, HOUSE, files)]
    assert not wrong, "\n".join(wrong)


# --- the rules themselves, on small houses ---


@pytest.fixture
def house_of(tmp_path: Path) -> Callable[[dict[str, str]], House]:
    """A small house: {path below kvlab: text}. A missing __init__ is made, empty."""

    def make(files: dict[str, str]) -> House:
        package = tmp_path / "kvlab"
        shutil.rmtree(package, ignore_errors=True)
        for name, text in {"__init__.py": "", **files}.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text, encoding="utf-8")
        parsed.cache_clear()
        return House(package)

    return make


LIST = """'''Read it in this order:

    specs.py, costs.py    the nouns
    kernels/launch
    engine.py             the step
    engine = Engine()

Beside it:

    generate.py           loops
    configs/              a wing
'''
"""
CORE = {
    "__init__.py": LIST,
    "specs.py": "import json",
    "costs.py": "from typing import TYPE_CHECKING\nfrom kvlab.specs import a\n"
                "if TYPE_CHECKING:\n    from kvlab.generate import b",
    "kernels/launch.py": "import torch\nfrom kvlab import specs",
    "engine.py": "from kvlab.kernels.launch import a\nfrom kvlab import costs, specs",
    "generate.py": "from kvlab.engine import Engine",
}


def test_the_list_and_what_is_loaded_are_read_from_the_files(house_of):
    house = house_of(CORE)
    assert house.listed() == ["specs", "costs", "kernels.launch", "engine", "generate"]
    assert listed_to_the_engine(house) == house.listed()[:4]
    assert house.loaded("engine") == {"specs", "costs", "kernels", "kernels.launch", "engine"}
    assert house.core == {"specs", "costs", "engine", "generate"}
    assert house.only_standard_library("costs") and not house.only_standard_library("engine")


def test_the_drawing_leaves_out_what_a_third_file_brings(house_of):
    house = house_of({**CORE, "generate.py": "from kvlab import engine, costs, specs"})
    assert house.drawn() == [("specs", []), ("costs", ["specs"]), ("kernels", ["specs"]),
                             ("engine", ["costs", "kernels"]), ("generate", ["engine"])]
    assert 'specs --> kernels(["3 kernels/"])' in drawing_tool.drawing(house)
    assert 'costs & kernels --> engine(["4 engine"])' in drawing_tool.drawing(house)
    guide = f"a\n{drawing_tool.BEGIN}\nold\n{drawing_tool.END}\nb"
    drawn = drawing_tool.with_drawing(guide, "new")
    assert drawn == f"a\n{drawing_tool.BEGIN}\nnew\n{drawing_tool.END}\nb"
    assert drawing_tool.with_drawing(drawn, "new") == drawn


def test_a_circle_is_found(house_of):
    assert circle(house_of(CORE)) is None
    found = circle(house_of({**CORE, "specs.py": "from kvlab import generate"}))
    assert found is not None and found.count(" -> ") >= 3
    gathered = {"a/__init__.py": "from kvlab.a.b import x", "a/b.py": "from kvlab.a.c import x",
                "a/c.py": "from kvlab import a"}
    assert circle(house_of(gathered)) is None


def test_errors_and_raises_are_counted(house_of):
    house = house_of({"a.py": "class A(ValueError, int): pass\nclass Not(dict): pass",
                      "b.py": "from kvlab import a\nclass B(a.A): pass\nclass C(B): pass\nraise B"})
    assert error_classes(house) == ["A", "B", "C"]
    assert sum(raises(house).values()) == 1


def test_a_lonely_file_and_an_unreached_one_are_found(house_of, tmp_path):
    chapter = tmp_path / "chapter.py"
    chapter.write_text("from kvlab.sheet import kv\nfrom kvlab.sheet import by_door")
    house = house_of({
        "sheet/__init__.py": "from kvlab.sheet.kv import kv\nfrom kvlab.sheet.far import by_door",
        "sheet/kv.py": "from kvlab.sheet.part import x\nfrom kvlab.errors import E",
        "sheet/far.py": "from kvlab.sheet import text",
        "sheet/part.py": "",    # used by kv alone: lonely
        "sheet/text.py": "",    # used by far and, as a program, by its name
        "sheet/work.py": "RUN = ['-m', 'kvlab.sheet.text']",  # nobody starts it
        "book/__init__.py": "import importlib\nNAMES = ['one']\n"
                            "M = [importlib.import_module(f'{__name__}.{n}') for n in NAMES]",
        "book/one.py": "",      # loaded by its name
        "errors.py": "",        # one user, in another wing
    })
    assert lonely(house, [chapter]) == ["sheet.part is used by sheet.kv alone"]
    assert unreached(house, [chapter]) == {"sheet.work"}


def test_what_a_page_asks_for_is_found_by_its_name(house_of):
    house = house_of({"notebook/ask.py": "'''kvlab.no:no'''\nF = {'kv': 'kvlab.sheet.kv:ask_kv'}",
                      "sheet/kv.py": "import torch"})
    assert page_modules(house) == {"sheet.kv"}
    assert not house.only_standard_library("sheet.kv")


@pytest.mark.parametrize(("text", "wrong"), [
    ("see kvlab.costs.kv_bytes, kvlab.costs and kvlab/costs.py; costs.py", []),
    ("kvlab.gone", ["kvlab.gone"]), ("kvlab.costs.gone()", ["kvlab.costs.gone"]),
    ("look into gone.py", ["gone.py"]), ("kvlab/gone/ and tools/gone.js", ["kvlab/gone/", "tools/gone.js"]),
    ("sheet/kv.py, sheet/kv or `sheet/`; data/models/*.json", []), ("sheet/gone", ["sheet/gone"]),
    ("chapters/NN_name.py and somebody/else/costs", []), ("kvlab.css", []),
])
def test_a_name_of_what_is_not_there_is_found(house_of, text, wrong):
    house = house_of({"costs.py": "def kv_bytes(): pass"})
    files = frozenset({"kvlab/costs.py", "kvlab/sheet/kv.py", "data/models/a.json"})
    assert stale(text, house, files) == wrong


def test_comments_and_docstrings_are_read_and_code_is_not(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("'''One.\n\nTwo.\n'''\nx = 'three'  # four\n")
    assert [line for line in texts(path) if line[1].strip(" '")] == [
        (1, "'''One."), (3, "Two."), (5, "# four")]


# --- the repository ---


MACHINE = re.compile(
    r"/(?:work|home|Users|farm)/[A-Za-z]|/root/|/tmp/[a-z]|site-packages/|(?:\d{1,3}\.){3}\d{1,3}:\d+")
REGISTRY = re.compile(r"files\.pythonhosted\.org|registry\.npmjs\.org|/simple/|artifactory|proxy\.")
SKIPPED = {"LICENSE", "LICENSE-prose", "tests/test_layout.py"}


def test_no_machine_is_named():
    """No folder of somebody's machine, no package mirror."""
    wrong = []
    for path in tracked():
        name = name_in_repository(path)
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
                wrong.append(f"{name_in_repository(path)}:{number}: {line.strip()[:80]}")
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
