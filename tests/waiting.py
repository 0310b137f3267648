"""How tests wait, and what they share with other tests on the machine: nothing is left to luck.

A machine may be slow and busy. So a test waits for what it needs and not for a time; a limit only
ends what hangs, and is generous; and where a test is about times themselves, it is tried again with
longer ones.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from megalatent.launch.srun import is_free

__all__ = ["HANG", "patiently", "reserve_ports", "wait_until"]

# Seconds after which something counts as hanging: far more than a slow and busy machine needs.
# All that a longer time costs is patience where something does hang.
HANG = 600.0

# Ports that tests listen on, below those that the system gives to clients and those that a
# supervisor chooses; each block belongs to one process at a time.
_FIRST, _LAST, _BLOCK = 11_000, 19_800, 200
_reserved: list[IO[str]] = []  # open as long as this process lives


def wait_until[T](
    what: str, until: Callable[[], T], seconds: float = HANG, pause: float = 0.02
) -> T:
    """Poll until `until()` is true; its value.

    Raises:
        TimeoutError: it is not, within `seconds`; the message says `what`.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = until()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)


def patiently(check: Callable[[float], Any], factors: Sequence[float]) -> None:
    """Call `check(factor)`, factor by factor, until it holds; with the last one it must.

    `factor` is for the times in the test: what a busy machine adds to them does not grow with them,
    and what is wrong is wrong with all of them.
    """
    for factor in factors[:-1]:
        try:
            check(factor)
            return
        except Exception as error:  # what was measured wrongly may break anything
            print(f"times {factor:g}: {type(error).__name__}: {error}")
    check(factors[-1])


def reserve_ports(count: int) -> int:
    """The first of `count` ports in a row that are free, and for this process alone.

    At most 200. Others that ask this function get others, also before anybody listens on them.
    """
    assert count <= _BLOCK
    for first in range(_FIRST, _LAST, _BLOCK):
        path = Path(tempfile.gettempdir(), f"megalatent-test-ports-{first}")
        try:
            lock = path.open("a")
        except PermissionError:  # another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if all(is_free(port) for port in range(first, first + count)):
            _reserved.append(lock)
            return first
        lock.close()
    raise RuntimeError("no free ports")
