"""Every known silent bug of a KV cache, as a switch with a detector.

    from kvlab import faults
    from kvlab.faults import fault

    with fault("decode_position_off_by_one"):    # or faults.on(name) ... faults.off()
        ...

One module per layer describes its faults and registers them; importing this package imports
them all. A new module needs one word in the import below.
registry.py says what a fault is, seams.py how one is switched on, guide.py prints
the field guide.
"""

from kvlab.faults import attention, cache, kernel, loop, paged, position, rotation, scheduler
from kvlab.faults.registry import (
    LAYERS,
    Fault,
    FaultDetected,
    UnknownFault,
    all_faults,
    fault,
    get,
    is_on,
    off,
    on,
    register,
    watch,
)

__all__ = [
    "LAYERS",
    "Fault",
    "FaultDetected",
    "UnknownFault",
    "all_faults",
    "attention",
    "cache",
    "fault",
    "get",
    "is_on",
    "kernel",
    "loop",
    "off",
    "on",
    "paged",
    "position",
    "register",
    "rotation",
    "scheduler",
    "watch",
]
