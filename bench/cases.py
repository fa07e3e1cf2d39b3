"""What is measured: each function is one case of the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from bench import ablation, record
from bench.rivals import Rivals
from kvlab import costs
from kvlab.attention import UncachedAttention
from kvlab.checkpoint import read_weights
from kvlab.engine import Engine
from kvlab.model import Decoder
from kvlab.notebook.measure import matrix_flops_per_second, streamed_bytes_per_second

NUMPY = "numpy's library"
CONTEXTS = (32, 128, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16)


def count_operators(call: Callable[[], object]) -> int:
    """Operator calls that `call` dispatches, nested ones included, as torch's profiler sees it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(1 for event in profile.events() if event.name.startswith("aten::"))


def timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict]:
    """Wall and processor seconds of calls made in turns; one round to warm up.

    On a machine with other work the wall clock counts waiting for a core, the processor's does
    not. Both are kept; a ratio says which it is of.
    """
    wall = {name: [] for name in calls}
    cpu = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            if turn:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    return {"wall": wall, "cpu": cpu}


def _case(samples: dict[str, dict], base: str, per: float = 1.0, **facts) -> dict[str, object]:
    return {
        **facts,
        "base": base,
        **{clock: record.summary(values, per) for clock, values in samples.items()},
        "ratio_wall": record.ratios(samples["wall"], base),
        "ratio_cpu": record.ratios(samples["cpu"], base),
    }


def floor_call(num_bytes: int) -> Callable[[], object]:
    """Reads as many bytes as a step's weights have, and does as little else as can be."""
    buffer = torch.ones(num_bytes // 4)
    return buffer.sum


def decode(rivals: Rivals, threads: int, rounds: int, count: int = 32) -> dict[str, object]:
    """Greedy decoding of a short prompt, seconds per token, prefill included."""
    spec = rivals.checkpoint.spec
    prompt = rivals.checkpoint.encode("The capital of France is")
    loops = rivals.generators(threads)
    outputs = {name: loop(prompt, count) for name, loop in loops.items()}
    calls = {name: lambda loop=loop: loop(prompt, count) for name, loop in loops.items()}
    weights = costs.weight_bytes(costs.streamed_params(spec), rivals.dtype.itemsize)
    read = floor_call(weights)
    calls["reading the weights' bytes"] = lambda: [read() for _ in range(count)]
    with torch.inference_mode():
        samples = timed(calls, rounds)
    same = {
        name: sum(a == b for a, b in zip(ids, outputs["kvlab"])) for name, ids in outputs.items()
    }
    return _case(
        samples,
        "kvlab",
        count,
        what="seconds per token",
        tokens=count,
        prompt_tokens=len(prompt),
        tokens_equal_to_kvlab=same,
        weight_bytes_per_token=weights,
    )


def against_context(rivals: Rivals, rounds: int) -> dict[str, object]:
    """One step at several contexts: cached (kvlab and transformers) and uncached."""
    model, points = rivals.checkpoint.model, {}
    for context in CONTEXTS:
        ids = torch.full((1, context), 11)
        positions = torch.arange(context).view(1, -1)
        attend = UncachedAttention(model.spec)
        calls = {
            "kvlab": rivals.kvlab_step(context),
            "transformers, dynamic cache": rivals.transformers_step(context),
        }
        point = _case(timed(calls, rounds), "kvlab", what="seconds per step", context=context)
        naive = {"uncached": partial(model.forward, ids, positions, attend), **calls}
        turns = 1 if context >= 1024 else 3
        point["uncached"] = _case(timed(naive, turns), "kvlab", what="seconds per step")
        points[str(context)] = point
    return {"what": "one step at each context", "points": points}


def means(rivals: Rivals, rounds: int, context: int = 512) -> dict[str, object]:
    """The loop without one of its means at a time."""
    model = rivals.checkpoint.model
    weights = {n: w.to(rivals.dtype) for n, w in read_weights(rivals.checkpoint.folder).items()}
    calls = ablation.variants(model, ablation.row_major_copy(weights, model), context)
    operators = {name: count_operators(call) for name, call in calls.items()}
    samples = timed(calls, rounds)
    return _case(
        samples, "all of them", what="seconds per step", context=context, operators=operators
    )


def _matrices(model: Decoder) -> list[torch.Tensor]:
    """Every matrix that a step multiplies by, in order."""
    layers = [
        weight
        for layer in model.layers
        for weight in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    ]
    return [*layers, model.lm_head]


def products(model: Decoder, rows: int) -> Callable[[], object]:
    """The matrix products of one step of `rows` sequences, and nothing else."""
    shape, matrices = (rows,) if rows > 1 else (), _matrices(model)
    inputs = {w.shape[1]: torch.randn(*shape, w.shape[1]).to(w.dtype) for w in matrices}

    @torch.inference_mode()
    def call() -> None:
        for weight in matrices:
            x = inputs[weight.shape[1]]
            torch.mv(weight, x) if rows == 1 else F.linear(x, weight)

    return call


def _numpy_compares(model: Decoder) -> bool:
    """numpy knows no bfloat16, and its threads are not torch's (bench/__init__.py)."""
    return model.dtype == torch.float32 and torch.get_num_threads() == 1


def numpy_products(model: Decoder, rows: int) -> Callable[[], object]:
    """The same products over the same memory by numpy's library: another one than torch's."""
    matrices = [weight.numpy() for weight in _matrices(model)]
    inputs = {w.shape[1]: np.random.rand(rows, w.shape[1]).astype(np.float32) for w in matrices}
    return lambda: [inputs[weight.shape[1]] @ weight.T for weight in matrices]


def overhead(rivals: Rivals, rounds: int, context: int = 64) -> dict[str, object]:
    """Where a step's time goes: reading, products, everything else; operator calls of each loop."""
    model = rivals.checkpoint.model
    weights = costs.weight_bytes(costs.streamed_params(model.spec), rivals.dtype.itemsize)
    calls = {
        "kvlab": rivals.kvlab_step(context),
        "transformers, dynamic cache": rivals.transformers_step(context),
        "matrix-vector products alone": products(model, rows=1),
        "reading the weights' bytes": floor_call(weights),
    }
    operators = {name: count_operators(call) for name, call in list(calls.items())[:3]}
    if _numpy_compares(model):
        calls[f"the same products, {NUMPY}"] = numpy_products(model, rows=1)
    return _case(
        timed(calls, rounds),
        "kvlab",
        what="seconds per step",
        context=context,
        operators=operators,
    )


def _ragged(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 997 + 1 for j in range(4 + (11 * i) % 29)] for i in range(count)]


