"""Which attention decodes here, and in which dtype: the Triton kernel where it runs, else torch.

    print(choose_backend().reason)
    Engine(model)                                    # takes that choice for the model's device
    Engine(model, attention=PagedAttention)          # torch, whatever is here

The choice is by what the GPU is, or, where Triton's maintainers promise nothing (below compute
capability 8.0, such as Colab's T4), by trying: a small case through the kernel, held against
float64, decides, and the reason says which way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from kvlab.kernels import KernelError
from kvlab.kernels import paged_decode as kernels
from kvlab.kernels.paged_decode import paged_decode
from kvlab.kernels.splits import SUPPORTED_FROM
from kvlab.paged import PagedAttention, PagedKVCache, check_table, paged_attention, table_rows
from kvlab.specs import ModelSpec

#: Largest difference from float64 that fp16 rounding explains, with values drawn from N(0, 1).
TRIAL_TOLERANCE = 5e-3


class KernelPagedAttention(PagedAttention):
    """PagedAttention whose sequences with one query each go through the Triton kernel.

    Prompt chunks (several queries a sequence) stay with torch. Block tables are checked once per
    forward, not once per layer, and before they go to the device.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: PagedKVCache,
        *,
        slot_mapping: list[int],
        block_tables: list[list[int]],
        seq_lens: list[int],
        query_start_loc: list[int],
    ) -> None:
        ends = pairwise(query_start_loc)
        single = [r for r, (start, stop) in enumerate(ends) if stop - start == 1 and seq_lens[r]]
        super().__init__(
            spec,
            cache,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            # length 0: the torch plan passes over it
            seq_lens=[0 if r in single else seq_len for r, seq_len in enumerate(seq_lens)],
            query_start_loc=query_start_loc,
        )
        tables, lens = [block_tables[r] for r in single], [seq_lens[r] for r in single]
        for window in set(self.windows):
            for r, table, seq_len in zip(single, tables, lens):
                first = 0 if window is None else max(0, seq_len - window)
                check_table(table, first, seq_len, cache.num_blocks, cache.block_size, r)
        self.rows = torch.tensor([query_start_loc[r] for r in single], device=cache.device)
        self.tables = table_rows(tables, cache.device)
        self.lens = torch.tensor(lens, device=cache.device)
        self.max_seq_len = max(lens, default=0)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [T, h, d], key and value [T, h_kv, d] of the new tokens -> [T, h, d_v]."""
        out = super().__call__(layer, query, key, value)  # writes K and V, attends for chunks
        if len(self.rows):
            out[self.rows], _ = paged_decode(
                query[self.rows],
                self.cache.key_cache(layer),
                self.cache.value_cache(layer),
                self.tables,
                self.lens,
                window=self.windows[layer],
                max_seq_len=self.max_seq_len,
                check=False,
            )
        return out


def half_dtype(capability: tuple[int, int]) -> tuple[torch.dtype, str]:
    """The 16-bit dtype for a GPU of this compute capability, and one line that says why.

    torch.cuda.is_bf16_supported() is not asked: it answers True where bf16 is only emulated, as
    on the T4 (capability 7.5), and Triton does not compile bf16 there.
    """
    name = f"compute capability {capability[0]}.{capability[1]}"
    if 10 * capability[0] >= SUPPORTED_FROM:
        return torch.bfloat16, f"bf16: {name} computes in it"
    return torch.float16, f"fp16: {name} has no bf16 arithmetic, only an emulation"


def choose_dtype(device: torch.device | str) -> tuple[torch.dtype, str]:
    """The dtype for a device (float32 on a CPU), and one line that says why."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32, "fp32: exact enough to compare token by token on a CPU"
    return half_dtype(torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Backend:
    """What was chosen: name ("triton" or "torch") and the dtype to load in, each with a reason."""

    name: str
    reason: str
    dtype: torch.dtype
    dtype_reason: str
    attention: type[PagedAttention]


def try_small_case(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the kernel, launched on a small case, agrees with float64; else what went wrong."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 40, generator=generator).to(device, dtype)
    keys, values = torch.randn(2, 13, 5, 2, 40, generator=generator).to(device, dtype)
    tables = (torch.randperm(12, generator=generator) + 1).view(3, 4).int().to(device)
    lens = torch.tensor([17, 0, 3], dtype=torch.int32, device=device)
    try:
        exact = query.double(), keys.double(), values.double()
        want = paged_attention(*exact, tables, lens, torch.arange(4))
        for num_splits in (1, 3):
            out, _ = paged_decode(query, keys, values, tables, lens, num_splits=num_splits)
            error = (out.double() - want).abs().max().item()
            if not error <= TRIAL_TOLERANCE:  # NaN is wrong as well
                return f"a small case came out wrong by {error:.3g}"
    except Exception as error:  # whatever the compiler or the driver raises: torch can still work
        return f"a small case failed with {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def decide(
    capability: tuple[int, int] | None,
    trial: Callable[[], str | None],
    *,
    has_triton: bool = True,
    interpreted: bool = False,
) -> tuple[str, str]:
    """(name, reason) from the facts alone. capability None: no NVIDIA GPU."""
    if not has_triton:
        return "torch", "torch: Triton is not installed (it has wheels for Linux only)"
    if interpreted:
        return "torch", "torch: Triton's interpreter is on, which checks kernels but is slow"
    if capability is None:
        return "torch", "torch: no CUDA GPU here"
    name = f"compute capability {capability[0]}.{capability[1]}"
    if 10 * capability[0] >= SUPPORTED_FROM:
        return "triton", f"triton: {name} is supported"
    problem = trial()
    if problem is None:
        return "triton", (
            f"triton: {name} is older than what Triton supports, but a small case came out right"
        )
    return "torch", f"torch: {name} is older than what Triton supports, and {problem}"


@cache
def choose_backend(device: str | None = None, prefer: str | None = None) -> Backend:
    """The backend for a device ("cuda", "cpu"; the first GPU if there is one). Tried once.

    prefer   "torch" or "triton" settles it. "triton" on a CPU needs the interpreter.

    Raises KernelError for a backend that there is not, or that cannot run here.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype, why = choose_dtype(where)
    reachable = kernels.triton is not None and (where.type == "cuda" or kernels.INTERPRETED)
    if prefer not in ((None, "torch", "triton") if reachable else (None, "torch")):
        raise KernelError(
            f"backend {prefer!r}; expected 'triton', 'torch' or None. 'triton' needs a CUDA GPU, "
            "or on Linux a process started with TRITON_INTERPRET=1; None takes what runs here."
        )
    if prefer is not None:
        name, reason = prefer, f"{prefer}: asked for"
    else:
        nvidia = where.type == "cuda" and torch.version.hip is None
        name, reason = decide(
            torch.cuda.get_device_capability(where) if nvidia else None,
            lambda: try_small_case(where, dtype),
            has_triton=kernels.triton is not None,
            interpreted=kernels.INTERPRETED,
        )
    attention = KernelPagedAttention if name == "triton" else PagedAttention
    return Backend(name, reason, dtype, why, attention)
