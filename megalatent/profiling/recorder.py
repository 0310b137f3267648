"""Takes the times of one rank's steps: what the executor and the stage's program tell it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalatent.passes.plan import Action, Plan
from megalatent.profiling.clock import StepClock
from megalatent.profiling.memory import KeptTensors, MemoryMeter
from megalatent.profiling.records import ACTIONS, WHOLE_STEP, MemorySample, RankStep, Span

__all__ = ["KeptCounter", "RecordedStep", "StepRecorder"]


class RecordedStep(NamedTuple):
    """One step of one rank, and what it ran."""

    iteration: int
    plan: Plan
    step: RankStep


@dataclass
class _Raw:
    """A step in marks, before they have times."""

    iteration: int
    begin: Any
    end: Any = None
    plan: Plan | None = None
    spans: list[tuple[str, Action | None, Any, Any]] = field(default_factory=list)
    # (index of the span at whose end it was taken, or -1 for the step's begin, bytes, peak, count)
    memory: list[tuple[int, int, int, int]] = field(default_factory=list)


class StepRecorder:
    """A `Recorder` of the executor and of the program.

    Between `step_begins` and `step_ends` it only appends to lists. Times come out of `finish`.

    Args:
        clock: takes the marks.
        meter: reads memory at the end of every action; None: not at all.
    """

    def __init__(self, clock: StepClock, meter: MemoryMeter | None = None) -> None:
        self._mark = clock.mark
        self._clock = clock
        self._meter = meter
        self._steps: list[_Raw] = []
        self._open: list[Any] = []
        self._now = _Raw(-1, None)
        self._in_flight = 0

    # -- while a step runs ------------------------------------------------------------------

    def step_begins(self, iteration: int) -> None:
        self._open.clear()
        self._in_flight = 0
        self._now = _Raw(iteration, None)
        if self._meter is not None:
            allocated, _ = self._meter.read()
            self._now.memory.append((-1, allocated, allocated, 0))
        self._now.begin = self._mark()

    def step_ends(self, plan: Plan) -> None:
        """The step is over; `plan` is what it ran."""
        self._now.end = self._mark()
        self._now.plan = plan
        self._steps.append(self._now)

    def begin(self, kind: str, action: Action | None = None) -> None:
        self._open.append(self._mark())

    def end(self, kind: str, action: Action | None = None) -> None:
        spans = self._now.spans
        spans.append((kind, action, self._open.pop(), self._mark()))
        if kind in ACTIONS:
            self._in_flight += (kind == "F") - (kind == "B")
            if self._meter is not None:
                sample = (len(spans) - 1, *self._meter.read(), self._in_flight)
                self._now.memory.append(sample)

    def kept(self, action: Action) -> AbstractContextManager:
        return nullcontext()

    # -- afterwards -------------------------------------------------------------------------

    def finish(self, aligned: Callable[[int], int]) -> list[RecordedStep]:
        """All steps recorded so far; may wait for the device.

        Args:
            aligned: turns this rank's times into the recording's.
        """
        return [self._timed(raw, aligned) for raw in self._steps]

    def _timed(self, raw: _Raw, aligned: Callable[[int], int]) -> RecordedStep:
        marks = [raw.begin, *(m for _, _, a, b in raw.spans for m in (a, b)), raw.end]
        times = [aligned(time) for time in self._clock.resolve(marks)]
        spans = []
        for index, (kind, action, _, _) in enumerate(raw.spans):
            start, end = times[2 * index + 1 : 2 * index + 3]
            if action is None or kind in WHOLE_STEP:
                spans.append(Span(kind, start, end))
                continue
            of = "" if kind in ACTIONS else action.kind
            spans.append(Span(kind, start, end, action.micro_batch, action.k, action.chunk, of))
        memory = [
            MemorySample(times[2 * index + 2] if index >= 0 else times[0], *rest)
            for index, *rest in raw.memory
        ]
        assert raw.plan is not None
        step = RankStep(times[0], times[-1], tuple(spans), tuple(memory))
        return RecordedStep(raw.iteration, raw.plan, step)


class KeptCounter:
    """Takes no times, but counts what each forward visit keeps, for a step of its own.

    Attributes:
        bytes: (chunk, pass) -> most bytes that a visit kept.
    """

    def __init__(self, tensors: KeptTensors) -> None:
        self._tensors = tensors
        self._counted: tuple[int, int] | None = None
        self.bytes: dict[tuple[int, int], int] = {}

    def begin(self, kind: str, action: Action | None = None) -> None: ...

    def end(self, kind: str, action: Action | None = None) -> None:
        if kind == "F" and self._counted is not None:
            found = max(self._tensors.bytes, self.bytes.get(self._counted, 0))
            self.bytes[self._counted] = found

    def kept(self, action: Action) -> AbstractContextManager:
        self._counted = (action.chunk, action.k)
        return self._tensors.around()
