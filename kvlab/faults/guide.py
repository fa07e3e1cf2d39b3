"""The registry as text: the field guide page, and the rows that `kvlab faults` prints."""

from __future__ import annotations

import re

from kvlab.faults.registry import Fault, all_faults

_TITLES = {
    "loop": "The plain loop",
    "position": "Positions and rotation",
    "cache": "The contiguous cache",
    "paged": "Paged blocks and prefix reuse",
    "kernel": "The decode kernel",
    "scheduler": "The scheduler and the batch",
}


def fault_rows() -> list[dict[str, str]]:
    """One row per fault: name, layer, symptom, detector, source. What the command prints."""
    return [
        {
            "name": entry.name,
            "layer": entry.layer,
            "symptom": entry.symptom,
            "detector": entry.detector,
            "source": entry.source,
        }
        for entry in all_faults()
    ]


def source_links(source: str) -> str:
    """Markdown links for every owner/repo#number in the text; the rest is left as it is."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", source)


def _entry(entry: Fault) -> str:
    seen = "" if entry.visible else " **No output shows this one.**"
    rows = [
        ("Symptom", entry.symptom + seen),
        ("Smallest input", entry.smallest_input),
        ("What it looks like", entry.looks_like),
        ("Detector", entry.detector),
        ("Cure", entry.cure),
        ("Who hit it", source_links(entry.source)),
    ]
    if entry.unit:
        rows.insert(1, ("Measured by", entry.unit))
    lines = [f"### `{entry.name}`", "", "```python", f'with fault("{entry.name}"): ...', "```", ""]
    lines += [f"- **{title}.** {text}" for title, text in rows]
    return "\n".join(lines) + "\n"


def field_guide_markdown() -> str:
    """The body of the field guide: a table of all faults, then one entry for each, by layer.

    Level-2 headings for layers, level-3 for faults; plain Markdown.
    """
    faults = all_faults()
    parts = ["| fault | layer | detector |", "|---|---|---|"]
    parts += [
        f"| [`{entry.name}`](#{entry.name}) | {entry.layer} | {entry.detector} |"
        for entry in faults
    ]
    parts.append("")
    for layer, title in _TITLES.items():
        entries = [_entry(entry) for entry in faults if entry.layer == layer]
        if entries:
            parts += [f"## {title}", "", *entries]
    return "\n".join(parts)
