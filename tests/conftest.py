"""For all tests: no network, in this process or in any program it starts, and few threads.

SmolLM2 comes from the cache folder, where `make test` has put it before pytest starts. What cannot
be had offline is a failure of the test, not a reason to skip it (NB-06).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFFLINE = HERE / "offline"

for folder in (HERE, OFFLINE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
paths = [str(OFFLINE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: kernels in Python
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers on two cores: one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings  # noqa: E402
from kvlab_offline import block  # noqa: E402

block()
# No test depends on a clock: a busy machine is slow, and that is all it is.
settings.register_profile("kvlab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvlab")
