"""The scripts the book carries: pinned, hashed, and from nowhere in particular."""

from __future__ import annotations

import json
import re
from pathlib import Path

from book.extension import page_text

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
    assert "## FLOPs of a step" in page_text.formula_sheet()
    assert page_text.models_table().count("\n") >= 3
    assert "kvlab.costs" in page_text.api()
    assert page_text.running_example()["ratio"] == "2,224"
