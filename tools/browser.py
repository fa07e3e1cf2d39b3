"""Find a Chromium for the browser tests, installing one where the machine has none.

    python tools/browser.py        prints the path of the browser

Looked for in this order: $KVLAB_CHROMIUM, the usual names on PATH, Playwright's own. If there is
none: Debian's package as root, else `playwright install chromium`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The path of a Chromium on this machine, or None."""
    given = os.environ.get("KVLAB_CHROMIUM")
    if given:
        return given
    for name in NAMES:
        if path := shutil.which(name):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def install() -> None:
    """Install a Chromium by the first way that this machine offers."""
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        for command in (["apt-get", "update", "-q"],
                        ["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if find():
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"],
                   stdout=sys.stderr, check=False)


def main() -> int:
    if not find():
        install()
    path = find()
    if path is None:
        print("No Chromium was found and none could be installed. Install chromium or Chrome with "
              "your system's package manager, or set KVLAB_CHROMIUM to its path.", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
