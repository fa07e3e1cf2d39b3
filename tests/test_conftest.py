"""TEST-01: whatever the shell left behind, a test finds the same state, and puts it back."""

from __future__ import annotations

import locale
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def state() -> dict[str, object]:
    """What a test may lean on without knowing it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return {
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "umask": mask,
        "zone": time.strftime("%H:%M", time.localtime(0)),
        "locale": (locale.localeconv()["decimal_point"], locale.getencoding()),
        "threads": torch.get_num_threads(),
        "model": os.environ.get("KVLAB_MODEL"),
        "folder": Path.cwd() == HERE.parent,
    }


EXPECTED = {"interrupt": True, "terminate": True, "umask": 0o022, "zone": "00:00",
            "locale": (".", "UTF-8"), "threads": 1, "model": None, "folder": True}


@pytest.mark.skipif(os.name == "nt", reason="umask, SIGTERM and tzset are POSIX")
@pytest.mark.parametrize("turn", ["first", "second"])
def test_01_each_test_finds_the_same_state(turn, tmp_path):
    """The first leaves a mess behind, and so does the second: each finds order."""
    assert state() == EXPECTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.umask(0o077)
    os.environ |= {"TZ": "Asia/Kathmandu", "KVLAB_MODEL": "nowhere"}
    time.tzset()
    torch.set_num_threads(2)
    os.chdir(tmp_path)
    assert state() != EXPECTED


@pytest.mark.skipif(os.name == "nt", reason="no POSIX shell")
def test_01_under_a_shell_that_ignores_interrupts():
    """As `nohup make test &` starts them, with a narrow umask, another zone, model and width."""
    this = f"{__file__}::{test_01_each_test_finds_the_same_state.__name__}"
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT TERM; umask 077; exec "$@"', "sh",
         sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", this],
        cwd=HERE.parent, capture_output=True, text=True,
        env=os.environ | {"TZ": "America/Lima", "LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de",
                          "OMP_NUM_THREADS": "3", "KVLAB_MODEL": "nowhere", "COLUMNS": "20"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "2 passed" in done.stdout
