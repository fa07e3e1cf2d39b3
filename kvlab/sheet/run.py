"""The cost of a run: FLOPs, bytes and time of n decode forwards, without a cache and with one."""

from __future__ import annotations

from dataclasses import replace

from kvlab import costs
from kvlab.sheet.kv import SheetError, is_whole, require
from kvlab.specs import LayerSpec, ModelSpec

#: The H100 SXM datasheet's memory bandwidth, in bytes a second: the book's default roof.
DEFAULT_BANDWIDTH = 3.35e12


def accounting_parameters(spec: ModelSpec, params: str | float) -> tuple[int, str]:
    """(P, what it is) for "coarse", "exact" or a number.

    Coarse is the resident count rounded to three significant digits, as a model card states it.
    Exact is the number of matrix weights that a decode step streams. Raises SheetError for what is
    no number.
    """
    if params == "exact":
        return costs.streamed_params(spec), "exact: matrix weights streamed per step"
    if params == "coarse":
        resident = costs.resident_params(spec)
        return int(float(f"{resident:.2e}")), "coarse: resident parameters, three digits"
    try:
        number = float(params)
    except (TypeError, ValueError):
        number = 0
    if not 1 <= number < 1e18:
        raise SheetError(
            f"--params: given {params!r}; expected coarse, exact or a number from 1 on like 8.03e9"
        )
    return int(number), "coarse: the number given"


def _require_attention(spec: ModelSpec) -> None:
    missing = [name for name in ("hidden_size", "num_heads") if not getattr(spec, name)]
    require(
        not missing,
        f"{spec.name}: its config does not tell {', '.join(missing)}; expected them to count "
        f"FLOPs; add them. `kvlab kv` sizes the cache without them",
    )
    odd = sorted({layer.kind for layer in spec.layers} - {"full", "sliding"})
    require(
        not odd,
        f"{spec.name}: has layers of kind {', '.join(odd)}; expected attention to all tokens, or "
        f"to a window of them, for which the run's cost is worked out. `kvlab kv` sizes this "
        f"model's cache",
    )
    shape = LayerSpec("full", spec.num_kv_heads, spec.head_dim, spec.head_dim)
    require(
        {replace(layer, kind="full", window=None) for layer in spec.layers} <= {shape},
        f"{spec.name}: not every layer is {spec.num_kv_heads} KV heads with K and V of "
        f"{spec.head_dim} and nothing beside them; expected that, for which the run's cost is "
        f"worked out. `kvlab kv` sizes this model's cache",
    )


def cost_report(
    spec: ModelSpec,
    prompt: int = 2048,
    decode: int = 512,
    params: str | float = "coarse",
    bandwidth: float = DEFAULT_BANDWIDTH,
    bytes_per_element: int = 2,
) -> dict:
    """The cost of n decode forwards after a prompt of p, without a cache and with one.

    bandwidth is bytes a second. Raises SheetError for a number that cannot be, and for a model
    whose layers do not all attend with the same heads, to all tokens or to a window.
    """
    for name, value, least in (("--prompt", prompt, 0), ("--decode", decode, 1)):
        right = is_whole(value, least, 10**12)
        require(right, f"{name}: given {value!r}; expected a whole number, {least} or more")
    right = isinstance(bandwidth, int | float) and 1 <= bandwidth < float("inf")
    require(right, f"--bandwidth: given {bandwidth!r}; expected bytes per second, 1 or more")
    _require_attention(spec)
    num_parameters, accounting = accounting_parameters(spec, params)

    uncached = {
        "projection_flops": costs.uncached_run_projection_flops(num_parameters, prompt, decode),
        "attention_flops": costs.uncached_run_attention_flops(spec, prompt, decode),
    }
    cached = {
        "projection_flops": costs.cached_run_projection_flops(num_parameters, decode),
        "attention_flops": costs.cached_run_attention_flops(spec, prompt, decode),
    }
    for run in (uncached, cached):
        run["total_flops"] = run["projection_flops"] + run["attention_flops"]

    last, middle = prompt + decode, prompt + decode // 2
    middle_flops = costs.cached_step_flops(spec, num_parameters, middle)
    middle_bytes = costs.cached_step_bytes(spec, num_parameters, middle, bytes_per_element)
    total_bytes = costs.run_bytes(spec, num_parameters, prompt, decode, bytes_per_element)
    floor_seconds = costs.memory_seconds(total_bytes, bandwidth)
    return {
        "model": spec.name,
        "prompt": prompt,
        "decode": decode,
        "accounting": accounting,
        "num_parameters": num_parameters,
        "bytes_per_element": bytes_per_element,
        "bandwidth_bytes_per_second": bandwidth,
        "uncached": uncached,
        "cached": cached,
        "ratio": uncached["total_flops"] / cached["total_flops"],
        "attention_share": cached["attention_flops"] / cached["total_flops"],
        "rows_discarded_last_step": costs.logit_rows_discarded(last),
        "kv_bytes_per_token": costs.kv_bytes_per_token(spec, bytes_per_element),
        "num_layers": spec.num_layers,
        "windows": {str(w): sum(layer.window == w for layer in spec.layers)
                    for w in sorted({layer.window for layer in spec.layers if layer.window})},
        "kv_bytes_final": costs.kv_bytes(spec, last, bytes_per_element),
        "weight_bytes_per_step": costs.weight_bytes(num_parameters, bytes_per_element),
        "weight_bytes_read": decode * costs.weight_bytes(num_parameters, bytes_per_element),
        "kv_bytes_read": costs.kv_bytes_read_run(spec, prompt, decode, bytes_per_element),
        "floor_seconds": floor_seconds,
        "floor_seconds_per_step": floor_seconds / decode,
        "context_mid": middle,
        "intensity_mid": costs.intensity(middle_flops, middle_bytes),
    }
