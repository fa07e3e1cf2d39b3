"""Set the project's public address everywhere, or check that it is the same everywhere.

    python tools/address.py https://github.com/OWNER/REPOSITORY
    python tools/address.py --check

The address stands in _config.yml (`repository: url:`). The README's links and each chapter's Colab
link and setup cell are derived from it: this tool rewrites them.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_notebooks import ROOT, address

SHAPE = re.compile(r"https://github\.com/[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
#: Files that hold the address, beside _config.yml from which it comes.
DERIVED = ("README.md", "CONTRIBUTING.md", "pyproject.toml", "chapters/*.py", "chapters/*.ipynb",
           "book/*.md")


def holders(root: Path) -> list[Path]:
    return [path for pattern in DERIVED for path in sorted(root.glob(pattern))]


def rewrite(root: Path, new: str) -> list[Path]:
    """Replace the address in _config.yml and in all files derived from it; the changed files."""
    old = address(root)
    old_path, new_path = ("/".join(url.split("/")[-2:]) for url in (old, new))
    changed = []
    for path in [root / "_config.yml", *holders(root)]:
        text = path.read_text(encoding="utf-8")
        replaced = text.replace(old, new).replace(f"github/{old_path}/", f"github/{new_path}/")
        if replaced != text:
            path.write_text(replaced, encoding="utf-8")
            changed.append(path)
    return changed


def strangers(root: Path) -> list[str]:
    """Places that name a repository of ours (raw, blob, Colab) which is not the configured one."""
    url = address(root)
    ours = "/".join(url.split("/")[-2:])
    found = []
    for path in holders(root):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/", text):
            if match[1] != ours:
                found.append(f"{path.name}: Colab link to {match[1]}, expected {ours}")
        for match in re.finditer(r"git\+(https://[^\s\"'\\]+)", text):
            if match[1] != url:
                found.append(f"{path.name}: installs from {match[1]}, expected {url}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.check or not options.url:
        found = strangers(ROOT)
        print("\n".join(found) or f"one address everywhere: {address()}")
        return 1 if found else 0
    new = options.url.rstrip("/").removesuffix(".git")
    if not SHAPE.fullmatch(new):
        print(f"{options.url!r} is not of the form https://github.com/OWNER/REPOSITORY",
              file=sys.stderr)
        return 1
    for path in rewrite(ROOT, new):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
