"""What this machine does, measured in seconds: bytes it streams, products it makes, FLOPs counted.

Clocks of a shared machine drift within minutes, so two things are only ever compared when they
were measured in turns, round after round, and by the median of those rounds (`in_turns`).
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from kvlab.kernels import choose_backend
from kvlab.model import Decoder
from kvlab.specs import HardwareSpec

# --- counting ---------------------------------------------------------------------------------


def _mv(matrix_shape, *args, **kwargs) -> int:
    return 2 * matrix_shape[0] * matrix_shape[1]


def _attention(query_shape, key_shape, value_shape, *args, **kwargs) -> int:
    batch, heads, num_queries, key_dim = query_shape
    return 2 * batch * heads * num_queries * key_shape[2] * (key_dim + value_shape[3])


#: Operators that torch's own counter does not know: products with one vector, and attention on
#: a CPU. Attention is charged for every pair, the masked ones too, as the counter does elsewhere.
_MORE = {
    torch.ops.aten.mv: _mv,
    torch.ops.aten.addmv: lambda added, *shapes, **kwargs: _mv(*shapes),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}


def count_flops(call: Callable[[], object]) -> int:
    """FLOPs of everything that `call` computes, by torch.utils.flop_counter."""
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        call()
    return counter.get_total_flops()


# --- timing -----------------------------------------------------------------------------------


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, measured in turns: a, b, c, a, b, c, ... The warm-up is dropped.

    A GPU works on after a call has returned; what it still has to do counts.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, call in calls.items():
            wait()
            start = clock()
            call()
            wait()
            elapsed = clock() - start
            if turn >= warm_up:
                samples[name].append(elapsed)
    return samples


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in samples.items()}


def streamed_bytes_per_second(
    num_bytes: int = 1 << 28, rounds: int = 5, device: torch.device | str = "cpu"
) -> float:
    """Read bandwidth of a device over a buffer that no cache holds (256 MiB)."""
    buffer = torch.ones(num_bytes // 4, device=device)
    times = in_turns({"sum": lambda: buffer.sum()}, rounds)["sum"]
    return num_bytes / min(times)


def matrix_flops_per_second(
    dtype: torch.dtype = torch.float32,
    rounds: int = 5,
    device: torch.device | str = "cpu",
) -> float:
    """FLOPs per second of a square matrix product in one dtype, large enough to fill the device."""
    size = 768 if torch.device(device).type == "cpu" else 8192
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    times = in_turns({"mm": lambda: a @ b}, rounds)["mm"]
    return 2 * size**3 / min(times)


# --- the machine ------------------------------------------------------------------------------


def cpu_name() -> str:
    """The processor, by the name that the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Bytes of main memory, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def runtime(model: Decoder) -> str:
    """One line: the device that a model decodes on, its dtype, and what attends there, and why."""
    device, chosen = model.device, choose_backend(str(model.device))
    where = f"{device_name(device)}, {memory_bytes() / 1e9:.1f} GB"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        free, total = (each / 1e9 for each in torch.cuda.mem_get_info(device))
        where = f"{device_name(device)}, compute capability {major}.{minor}, "
        where += f"{free:.1f} of {total:.1f} GB free"
    dtype = str(model.dtype).removeprefix("torch.")
    if model.dtype != chosen.dtype:
        dtype += f" (left to itself, load() takes {chosen.dtype_reason})"
    return f"{where}. Weights in {dtype}. Loops attend in torch, an engine in {chosen.reason}."


def device_name(device: torch.device | str = "cpu") -> str:
    """The card's name, or the processor's with the number of threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def measured_hardware(
    rounds: int = 5,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | str = "cpu",
) -> HardwareSpec:
    """A device of this machine as a HardwareSpec, from about a second of measuring.

    dtypes   whose products to measure, fp32 by default: without instructions for it, bf16 is slow
    """
    with torch.inference_mode():
        peaks = {
            name: matrix_flops_per_second(dtype, rounds, device)
            for name, dtype in (dtypes or {"fp32": torch.float32}).items()
        }
        bandwidth = streamed_bytes_per_second(rounds=rounds, device=device)
    on_gpu = torch.device(device).type == "cuda"
    return HardwareSpec(
        name=device_name(device),
        memory_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else memory_bytes(),
        bandwidth_bytes_per_second=bandwidth,
        peak_flops_per_second=peaks,
        source=f"measured with torch {torch.__version__}",
    )


def gpu_seconds(run: Callable[[], Any], repeats: int = 20, flush_bytes: int = 2**28) -> list[float]:
    """Seconds of each call by CUDA events, the second-level cache overwritten before each."""
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):
        run()
    for start, end in events:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def gpu_seconds_of_a_copy(num_bytes: int = 2**30) -> list[float]:
    """Seconds of each copy on the GPU; it reads and writes num_bytes each time."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return gpu_seconds(lambda: target.copy_(source))
