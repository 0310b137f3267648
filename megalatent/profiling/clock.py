"""Clocks: marks that cost nothing while a step runs, and one time for all ranks afterwards.

A mark on a CPU is `time.perf_counter_ns()`. A mark on a GPU is an event in the stream: it is read
when the recording is over, so that nothing waits for the device inside a step.

Ranks on one machine share a clock on Linux. Between machines, each rank exchanges pings with the
first one before and after the recording. If a ping leaves at `a` and its answer, which carries the
first rank's time `t`, arrives at `b`, then `t` was read in between: the offset `t - (a + b)/2`
is off by at most `(b - a)/2`. The fastest of many exchanges gives the offset, half its duration the
error that is reported, and the two alignments the drift between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Alignment", "CpuClock", "CudaClock", "StepClock", "align", "clock_name", "make_clock"]

_EXCHANGES = 32


class StepClock(Protocol):
    """Takes marks while a step runs, and turns them into times afterwards."""

    def mark(self) -> Any:
        """Now, in a form that only `resolve` understands."""

    def resolve(self, marks: Sequence[Any]) -> list[int]:
        """Nanoseconds of `time.perf_counter_ns()` of each mark; may wait for the device."""


class CpuClock:
    """Marks are the times themselves."""

    def __init__(self) -> None:
        self.mark = time.perf_counter_ns

    def resolve(self, marks: Sequence[int]) -> list[int]:
        return list(marks)


class CudaClock:
    """Marks are events in the current stream, placed in time by one that was waited for.

    Events are told apart to half a microsecond. As the time since the anchor is a 32-bit number of
    milliseconds, times later than two minutes after it lose precision (16 us by then): recordings
    place each step by its own first mark, so that durations stay exact.

    Args:
        event: makes an event.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._anchor, self._anchored = self._find_anchor()

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def resolve(self, marks: Sequence[Any]) -> list[int]:
        if not marks:
            return []
        marks[-1].synchronize()
        first = self._anchored + _nanoseconds(self._anchor.elapsed_time(marks[0]))
        return [first + _nanoseconds(marks[0].elapsed_time(mark)) for mark in marks]

    def _find_anchor(self) -> tuple[Any, int]:
        """An event, and when the host saw it happen: the fastest of several sightings."""
        best: tuple[int, Any, int] | None = None
        for _ in range(10):
            event = self._event()
            before = time.perf_counter_ns()
            event.record()
            event.synchronize()
            after = time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        assert best is not None
        return best[1], best[2]


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def make_clock(device: torch.device) -> StepClock:
    """The clock of what runs on `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def clock_name() -> str:
    """Equal for two processes whose `perf_counter_ns` reads the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Alignment:
    """What makes a rank's times those of the first rank, as seen at one moment.

    Attributes:
        at: this rank's time of the alignment, ns.
        offset: what to add to this rank's times, ns.
        error: most by which the offset may be wrong, ns.
    """

    at: int
    offset: int
    error: int

    @staticmethod
    def between(before: Alignment, after: Alignment) -> Callable[[int], int]:
        """Turns this rank's times into the first rank's, following the drift in between."""
        span = after.at - before.at
        drift = (after.offset - before.offset) / span if span > 0 else 0.0

        def aligned(time: int) -> int:
            return time + before.offset + round(drift * (time - before.at))

        return aligned


def align(
    group: Any,
    *,
    now: Callable[[], int] = time.perf_counter_ns,
    name: str | None = None,
    exchanges: int = _EXCHANGES,
) -> Alignment:
    """Compare this rank's clock with that of the group's first rank. All its ranks together.

    Args:
        group: of a backend that sends CPU tensors (gloo); None: there is no other rank.
        now: the clock, ns.
        name: of the clock; ranks with equal names, not empty, are not compared.
        exchanges: pings.
    """
    if group is None or group.size() == 1:
        return Alignment(now(), 0, 0)
    names: list[str] = [""] * group.size()
    dist.all_gather_object(names, clock_name() if name is None else name, group=group)
    first = dist.get_global_rank(group, 0)
    me = group.rank()
    result = Alignment(now(), 0, 0)
    for other in range(1, group.size()):
        if names[other] and names[other] == names[0]:
            continue
        if me == 0:
            _answer(dist.get_global_rank(group, other), group, now, exchanges)
        elif me == other:
            result = _ask(first, group, now, exchanges)
    return result


def _answer(rank: int, group: Any, now: Callable[[], int], exchanges: int) -> None:
    ping = torch.zeros(1, dtype=torch.int64)
    for _ in range(exchanges):
        dist.recv(ping, rank, group=group)
        dist.send(torch.tensor([now()], dtype=torch.int64), rank, group=group)


def _ask(rank: int, group: Any, now: Callable[[], int], exchanges: int) -> Alignment:
    ping, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    best: tuple[int, Alignment] | None = None
    for _ in range(exchanges):
        before = now()
        dist.send(ping, rank, group=group)
        dist.recv(answer, rank, group=group)
        after = now()
        if best is None or after - before < best[0]:
            middle = (before + after) // 2
            error = (after - before + 1) // 2
            best = after - before, Alignment(middle, int(answer) - middle, error)
    assert best is not None
    return best[1]
