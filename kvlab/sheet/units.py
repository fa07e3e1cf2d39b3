"""Numbers for people: bytes in both units, FLOPs and seconds with their prefix."""

from __future__ import annotations


def _scaled(value: float, base: int, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while abs(value) >= base and power < len(prefixes) - 1:
        value /= base
        power += 1
    digits = f"{value:,.0f}" if power == 0 else f"{value:,.2f}"
    return f"{digits} {prefixes[power]}{unit}"


def binary_bytes(num_bytes: float) -> str:
    """128 KiB, 320.00 MiB: powers of 1,024."""
    return _scaled(num_bytes, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), "B")


def decimal_bytes(num_bytes: float) -> str:
    """335.54 MB: powers of 1,000."""
    return _scaled(num_bytes, 1000, ("", "k", "M", "G", "T", "P"), "B")


def both_bytes(num_bytes: float) -> str:
    """320.00 MiB (335.54 MB): the units side by side, so that neither is taken for the other."""
    return f"{binary_bytes(num_bytes)} ({decimal_bytes(num_bytes)})"


def amount(value: float | None, unit: str = "bytes") -> str:
    """A figure with its unit, bytes as `both_bytes`; "not known" for None."""
    if value is None:
        return "not known"
    return both_bytes(value) if unit == "bytes" else f"{value:,.10g} {unit}"


def flops(num_flops: float) -> str:
    """8.84 TFLOP."""
    return _scaled(num_flops, 1000, ("", "k", "M", "G", "T", "P", "E"), "FLOP")


def seconds(value: float) -> str:
    """2.501 s, 4.884 ms, 78.2 ps."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e-12:.4g} ps"
