"""`python -m kvlab` is the `kvlab` command."""

from kvlab.sheet.cli import main

raise SystemExit(main())
