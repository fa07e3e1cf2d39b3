"""The errors of the core. A message says what was given, what was expected and what to do.

They are raised at the doors: where a config, a prompt, a setting, a block id or a shape comes in
from outside. Behind a door code trusts its caller, and an `assert` says what must hold.
"""

from __future__ import annotations

from operator import index


class KvlabError(Exception):
    """The root: catch this one to catch "the input was wrong" without catching a bug."""


class RopeError(KvlabError):
    """Rotary settings without a table, or a position that the table in use is not right for."""


class WrongPosition(KvlabError, AssertionError):
    """A token was about to be rotated by a position that is not its own."""


class AttentionError(KvlabError):
    """Tensors or settings that no causal attention can be computed on."""


class CacheError(KvlabError):
    """What does not fit the cache that it is written to, or that is cut."""


class BlockError(KvlabError):
    """A block id, a position or a count that the pool does not have. Nothing was changed."""


class OutOfBlocks(BlockError):
    """More blocks were asked for than are free. Nothing was changed."""


class RequestError(KvlabError):
    """A request, or a setting of an engine, that is refused; no other request notices."""


class WeightError(KvlabError):
    """Weights that do not belong to the spec they are given with."""


class IntegrityError(KvlabError, AssertionError):
    """Something that must always hold does not; `findings` lists what, in words."""

    def __init__(self, what: str, findings: list[str]) -> None:
        self.findings = findings
        super().__init__(f"{what} is corrupt: " + "; ".join(findings))


def whole(
    name: str, value: object, least: int = 0, error: type[KvlabError] = RequestError
) -> int:
    """value as Python's own whole number, `least` or more; the same door for every count.

    Numbers of numpy and torch are taken; True, 2.0 and "2" are not.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]  # what has no index is what we look for
    except TypeError:
        number = least - 1
    if number < least:
        raise error(f"{name}={value!r}; expected a whole number, {least} or more")
    return number
