"""What a fault is, how one is switched on, and the list of all of them.

    from kvlab.faults import fault
    with fault("decode_position_off_by_one"):
        cached_generate(model, prompt_ids, 32)      # wrong, and no error

A fault is a known silent bug of a KV cache. It is switched on by letting one wrong function
answer in the place of a right one, and switched off by putting the right one back: the
production code has no flags for it. Detectors stand before functions in the same way. Several of
both may stand before one place; detectors are next to the original and faults outside them,
whatever the order of opening, so that a detector sees what the production code really gets:

    caller -> fault -> fault -> detector -> original

Switches change the running process: one thread only, and never in a server.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import isfunction
from operator import itemgetter
from typing import Any

from kvlab.errors import KvlabError
from kvlab.specs import DATA_DIR

#: The parts of the system that a fault can sit in, in the order of the chapters, and their titles.
LAYERS = {
    "loop": "The plain loop",
    "position": "Positions and rotation",
    "cache": "The contiguous cache",
    "paged": "Paged blocks and prefix reuse",
    "kernel": "The decode kernel",
    "scheduler": "The scheduler and the batch",
}

#: name -> what the field guide says about it; data/faults.toml explains the keys.
TEXTS: dict[str, dict[str, Any]] = {
    name: {
        key: " ".join(value.split()) if isinstance(value, str) else value
        for key, value in texts.items()
    }
    for name, texts in tomllib.loads((DATA_DIR / "faults.toml").read_text("utf-8")).items()
}

#: (class or module, name of a function of its own)
Place = tuple[Any, str]
#: wrapper(original, *args, **kwargs) answers instead of the original
Wrapper = Callable[..., Any]
#: Opens something for the length of a block
Opener = Callable[[], AbstractContextManager]


class FaultError(KvlabError):
    """The registry or its laboratory was asked for what it does not have."""


class FaultDetected(FaultError, AssertionError):
    """A detector fired: something that must always hold does not hold."""


# --- standing in a function's place -----------------------------------------------------------


#: What stands before a function: (the original, [(is it a fault, wrapper) as they were opened])
_STANDING: dict[Place, tuple[Callable, list[tuple[bool, Wrapper]]]] = {}


def _before(wrapper: Wrapper, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return call


def _install(place: Place) -> None:
    function, wrappers = _STANDING[place]
    for _, wrapper in sorted(wrappers, key=itemgetter(0)):  # detectors come first: innermost
        function = _before(wrapper, function)
    setattr(*place, function)


@contextmanager
def _stand(place: Place, wrapper: Wrapper, is_fault: bool) -> Iterator[None]:
    owner, name = place
    assert isfunction(vars(owner).get(name)), f"{owner!r} has no function {name!r} of its own"
    _, wrappers = _STANDING.setdefault(place, (vars(owner)[name], []))
    wrappers.append((is_fault, wrapper))
    _install(place)
    try:
        yield
    finally:
        wrappers.remove((is_fault, wrapper))
        _install(place)
        if not wrappers:
            del _STANDING[place]


def replaced(place: Place, wrapper: Wrapper) -> AbstractContextManager[None]:
    """For a fault: inside, wrapper(original, *args, **kwargs) answers for the place."""
    return _stand(place, wrapper, is_fault=True)


@contextmanager
def watched(*pairs: tuple[Place, Wrapper]) -> Iterator[None]:
    """For a detector: like `replaced`, one or several at once, always inside every fault."""
    with ExitStack() as stack:
        for place, wrapper in pairs:
            stack.enter_context(_stand(place, wrapper, is_fault=False))
        yield


def replaced_places() -> list[str]:
    """Names of the functions with something before them. Empty when all is as written."""
    return [f"{owner.__name__}.{name}" for owner, name in _STANDING]


@contextmanager
def suspended() -> Iterator[None]:
    """Everything as written inside the block, whatever is open around it.

    For computing the right answer while a fault is on.
    """
    now = {place: getattr(*place) for place in _STANDING}
    for place, (original, _) in _STANDING.items():
        setattr(*place, original)
    try:
        yield
    finally:
        for place, function in now.items():
            setattr(*place, function)


# --- the registry -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One known silent bug: its description, its switch and its detector.

    The texts are in data/faults.toml, which says what each of them is.

    name       snake_case, what is wrong: "decode_position_off_by_one"
    switch     () -> context manager that makes kvlab wrong while it is open
    detect     (steps=8) -> None; runs the smallest input for about that many steps with the check
               in place, raises FaultDetected if the check fires
    measure    () -> float, the size of the symptom, in `unit`; 0 or nearly so while the switch is
               off. Faults of a model or its cache are measured on the real checkpoint.
    threshold  measure() is above it while the fault is on, below it otherwise
    visible    False for the fault that no output can show: measure() stays below
    watch      () -> context manager that puts the check into every step of whatever runs inside,
               or None where `detect` is all there is
    """

    name: str
    layer: str
    symptom: str
    smallest_input: str
    looks_like: str
    detector: str
    cure: str
    source: str
    unit: str
    threshold: float
    switch: Opener
    detect: Callable[..., None]
    measure: Callable[[], float]
    visible: bool = True
    watch: Opener | None = None


_FAULTS: dict[str, Fault] = {}
_OPEN: dict[str, ExitStack] = {}  # faults that on() left open


def bug(
    at: Place,
    run: Callable[[int], None],
    measure: Callable[[], float],
    watch: Opener | None = None,
) -> Callable[[Callable], Callable]:
    """Register the function below, wrong on purpose, as the fault of its name.

    at       the place where it answers while the fault is on: it is called with the right
             function, then with the arguments
    run      (steps) -> None, the smallest input; what detects the fault, alone or under `watch`
    measure  see Fault
    watch    the live detector, if there is one
    """

    def register(wrong: Callable) -> Callable:
        name = wrong.__name__
        assert name not in _FAULTS, f"two faults are called {name}"
        assert name in TEXTS, f"data/faults.toml says nothing about {name}"

        def detect(steps: int = 8) -> None:
            with nullcontext() if watch is None else watch():
                run(steps)

        _FAULTS[name] = Fault(
            name=name,
            switch=functools.partial(replaced, at, wrong),
            detect=detect,
            measure=measure,
            watch=watch,
            **TEXTS[name],
        )
        return wrong

    return register


def all_faults() -> list[Fault]:
    """Every fault, in the order of data/faults.toml: by layer, as the chapters have them."""
    return [_FAULTS[name] for name in TEXTS]


def get(name: str) -> Fault:
    """The fault of that name, or FaultError naming those that there are."""
    if name not in _FAULTS:
        raise FaultError(f"no fault {name!r}; there are: {', '.join(sorted(_FAULTS))}")
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
        _OPEN[name] = ExitStack()
        _OPEN[name].enter_context(entry.switch())
    return entry


def off(name: str | None = None) -> None:
    """Switch off one fault, or all that on() left open, last one first."""
    for each in list(reversed(_OPEN)) if name is None else [get(name).name]:
        if each in _OPEN:
            _OPEN.pop(each).close()


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
    placed = {entry.name: entry.watch for entry in chosen if entry.watch is not None}
    with ExitStack() as stack:
        for place in dict.fromkeys(placed.values()):
            stack.enter_context(place())
        yield list(placed)