def engine(rivals: Rivals, rounds: int, count: int = 16) -> dict[str, object]:
    """Tokens per second of the engine over batch sizes, and 32 ragged requests against padding.

    Prompts of a ragged batch differ in length; in its second form the outputs do as well. There a
    padded batch runs on to its longest output, while the engine is done with a row when it ends.
    """
    model = rivals.checkpoint.model

    def run(prompts: list[list[int]], limits: int | list[int] = count) -> list:
        blocks = 1 + sum(-(-(len(p) + count) // 16) for p in prompts)
        served = Engine(model, num_blocks=blocks, prefix_caching=False, max_num_seqs=len(prompts))
        return served.generate(prompts, max_new_tokens=limits)

    calls = {f"batch {n}": lambda n=n: run([[5, 6, 7, 8]] * n) for n in BATCHES}
    batches = timed(calls, rounds)
    alone = {f"torch, batch {n}": products(model, n) for n in BATCHES}
    if _numpy_compares(model):
        alone |= {f"{NUMPY}, batch {n}": numpy_products(model, n) for n in BATCHES}
    mixed = _ragged(32)
    longest = max(map(len, mixed))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in mixed])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in mixed])

    def padded() -> object:
        with torch.inference_mode():
            return rivals.reference.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
            )

    limits = [1 + (7 * i) % count for i in range(len(mixed) - 1)] + [count]
    ragged = timed({"kvlab engine": lambda: run(mixed), "transformers, padded": padded}, rounds)
    uneven = {"kvlab engine": lambda: run(mixed, limits), "transformers, padded": padded}
    return {
        "batches": _case(batches, "batch 1", what="seconds per run", tokens_each=count),
        "products": _case(
            timed(alone, 4 * rounds), "torch, batch 1", what="seconds per step, products alone"
        ),
        "ragged": _case(
            ragged, "kvlab engine", what="seconds per run", requests=32, tokens=32 * count
        ),
        "ragged outputs": _case(
            timed(uneven, rounds),
            "kvlab engine",
            what="seconds per run",
            requests=32,
            tokens=sum(limits),
        ),
    }


def machine_rates(dtypes: list[torch.dtype]) -> dict[str, object]:
    """Read bandwidth and matrix products of this machine at the present thread count."""
    with torch.inference_mode():
        return {
            "streamed_bytes_per_second": streamed_bytes_per_second(),
            "matrix_flops_per_second": {
                str(dtype).split(".")[-1]: matrix_flops_per_second(dtype, rounds=3)
                for dtype in dtypes
            },
        }
