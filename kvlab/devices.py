"""Which dtype a chapter should run with, by device."""

from __future__ import annotations

import torch

#: The first compute capability whose hardware computes in bf16 (Ampere).
BF16_CAPABILITY = 8


def half_dtype(capability: tuple[int, int]) -> tuple[torch.dtype, str]:
    """The 16-bit dtype for a GPU of this compute capability, and one line that says why.

    torch.cuda.is_bf16_supported() is not asked: it answers True where bf16 is only emulated, as
    on the T4 (capability 7.5), and Triton does not compile bf16 there.
    """
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] >= BF16_CAPABILITY:
        return torch.bfloat16, f"bf16: {name} computes in it"
    return torch.float16, f"fp16: {name} has no bf16 arithmetic, only an emulation"


def choose_dtype(device: torch.device | str) -> tuple[torch.dtype, str]:
    """The dtype for a device (float32 on a CPU), and one line that says why."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32, "fp32: exact enough to compare token by token on a CPU"
    return half_dtype(torch.cuda.get_device_capability(device))
