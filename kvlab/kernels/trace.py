"""Every address a kernel really loads and stores, recorded while the interpreter runs it.

A masked lane that is not loaded leaves no record, so the trace proves what the kernel does not
touch as well as what it does. Needs a process that runs Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.checks import TritonMissing

if kernels.INTERPRETED:
    from triton.runtime import interpreter
else:
    interpreter = None


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the addresses (bytes) of the lanes that were not masked."""

    kind: str  # load or store
    program: tuple[int, int, int]
    addresses: np.ndarray
    bytes_per_element: int


@dataclass
class Trace:
    """What the kernels launched inside `trace_accesses` touched, in order."""

    accesses: list[Access] = field(default_factory=list)

    def elements(
        self,
        tensor: torch.Tensor,
        kind: str = "load",
        program: tuple[int, int, int] | None = None,
    ) -> list[int]:
        """Element offsets from the tensor's first element, of what was touched inside it.

        In order and with repeats. A view counts from its first element to its last one, and so
        includes what lies between its rows.
        """
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        low = tensor.data_ptr()
        high = low + span * tensor.element_size()
        found: list[int] = []
        for access in self.accesses:
            if access.kind == kind and program in (None, access.program):
                inside = access.addresses[(access.addresses >= low) & (access.addresses < high)]
                found += ((inside - low) // tensor.element_size()).tolist()
        return found

    def bytes_loaded(self, tensor: torch.Tensor) -> int:
        """Bytes loaded from the tensor, repeats counted."""
        return len(self.elements(tensor)) * tensor.element_size()


@contextmanager
def trace_accesses() -> Iterator[Trace]:
    """Record loads and stores of every kernel launched in the block."""
    if interpreter is None:
        raise TritonMissing(
            "a trace needs Triton's interpreter: start a process with TRITON_INTERPRET=1."
        )
    trace = Trace()
    builder = type(interpreter.interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def record(kind: str, self: Any, pointers: Any, mask: Any) -> None:
        lanes = np.broadcast_to(mask.data, pointers.data.shape)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        trace.accesses.append(
            Access(kind, tuple(self.grid_idx), pointers.data[lanes].astype(np.int64), size)
        )

    def traced_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        record("load", self, pointers, mask)
        return load(self, pointers, mask, *rest)

    def traced_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        record("store", self, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = traced_load, traced_store
    try:
        yield trace
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
