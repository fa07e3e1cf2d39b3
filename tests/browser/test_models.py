"""The table of the models page: readable without scripts, sorted by a press on a heading."""

from __future__ import annotations

from pathlib import Path

import pytest

from book.extension import models_table
from kvlab.notebook.widgets import shared_css
from kvlab.sheet import models_report

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
GROWING = [name for name, _ in models_table.HEAD].index("bytes a token, for good")
PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Models</title>
<link rel="icon" href="data:,"><style>{css} body {{ background: var(--kv-bg); color: var(--kv-fg) }}
</style><script defer src="page.js"></script></head><body><main><h1>Models</h1>
{table}</main></body></html>"""


@pytest.fixture
def models_page(watch, tmp_path):
    def build(theme: str = "light", **options):
        (tmp_path / "page.js").write_text(
            (ROOT / "book/static/page.js").read_text("utf-8"), "utf-8"
        )
        text = PAGE.format(css=shared_css(), table=models_table.models_html(), theme=theme)
        (tmp_path / "index.html").write_text(text, "utf-8")
        own = tmp_path.as_uri()
        return watch(f"{own}/index.html", own, theme=theme, **options)

    return build


def column(watched, index: int) -> list[str]:
    return [row[index] for row in watched.table("bf16, one sequence")[1:]]


def test_every_model_and_every_number_is_there(models_page):
    watched = models_page()
    rows = models_report()
    assert len(column(watched, 0)) == len(rows)
    assert column(watched, GROWING) == [f"{row['kv_bytes_per_token_growing']:,}" for row in rows]
    assert column(watched, GROWING + 1) == [
        f"{row['kv_bytes_per_token_filling']:,}" for row in rows
    ]
    watched.check()


def test_a_heading_sorts_by_its_values(models_page):
    watched = models_page()
    page = watched.page
    heading = page.get_by_role("button", name="bytes a token, for good")
    values = [row["kv_bytes_per_token_growing"] for row in models_report()]
    heading.focus()
    page.keyboard.press("Enter")
    assert [int(v.replace(",", "")) for v in column(watched, GROWING)] == sorted(values)
    heading.click()
    shown = [int(v.replace(",", "")) for v in column(watched, GROWING)]
    assert shown == sorted(values, reverse=True)
    assert page.locator("th[aria-sort=descending]").count() == 1
    page.get_by_role("button", name="model").click()
    names = [name.lower() for name in column(watched, 0)]
    assert names[0].startswith("deepseek") and page.locator("th[aria-sort]").count() == 1
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reads_well_on_a_phone(models_page, theme):
    watched = models_page(theme=theme, width=390)
    assert watched.overflow() <= 0
    assert watched.axe() == []


def test_without_scripts_it_is_a_table(models_page):
    watched = models_page(scripts=False)
    assert watched.page.locator("button").count() == 0
    assert "Llama-3-8B" in watched.page.locator("table").inner_text()
