"""Times and sizes as the table, the page and comparisons write them."""

from __future__ import annotations

__all__ = ["bytes_text", "time_text"]


def time_text(seconds: float) -> str:
    """Seconds with four digits in a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def bytes_text(size: float) -> str:
    """Bytes with four digits in a fitting unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} B"
