"""The root of kvlab's named errors.

Each module defines its own errors beside the code that raises them. All of them
derive from KvlabError, so a caller (the command line, a widget) can catch "the
input was wrong" without catching a bug.
"""


class KvlabError(Exception):
    """What was given, what was expected, and what to do about it."""
