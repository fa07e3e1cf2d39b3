"""Plotly's figures on rendered pages: the renderer that myst-nb finds by its entry point.

It stands in the package, though only the book uses it: myst-nb finds renderers by entry points
alone (pyproject.toml), and an entry point must be importable wherever kvlab is installed, from a
wheel too. Everything else that builds the book is in book/extension.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from docutils import nodes

PLOTLY = "application/vnd.plotly.v1+json"


class PlotlyRenderer:
    """Draws application/vnd.plotly.v1+json, which plotly emits and myst-nb does not know."""

    mime_priority_overrides = (("html", PLOTLY, 1),)

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """The figure's data in the page; page.js draws it when it comes into view."""
        if inline or data.mime_type != PLOTLY:
            return None
        content = data.content if isinstance(data.content, dict) else json.loads(data.content)
        return [nodes.raw(text=figure_html(content), format="html")]


def figure_html(figure: dict) -> str:
    """One figure: its words for those who cannot see it, its data for page.js."""
    layout = figure.get("layout", {})
    alt = escape(str((layout.get("meta") or {}).get("alt", "")))
    data = json.dumps({"data": figure.get("data", []), "layout": layout}).replace("<", "\\u003c")
    height = int(layout.get("height") or 380)
    return (
        f'<div class="kvlab-figure"><p class="kvlab-alt">{alt}</p>'
        f'<div class="kvlab-plot" role="img" aria-label="{alt}" '
        f'style="min-height: {height}px"></div>'
        f'<script type="application/json">{data}</script></div>'
    )
