"""Every known silent bug of a KV cache, as a switch with a detector.

    from kvlab import faults
    from kvlab.faults import fault

    with fault("decode_position_off_by_one"):    # or faults.on(name) ... faults.off()
        ...

registry    what a fault is, and how one is switched on
decoding    the faults of one sequence: loop, positions, contiguous cache
serving     the faults of many requests: paged blocks, kernel, scheduler
detectors   what must always hold, looked at in every step
scenes      the smallest inputs
drift       how far a fault carries the real checkpoint away
guide       the field guide, from the texts in data/faults.toml
"""

from kvlab.faults import decoding, serving
from kvlab.faults.registry import (
    LAYERS,
    Fault,
    FaultDetected,
    FaultError,
    all_faults,
    fault,
    get,
    is_on,
    off,
    on,
    watch,
)

__all__ = [
    "LAYERS",
    "Fault",
    "FaultDetected",
    "FaultError",
    "all_faults",
    "decoding",
    "fault",
    "get",
    "is_on",
    "off",
    "on",
    "serving",
    "watch",
]
