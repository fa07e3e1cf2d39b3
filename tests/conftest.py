"""For all tests: the same state whatever shell started them, and no network.

- No network, in this process or in any program it starts. SmolLM2 comes from the cache folder,
  where `make test` has put it before pytest starts. What cannot be had offline is a failure of the
  test, not a reason to skip it (NB-06).
- Signals, umask, time zone, locale, threads and the variables that kvlab reads are set here, and
  after each test they are what they were before it (TEST-01). HOME stays: the checkpoint and the
  browser lie below it. A test that needs another one sets it with monkeypatch.
"""

from __future__ import annotations

import contextlib
import locale
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFFLINE = HERE / "offline"

for folder in (HERE, OFFLINE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
paths = [str(OFFLINE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ.update({
    "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # read when torch is imported: a worker a core, one thread each
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "COLUMNS": "100",        # argparse breaks its lines there
})
# Read when triton is imported: kernels in Python. A machine with a GPU may set 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in ("KVLAB_MODEL", "LANGUAGE", "PYTHONOPTIMIZE", "FORCE_COLOR"):
    os.environ.pop(name, None)
SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
IN_MAIN_THREAD = threading.current_thread() is threading.main_thread()


def set_process_state() -> None:
    """What a process has beside its environment: signal handlers, umask, time zone, locale."""
    if IN_MAIN_THREAD:  # a shell may have told its children to ignore them: `nohup make test &`
        for number, handler in SIGNALS.items():
            signal.signal(number, handler)
    os.umask(0o022)
    if hasattr(time, "tzset"):
        time.tzset()
    for category in (locale.LC_NUMERIC, locale.LC_TIME, locale.LC_COLLATE, locale.LC_MONETARY):
        locale.setlocale(category, "C")
    for utf8 in ("C.UTF-8", "UTF-8"):  # the second is macOS's; files are read as UTF-8
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, utf8)
            break


set_process_state()

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from kvlab_offline import block  # noqa: E402

block()
# No test depends on a clock: a busy machine is slow, and that is all it is.
settings.register_profile("kvlab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvlab")


@pytest.fixture(autouse=True)
def state_is_put_back() -> Iterator[None]:
    """After each test: the environment, the folder, torch's threads and the rest as before it."""
    environment, folder = dict(os.environ), Path.cwd()
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    yield
    for name in set(os.environ) - set(environment):
        if name.startswith("KVLAB_"):  # others may be of a library that was just imported
            del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    if torch and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    set_process_state()
