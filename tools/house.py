"""kvlab as a graph: its files, who imports whom, and the drawing of the core.

    python tools/house.py          draws the core into CONTRIBUTING.md
    python tools/house.py --check  says whether the drawing there is the one that would be made

The core are the files at the top of kvlab/. The docstring of kvlab/__init__.py lists them in
reading order, in indented lines: `NAME.py    what it holds`, or several names with commas. What
`import kvlab.engine` loads comes first, and engine.py ends that part of the list.
`tests/test_layout.py` holds both.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- the core: `python tools/house.py` draws this -->", "<!-- end of the core -->"
#: Names with commas between, indented, alone or before two spaces and what they hold.
LISTED = re.compile(r"^ {2,}([a-z_][\w/.]*(?:, [a-z_][\w/.]*)*)(?: {2,}\S.*)?$", re.MULTILINE)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of a file but what stands under `if TYPE_CHECKING:`, which never runs."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from statements(node)


def imported(path: Path) -> list[tuple[str, int]]:
    """Absolute names that a file imports, with their lines: ("kvlab.costs.kv_bytes", 12)."""
    found = []
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write imports in full"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


class House:
    """The modules below one package folder. A module's name is dotted and leaves out "kvlab."

    modules   name -> path; a folder's __init__ goes by the folder's name, the root's by ""
    """

    def __init__(self, package: Path = ROOT / "kvlab") -> None:
        self.package = package
        self.modules: dict[str, Path] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.imports = {name: self._imports(name) for name in self.modules}

    def own(self, target: str) -> str | None:
        """The module that an imported name belongs to, or None for someone else's."""
        first, _, name = target.partition(".")
        if first != self.package.name:
            return None
        while name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def _imports(self, name: str) -> set[str]:
        found = {self.own(target) for target, _ in imported(self.modules[name])}
        return {other for other in found if other} - {name}

    def folders_of(self, name: str) -> set[str]:
        """The packages on the way to a module, whose __init__ Python runs first."""
        parts = name.split(".")[:-1]
        return {".".join(parts[: i + 1]) for i in range(len(parts))} & set(self.modules)

    def loaded(self, *names: str) -> set[str]:
        """All modules that importing these runs, themselves included, the root's aside."""
        found: set[str] = set()
        left = list(names)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self.imports[name] | self.folders_of(name)
        return found

    @property
    def core(self) -> set[str]:
        """The files at the top, the two that are doors aside (__init__ and __main__)."""
        return {name for name, path in self.modules.items()
                if name and path.parent == self.package
                and path.stem not in ("__init__", "__main__")}

    def listed(self) -> list[str]:
        """The files that the package's docstring names, in reading order."""
        text = ast.get_docstring(parsed(self.modules[""]), clean=False) or ""
        found = []
        for names in LISTED.findall(text):
            for name in names.split(", "):
                module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                if name.endswith(".py") or module in self.modules:
                    found.append(module)
        return found

    def drawn(self) -> list[tuple[str, list[str]]]:
        """Each box of the drawing in reading order, with the boxes that it imports.

        A box is a core file, or a folder that core files import from, as far as they load it. An
        import is left out where the box reaches the other through a third one as well.
        """
        loaded = self.loaded(*self.core)
        boxes: dict[str, set[str]] = {}
        for name in loaded:
            others = {other.split(".")[0] for other in self.imports[name]}
            boxes.setdefault(name.split(".")[0], set()).update(others - {name.split(".")[0]})

        def reached(box: str, found: set[str]) -> set[str]:
            for other in boxes[box] - found:
                found.add(other)
                reached(other, found)
            return found

        order = dict.fromkeys(name.split(".")[0] for name in self.listed() if name in loaded)
        rows = []
        for box in order:
            far = {far for near in boxes[box] for far in reached(near, set()) - {near}}
            rows.append((box, [other for other in order if other in boxes[box] - far]))
        return rows

    def only_standard_library(self, name: str) -> bool:
        """Whether a module, with all that it loads, imports the standard library alone."""
        return all(self.own(target) is not None or target.split(".")[0] in sys.stdlib_module_names
                   for each in self.loaded(name) for target, _ in imported(self.modules[each]))


def drawing(house: House) -> str:
    """The core as a Mermaid graph: a line a box, numbered in reading order, its imports first."""
    lines = ["```mermaid", "flowchart TD"]
    for number, (name, imports) in enumerate(house.drawn(), 1):
        title = name if name in house.core else f"{name}/"
        plain = name in house.core and house.only_standard_library(name)
        box = f'{name}["{number} {title}"]' if plain else f'{name}(["{number} {title}"])'
        lines.append("    " + " --> ".join([*([" & ".join(imports)] if imports else []), box]))
    return "\n".join([*lines, "```"])


def with_drawing(text: str, drawn: str) -> str:
    """The guide's text with what stands between the two marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"CONTRIBUTING.md has lost the marks {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{drawn}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    old = GUIDE.read_text(encoding="utf-8")
    new = with_drawing(old, drawing(House()))
    if options.check:
        print("the drawing is up to date" if new == old else
              "the core has changed: run `python tools/house.py`")
        return int(new != old)
    GUIDE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
