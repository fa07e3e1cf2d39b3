"""`python -m kvlab.checkpoint [NAME] [--verify]`: fetch, and print where the files are."""

from __future__ import annotations

import argparse
import sys

from kvlab.checkpoint.download import CheckpointError, fetch, verify


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code. An error is one line, and nothing is kept."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.checkpoint", description=fetch.__doc__)
    parser.add_argument("name", nargs="?", help="a folder or a hub id; the pinned model if absent")
    parser.add_argument("--verify", action="store_true", help="read all files and check hashes")
    options = parser.parse_args(arguments)
    try:
        folder = fetch(options.name)
        if options.verify:
            verify(folder)
    except CheckpointError as error:
        print(f"CheckpointError: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: nothing was kept. Run it again to fetch the checkpoint.",
              file=sys.stderr)
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
