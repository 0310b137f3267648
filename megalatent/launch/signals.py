"""Signals of the launchers. Imports neither torch nor Megatron."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Set

__all__ = ["blocked"]


@contextlib.contextmanager
def blocked(signals: Set[int]) -> Iterator[None]:
    """Hold signals back from this thread, and from what it starts, until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
