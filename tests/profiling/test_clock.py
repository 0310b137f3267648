"""Clocks of ranks are aligned within the error that is reported; marks of a GPU become times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from megalatent.profiling.clock import Alignment, CpuClock, CudaClock, align, clock_name
from tests.distributed.harness import run_ranks

OFFSETS = (0, 7_000_000_000, -3_000_000)


def _align(rank: int) -> list[tuple[int, int]]:
    """(error of the aligned time, error that was reported), between and at two alignments."""

    def now() -> int:
        return time.perf_counter_ns() + OFFSETS[rank]

    before = align(dist.group.WORLD, now=now, name="", exchanges=20)
    # The machine's own clock is the first rank's: the truth is known here.
    true = time.perf_counter_ns() + OFFSETS[0]
    after = align(dist.group.WORLD, now=now, name="", exchanges=20)
    aligned = Alignment.between(before, after)
    found = [(aligned(true + OFFSETS[rank]) - true, max(before.error, after.error))]
    return [*found, (before.offset + OFFSETS[rank], before.error)]


def test_ranks_on_different_clocks() -> None:
    for rank, found in enumerate(run_ranks(3, _align)):
        for off, error in found:
            # Between two alignments none is further off than they are; 1 ns for the rounding.
            assert abs(off) <= error + 1, rank
            assert (error > 0) == (rank > 0)


def _same(rank: int) -> tuple[int, int]:
    found = align(dist.group.WORLD)
    return found.offset, found.error


@pytest.mark.skipif(not clock_name(), reason="this system does not name its clock")
def test_ranks_of_one_machine_share_a_clock() -> None:
    assert run_ranks(2, _same) == [(0, 0), (0, 0)]


def test_drift_is_followed() -> None:
    # A clock that gains 1 ms a second against the first rank's.
    aligned = Alignment.between(
        Alignment(1_000_000_000, 5_000, 10), Alignment(2_000_000_000, 5_000 - 1_000_000, 10)
    )
    assert aligned(1_000_000_000) == 1_000_005_000
    assert aligned(1_500_000_000) == 1_500_000_000 + 5_000 - 500_000
    assert aligned(3_000_000_000) == 3_000_000_000 + 5_000 - 2_000_000


class FakeEvent:
    """A CUDA event on a device whose clock is the host's plus 50 s, and late by 10 us."""

    count = 0

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        FakeEvent.count += 1
        self.at = (time.perf_counter_ns() + 50_000_000_000) / 1e6

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_events_become_host_times() -> None:
    clock = CudaClock(FakeEvent)
    before = time.perf_counter_ns()
    first = clock.mark()
    time.sleep(0.02)
    marks = [first, clock.mark()]
    after = time.perf_counter_ns()
    times = clock.resolve(marks)
    # The anchor is placed in the middle of its sighting, which takes microseconds.
    slack = 1_000_000
    assert before - slack <= times[0] <= times[1] <= after + slack
    assert times[1] - times[0] == pytest.approx((marks[1].at - first.at) * 1e6, abs=1000)
    assert clock.resolve([]) == []


def test_cpu_marks_are_times() -> None:
    clock = CpuClock()
    before = time.perf_counter_ns()
    marks: list[Any] = [clock.mark(), clock.mark()]
    assert clock.resolve(marks) == marks
    assert before <= marks[0] <= marks[1]
