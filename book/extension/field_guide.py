"""The registry of faults as the field guide's page, with what was last measured."""

from __future__ import annotations

import json
import re

from kvlab.faults.registry import LAYERS, Fault, all_faults
from kvlab.specs import DATA_DIR

#: What each fault did when it was last measured, by tools/record_faults.py.
RECORD = DATA_DIR / "measurements" / "faults.json"


def source_links(source: str) -> str:
    """Markdown links for every owner/repo#number in the text; the rest is left as it is."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", source)


def read_record() -> dict:
    """The recorded measurements, or an empty record where there is no file."""
    if not RECORD.exists():
        return {"faults": {}}
    return json.loads(RECORD.read_text("utf-8"))


def _figure(value: float | None) -> str:
    return "not a finite number" if value is None else f"{value:.2g}"


def _measured(entry: Fault, record: dict) -> str:
    """The recorded size of the symptom, and what it is the size of."""
    kept = record["faults"].get(entry.name)
    if kept is None:
        return entry.unit
    return f"{_figure(kept['on'])} while it is on, {_figure(kept['off'])} without ({entry.unit})."


def _entry(entry: Fault, record: dict) -> str:
    seen = "" if entry.visible else " **No output shows this one.**"
    rows = [
        ("Symptom", entry.symptom + seen),
        ("Measured", _measured(entry, record)),
        ("Smallest input", entry.smallest_input),
        ("What it looks like", entry.looks_like),
        ("Detector", entry.detector),
        ("Cure", entry.cure),
        ("Who hit it", source_links(entry.source)),
    ]
    lines = [f"### `{entry.name}`", "", "```python", f'with fault("{entry.name}"): ...', "```", ""]
    lines += [f"- **{title}.** {text}" for title, text in rows]
    return "\n".join(lines) + "\n"


def field_guide_markdown() -> str:
    """The body of the field guide: all symptoms, then one entry for each fault, by layer.

    Level-2 headings for layers, level-3 for faults; plain Markdown.
    """
    faults, record = all_faults(), read_record()
    parts: list[str] = []
    for layer, title in LAYERS.items():
        parts += [f"**{title}**", ""]
        parts += [
            f"- {entry.symptom} [`{entry.name}`](#{entry.name})"
            for entry in faults
            if entry.layer == layer
        ]
        parts.append("")
    if record["faults"]:
        parts += [
            f"The measured figures were recorded on {record['date']} with {record['model']}, "
            f"torch {record['torch']}, {record['machine']}; the tests measure them again.",
            "",
        ]
    for layer, title in LAYERS.items():
        entries = [_entry(entry, record) for entry in faults if entry.layer == layer]
        if entries:
            parts += [f"## {title}", "", *entries]
    return "\n".join(parts)
