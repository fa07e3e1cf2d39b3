"""What a compiled kernel is made of: registers, spills, and the instructions of its loop.

Reads the PTX text and the cubin with the tools in Triton's own wheel. No GPU is involved.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError

try:  # absent on macOS and Windows, where `compiling` raises before it gets here
    import triton
except ImportError:
    triton = None


class UnreadableOutput(KvlabError):
    """One of Triton's tools printed something this module does not know."""


def _tool(name: str) -> str:
    """Path of ptxas, cuobjdump, ... inside the installed Triton."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def _number(pattern: str, text: str, what: str) -> int:
    """The first number that a tool printed after `pattern`; the error shows what it printed."""
    found = re.search(pattern, text)
    if found is None:
        raise UnreadableOutput(
            f"no {what} in what the tool printed, expected {pattern!r}: {text[:300]}"
        )
    return int(found[1])


def resources(compiled: Any) -> dict[str, int]:
    """registers per thread, stack_bytes, and spills (bytes stored and loaded, together)."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = _output(_tool("cuobjdump"), "-res-usage", str(cubin))
        # Triton ships a second assembler for the newest PTX version; spills are its words.
        version = _number(r"\.version (\d+)\.", compiled.asm["ptx"], "PTX version")
        target = re.findall(r"\.target (sm_\w+)", compiled.asm["ptx"])[0]
        assembler = _tool("ptxas-blackwell" if version >= 9 else "ptxas")
        words = _output(assembler, "-v", f"--gpu-name={target}", str(ptx), "-o", f"{folder}/out")
    stored = _number(r"(\d+) bytes spill stores", words, "spill stores")
    loaded = _number(r"(\d+) bytes spill loads", words, "spill loads")
    return {
        "registers": _number(r"REG:(\d+)", usage, "registers"),
        "stack_bytes": _number(r"STACK:(\d+)", usage, "stack"),
        "spills": stored + loaded,
    }


def instructions(compiled: Any) -> dict[str, int]:
    """Counts: tensor_core and async_copy (PTX), and the longest loop's length (machine code)."""
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        listing = _output(_tool("nvdisasm"), str(cubin))
    count, labels, loop = 0, {}, 0
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", code[1])
            if jump and jump[1] in labels:
                loop = max(loop, count - labels[jump[1]])
    return {
        "tensor_core": len(re.findall(r"\bmma\.sync|\bwgmma\.mma|\btcgen05\.mma", ptx)),
        "async_copy": len(re.findall(r"\bcp\.async\.c[ag]", ptx)),
        "instructions": count,
        "loop_instructions": loop,
    }
