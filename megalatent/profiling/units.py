"""Times, sizes and shares as the table, the page and comparisons write them."""

from __future__ import annotations

__all__ = ["byte_unit", "bytes_text", "share_text", "time_text"]

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def time_text(seconds: float) -> str:
    """Seconds with four digits in a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        # What is rounded up to a whole one is written in it: 1 s, not 1000 ms.
        if abs(seconds) * scale >= 0.99995:
            return f"{_four_digits(seconds * scale)} {unit}"
    return f"{_four_digits(seconds * 1e6)} µs"


def bytes_text(size: float) -> str:
    """Bytes with four digits in a fitting unit."""
    unit, scale = byte_unit(size)
    return f"{size:.0f} B" if scale == 1 else f"{_four_digits(size / scale)} {unit}"


def byte_unit(size: float) -> tuple[str, int]:
    """The largest unit that a size has one of, and its bytes."""
    return next(((unit, scale) for unit, scale in _BYTES if abs(size) >= scale), ("B", 1))


def share_text(share: float, *, signed: bool = False) -> str:
    """A share in percent with one digit after the point."""
    # Adding zero turns what rounds to minus zero into plain zero.
    rounded = round(share, 3) + 0.0
    return f"{rounded:+.1%}" if signed else f"{rounded:.1%}"


def _four_digits(value: float) -> str:
    # From ten thousand on, four digits would be written with an exponent.
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"
