"""`kvlab faults`, also `python -m kvlab.faults`: the registry as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence

from kvlab.faults import all_faults

SHOWN = ("name", "layer", "symptom", "detector", "source")


def main(argv: Sequence[str] | None = None) -> int:
    """Print name, layer, symptom, detector and source of every fault."""
    parser = argparse.ArgumentParser(prog="kvlab faults", description="Known silent bugs.")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    rows = [{key: getattr(entry, key) for key in SHOWN} for entry in all_faults()]
    if parser.parse_args(argv).json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['name']}  ({row['layer']})")
        for key in ("symptom", "detector", "source"):
            print(
                textwrap.fill(
                    row[key], 96, initial_indent=f"  {key:<9} ", subsequent_indent=" " * 12
                )
            )
    print(
        f"\n{len(rows)} faults. In a notebook: from kvlab.faults import fault; "
        'with fault("name"): ...'
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
