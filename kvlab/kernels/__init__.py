"""Decode attention over paged K and V in Triton, and what it is held against.

    paged_decode   the two Triton kernels, their launcher `paged_decode(...)`, and its checks
    splits         how the work is cut: the shape of a tile, the number of splits (stdlib only)
    choose         which attention decodes here, and in which dtype; the Engine asks it
    reference      the same in torch: float64 by gather, the kernel's programs one after another,
                   and what one program loads
    report         python -m kvlab.kernels.report: compiled for GPUs that are not here

Neither torch nor triton is imported here: Triton reads TRITON_INTERPRET when it is first
imported, so whoever wants its interpreter must be able to set that before. choose_backend and
choose_dtype load the rest when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from kvlab.errors import KvlabError


class KernelError(KvlabError):
    """Something that a kernel, or one of its tools, cannot work with. Nothing was launched."""


def refuse(problems: Iterable[str]) -> None:
    """Raise KernelError with the first problem, if there is one. A generator stops there."""
    for problem in problems:
        raise KernelError(problem)


def choose_dtype(device: Any) -> Any:
    """The dtype for a device, and one line that says why: see kvlab.kernels.choose."""
    return import_module("kvlab.kernels.choose").choose_dtype(device)


def choose_backend(device: str | None = None, prefer: str | None = None) -> Any:
    """The attention that decodes on a device, with the reason: kvlab.kernels.choose.Backend."""
    return import_module("kvlab.kernels.choose").choose_backend(device, prefer)
