"""What a fault is, and the list of all of them.

    from kvlab.faults import fault
    with fault("decode_position_off_by_one"):
        cached_generate(model, prompt_ids, 32)      # wrong, and no error

A fault is a known silent bug of a KV cache, switched on by replacing one named function of
kvlab (a seam, see seams.py) and put back afterwards. The production code has no flags for it.
Switches change the running process: one thread only, and never in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from kvlab.errors import KvlabError

#: The parts of the system that a fault can sit in, in the order of the chapters.
LAYERS = ("loop", "position", "cache", "paged", "kernel", "scheduler")


class UnknownFault(KvlabError):
    """No fault of that name is registered."""


class DuplicateFault(KvlabError):
    """Two faults with one name."""


class FaultDetected(KvlabError, AssertionError):
    """A detector fired: something that must always hold does not hold."""


@dataclass(frozen=True)
class Fault:
    """One known silent bug: its description, its switch and its detector.

    The text fields are what the field guide prints, one or two sentences each.

    name            snake_case, what is wrong: "decode_position_off_by_one"
    layer           one of LAYERS
    symptom         what a user would notice
    smallest_input  the smallest input that shows it, with the right and the wrong answer
    looks_like      what one sees meanwhile: shapes, errors, logs (usually: nothing)
    detector        the check in words
    cure            what to do instead
    source          public reports, "owner/repo#number", separated by ", "
    switch          () -> context manager that makes kvlab wrong while it is open
    detect          (steps=8) -> None; runs the smallest input for about that many steps with the
                    check in place, raises FaultDetected if the check fires
    measure         () -> float, the size of the symptom on the real checkpoint, in `unit`;
                    0 or nearly so while the switch is off
    unit            of measure: "KL, nats per token", "bytes / planned bytes", ...
    threshold       measure() is above it while the fault is on, below it otherwise
    visible         False for the fault that no output can show: measure() stays below
    watch           () -> context manager that puts the check into every step of whatever runs
                    inside, or None where `detect` is all there is
    """

    name: str
    layer: str
    symptom: str
    smallest_input: str
    looks_like: str
    detector: str
    cure: str
    source: str
    switch: Callable[[], AbstractContextManager]
    detect: Callable[..., None]
    measure: Callable[[], float] | None = None
    unit: str = ""
    threshold: float = 0.0
    visible: bool = True
    watch: Callable[[], AbstractContextManager] | None = None


_FAULTS: dict[str, Fault] = {}
_OPEN: dict[str, ExitStack] = {}  # faults that on() left open


def register(*faults: Fault) -> None:
    """Add faults to the registry. Called once by each module of kvlab.faults."""
    for entry in faults:
        if entry.name in _FAULTS:
            raise DuplicateFault(f"fault {entry.name!r} is registered twice: rename one of them")
        if entry.layer not in LAYERS:
            raise UnknownFault(f"layer {entry.layer!r} of {entry.name!r} is none of {LAYERS}")
        _FAULTS[entry.name] = entry


def all_faults() -> list[Fault]:
    """Every fault, by layer in chapter order, then as registered."""
    return sorted(_FAULTS.values(), key=lambda entry: LAYERS.index(entry.layer))


def get(name: str) -> Fault:
    """The fault of that name, or UnknownFault naming the nearest ones."""
    if name not in _FAULTS:
        raise UnknownFault(f"no fault {name!r}; there are: {', '.join(sorted(_FAULTS))}")
    return _FAULTS[name]


@contextmanager
def fault(name: str) -> Iterator[Fault]:
    """`with fault("decode_position_off_by_one"):` switches it on for the block."""
    entry = get(name)
    with entry.switch():
        yield entry


def on(name: str) -> Fault:
    """Switch a fault on until off() is called. For notebooks; twice is the same as once."""
    entry = get(name)
    if name not in _OPEN:
        stack = ExitStack()
        stack.enter_context(entry.switch())
        _OPEN[name] = stack
    return entry


def off(name: str | None = None) -> None:
    """Switch off one fault, or all that on() left open, last one first."""
    names = list(reversed(_OPEN)) if name is None else [get(name).name]
    for entry in names:
        if entry in _OPEN:
            _OPEN.pop(entry).close()


def is_on() -> list[str]:
    """Names of the faults that on() left open."""
    return list(_OPEN)


@contextmanager
def watch(*names: str) -> Iterator[list[str]]:
    """Put the detectors of the named faults (or of all) into every step run inside the block.

    Yields the names of the faults that are watched for; faults with one detector share it. A
    detector that fires raises FaultDetected where the wrong step stands.
    """
    chosen = [get(name) for name in names] if names else all_faults()
    placed: dict[str, Callable[[], AbstractContextManager]] = {}
    for entry in chosen:
        if entry.watch is not None:
            placed[entry.name] = entry.watch
    with ExitStack() as stack:
        for place in dict.fromkeys(placed.values()):
            stack.enter_context(place())
        yield list(placed)
