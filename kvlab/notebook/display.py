"""How chapters show things: a sentence with computed numbers, a table, a figure.

Nothing here computes. `say` puts numbers into prose, so that no result is ever typed; `table` and
`figure` follow the light and dark theme of wherever they are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd
import plotly.graph_objects as go
from IPython.display import HTML, Markdown, display

from kvlab.notebook import require

PLOTLY = "application/vnd.plotly.v1+json"
#: How "lines", "markers" and "steps" are drawn by a Scatter; "bars" are bars.
MODES = {"lines": "lines+markers", "markers": "markers", "steps": "lines"}
#: The same thing has the same colour everywhere (the first seven are Okabe and Ito's);
#: widgets/shared.css agrees.
COLOURS = {
    "q": "#0072B2",
    "k": "#E69F00",
    "v": "#009E73",
    "weights": "#CC79A7",
    "cache": "#56B4E9",
    "waste": "#D55E00",
    "padding": "#8A929A",
    # Sequences, kinds of steps and other things that are none of the above.
    "one": "#7A5BD0",
    "two": "#A0961A",
    "three": "#A85C38",
    "four": "#35808A",
    "five": "#5F6B7A",
    "six": "#B5485A",
}
CYCLE = tuple(COLOURS[name] for name in ("one", "two", "three", "four", "five", "six"))
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
#: A grey that can be read on white and on black; the rendered page puts its own ink there.
INK = "#767E86"
GRID = "rgba(128, 136, 144, 0.35)"


def say(*paragraphs: str) -> None:
    """Show Markdown made from f-strings: prose whose numbers are computed."""
    display(Markdown("\n\n".join(paragraphs)))


def table(
    data: pd.DataFrame | Sequence[Mapping], caption: str, note: str = "", *, text: bool = False
) -> None:
    """Show a table with a caption. A list of dicts makes one row each. text: its cells are words.

    Floats are shown as pandas shows them: format the cells you care about (kvlab.sheet.units).
    """
    frame = data if isinstance(data, pd.DataFrame) else pd.DataFrame(list(data))
    plain_index = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
    display(
        {
            "text/html": _table_html(frame, caption, note, not plain_index, text),
            "text/plain": f"{caption}\n{frame.to_string(index=not plain_index)}",
        },
        raw=True,
    )


def figure(
    series: Mapping[str, tuple[Sequence, Sequence]],
    *,
    x: str,
    y: str,
    title: str,
    alt: str,
    kind: str = "lines",
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Show a figure and, folded below it, its numbers as a table.

    series   name -> (x values, y values), drawn in order
    kind     "lines" (with markers), "markers", "bars" or "steps"
    alt      what the figure shows, in a sentence: read out, and shown where scripts are off
    from_zero  the y axis starts at 0, so that heights compare
    colours  name of a series -> a key of COLOURS or a colour; the others take the next free one
    """
    require(alt, "a figure needs alt=: one sentence that says what it shows")
    require(
        kind in (*MODES, "bars"), f'kind={kind!r}; expected "lines", "markers", "bars" or "steps"'
    )
    drawing = go.Figure(layout=_layout(x, y, title, alt, log_x, log_y))
    for number, (name, (xs, ys)) in enumerate(series.items()):
        given = (colours or {}).get(name, CYCLE[number % len(CYCLE)])
        drawing.add_trace(_trace(kind, name, list(xs), list(ys), number, COLOURS.get(given, given)))
    if kind == "bars":
        drawing.update_layout(barmode="group")
    if from_zero:
        drawing.update_yaxes(rangemode="tozero")
    if "google.colab" in sys.modules:  # Colab wants plotly's own HTML
        drawing.show()
    else:
        display({PLOTLY: json.loads(drawing.to_json()), "text/plain": alt}, raw=True)
    display(HTML(_numbers(series, x, title)))


def _trace(kind: str, name: str, xs: list, ys: list, number: int, colour: str):
    if kind == "bars":
        return go.Bar(name=name, x=xs, y=ys, marker={"color": colour})
    return go.Scatter(
        name=name,
        x=xs,
        y=ys,
        mode=MODES[kind],
        line={
            "color": colour,
            "width": 2.5,
            "dash": DASHES[number % len(DASHES)],
            "shape": "hv" if kind == "steps" else "linear",
        },
        marker={"color": colour, "size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
    )


def _layout(x: str, y: str, title: str, alt: str, log_x: bool, log_y: bool) -> dict:
    axis = {"gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID, "automargin": True}
    return {
        "title": {"text": title, "font": {"size": 16}, "x": 0.02},
        "xaxis": {**axis, "title": {"text": x}, "type": "log" if log_x else "-"},
        "yaxis": {**axis, "title": {"text": y}, "type": "log" if log_y else "-"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 13},
        "legend": {"orientation": "h", "y": -0.22, "x": 0},
        "margin": {"l": 50, "r": 15, "t": 50, "b": 50},
        "height": 380,
        "template": "none",
        "meta": {"alt": alt},
    }


def _table_html(
    frame: pd.DataFrame, caption: str, note: str, with_index: bool, text: bool = False
) -> str:
    body = frame.to_html(
        classes="kvlab-table kvlab-text" if text else "kvlab-table",
        border=0,
        index=with_index,
        index_names=False,
        justify="unset",
    ).replace(' style="text-align: unset;"', "")
    if with_index and frame.index.name:
        corner = f"<th>{escape(str(frame.index.name))}</th>"
        body = body.replace("<th></th>", corner, 1)
    body = body.replace("<thead>", f"<caption>{escape(caption)}</caption>\n  <thead>", 1)
    after = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<div class="kvlab-scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"{body}</div>{after}"
    )


def _numbers(series: Mapping[str, tuple[Sequence, Sequence]], x: str, title: str) -> str:
    """The figure's numbers in a folded table: one row an x value, one column a series."""
    columns = {
        name: pd.Series([_short(v) for v in ys], index=[_short(v) for v in xs], dtype=object)
        for name, (xs, ys) in series.items()
    }
    frame = pd.concat(columns, axis=1, sort=False).fillna("")
    frame.index.name = x
    html = _table_html(frame, title, "", with_index=True)
    return (
        '<details class="kvlab-numbers"><summary>The numbers of this figure</summary>'
        f"{html}</details>"
    )


def _short(value: object) -> str:
    """A number with four digits, anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
