"""Speed, apart from the tests: `python -m bench` measures, data/measurements keeps it."""

import os

# numpy's library reads this when it is first imported; it is measured on one thread only.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
