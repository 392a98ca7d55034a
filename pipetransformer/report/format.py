"""Numbers with their units, for reading."""

from __future__ import annotations


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """``3.1 us``, ``42 ms``, ``12.3 s``, ``12m23s``, ``5h07m``."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def byte_size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}{'es' if thing.endswith('ch') else 's'}"
