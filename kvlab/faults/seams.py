"""Replacing one function for a while, and putting it back.

A seam is a function that faults and detectors may stand in front of: (owner, attribute), for
instance (Decoder, "forward"). Several wrappers can be open on one seam at once. Detectors sit
next to the original and faults outside them, whatever the order of opening, so a detector
always sees the arguments that the production code really gets.

    caller -> fault -> fault -> detector -> original

Not thread-safe: the owner is shared by everything in the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Wrapper = Callable[..., Any]  # wrapper(original, *args, **kwargs)

#: (id of owner, attribute) -> (owner, original as stored, open detectors, open faults)
_SEAMS: dict[tuple[int, str], tuple[Any, Any, list[Wrapper], list[Wrapper]]] = {}


def _compose(stored: Any, wrappers: list[Wrapper]) -> Any:
    """The function to store: the original with every wrapper around it, first one innermost."""
    is_static = isinstance(stored, staticmethod)
    function = stored.__func__ if is_static else stored
    for wrapper in wrappers:
        function = _before(wrapper, function)
    return staticmethod(function) if is_static else function


def _before(wrapper: Wrapper, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return call


@contextmanager
def _open(owner: Any, name: str, wrapper: Wrapper, is_fault: bool) -> Iterator[None]:
    key = (id(owner), name)
    if key not in _SEAMS:
        stored = vars(owner).get(name, None)
        if stored is None:
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own to stand before")
        _SEAMS[key] = (owner, stored, [], [])
    _, stored, detectors, faults = _SEAMS[key]
    stack = faults if is_fault else detectors
    stack.append(wrapper)
    setattr(owner, name, _compose(stored, detectors + faults))
    try:
        yield
    finally:
        stack.remove(wrapper)
        if detectors or faults:
            setattr(owner, name, _compose(stored, detectors + faults))
        else:
            setattr(owner, name, stored)
            del _SEAMS[key]


def replaced(owner: Any, name: str, wrapper: Wrapper) -> AbstractContextManager[None]:
    """Context manager for a fault: wrapper(original, *args, **kwargs) answers for owner.name.

    owner    a class or a module; the attribute must be its own, not inherited
    """
    return _open(owner, name, wrapper, is_fault=True)


def watched(owner: Any, name: str, wrapper: Wrapper) -> AbstractContextManager[None]:
    """Context manager for a detector: like `replaced`, but always inside every fault."""
    return _open(owner, name, wrapper, is_fault=False)


def open_seams() -> list[str]:
    """Names of the seams with something before them. Empty when all is as written."""
    return [
        f"{getattr(owner, '__name__', owner)}.{name}" for (_, name), (owner, *_) in _SEAMS.items()
    ]


class ChangedAttend:
    """An `attend` that changes what it is given and hands it on; it has the cache of the other.

    change(layer, query, key, value) -> (query, key, value)
    """

    def __init__(self, attend: Any, change: Callable) -> None:
        self.attend, self.change = attend, change
        self.cache = getattr(attend, "cache", None)

    def __call__(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        return self.attend(layer, *self.change(layer, query, key, value))


@contextmanager
def suspended() -> Iterator[None]:
    """Everything as written inside the block, whatever is open around it.

    For computing the right answer while a fault is on.
    """
    standing = [(owner, name, vars(owner)[name]) for (_, name), (owner, *_) in _SEAMS.items()]
    for (_, name), (owner, stored, *_) in _SEAMS.items():
        setattr(owner, name, stored)
    try:
        yield
    finally:
        for owner, name, composed in standing:
            setattr(owner, name, composed)
