"""The scripts the book carries: pinned, hashed, and from nowhere in particular."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvlab import booktext

ROOT = Path(__file__).resolve().parent.parent


def test_packages_are_pinned_and_hashed():
    wanted = json.loads((ROOT / "package.json").read_text("utf-8"))["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    text = (ROOT / "package-lock.json").read_text("utf-8")
    assert "http" not in re.sub(r'"(funding|url)".*', "", text)
    locked = json.loads(text)["packages"]
    for name, version in wanted.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert all(entry.get("integrity") for path, entry in locked.items() if path)


def test_pages_load_nothing_from_elsewhere():
    for path in [*ROOT.glob("book/static/*.js"), *ROOT.glob("book/page/*.js")]:
        addresses = set(re.findall(r"https?://[\w.-]+", path.read_text("utf-8")))
        assert addresses <= {"https://kvlab.invalid"}, path.name


def test_computed_pages_have_text():
    assert "## FLOPs of a step" in booktext.formula_sheet()
    assert booktext.models_table().count("\n") >= 3
    assert "kvlab.costs" in booktext.api()
    assert booktext.running_example()["ratio"] == "2,224"
