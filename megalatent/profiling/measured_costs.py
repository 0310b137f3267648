"""Measured times as costs: for the simulator to repeat a step, and for the planner's file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from megalatent.passes.costs import Costs
from megalatent.profiling.measure import (
    Edge,
    Visit,
    action_seconds,
    link_seconds,
    medians,
    part_seconds,
    spread,
    standard_error,
    typical,
)
from megalatent.profiling.records import Case, Recording
from megalatent.profiling.units import time_text

__all__ = ["Measured", "MeasuredCosts", "cheaper_passes", "measure"]

# A later pass that differs from pass 1 by fewer standard errors is taken to cost the same.
_ERRORS = 3.0


@dataclass(frozen=True)
class MeasuredCosts(Costs):
    """Costs that know what each pass took on each virtual stage, not only the first and later ones.

    A pass that was not measured costs what the deepest measured one did.

    Attributes:
        visits: seconds of each visit.
    """

    visits: Mapping[Visit, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing to check: the times are measured ones."""

    def forward_time(self, stages: int, chunks: int, rank: int, chunk: int, k: int) -> float:
        return self._time(rank, chunk, "F", k)

    def backward_time(self, stages: int, chunks: int, rank: int, chunk: int, k: int) -> float:
        return self._time(rank, chunk, "B", k)

    def _time(self, rank: int, chunk: int, kind: str, k: int) -> float:
        while k > 1 and (rank, chunk, kind, k) not in self.visits:
            k -= 1
        return self.visits.get((rank, chunk, kind, k), 0.0)


@dataclass(frozen=True)
class Measured:
    """Typical seconds of everything a plan knows about.

    Attributes:
        stages, chunks: of the pipeline.
        visits: of forwards, backwards and heads, and of their parts, by visit.
        links: of hand-overs, by edge and direction, where they were seen.
        errors: standard errors of forwards and backwards by stage, kind and pass, relative.
    """

    stages: int
    chunks: int
    visits: Mapping[Visit, float]
    links: Mapping[Edge, float]
    errors: Mapping[tuple[int, str, int], float] = field(default_factory=dict)

    @property
    def passes(self) -> list[int]:
        """The passes that were measured, 1 first."""
        return sorted({k for _, _, kind, k in self.visits if kind == "F"})

    @property
    def head(self) -> float:
        """Of one pass: the typical one of all passes."""
        return typical([s for (_, _, kind, _), s in self.visits.items() if kind == "H"])

    def part(self, kind: str, *, first: bool | None = None) -> float:
        """Seconds of a part on the first virtual stage; of pass 1, of later ones, or of any."""
        return typical(
            [
                seconds
                for (stage, chunk, own, k), seconds in self.visits.items()
                if own == kind and stage == chunk == 0 and (first is None or first == (k == 1))
            ]
        )

    def hand_over(self) -> tuple[float, ...]:
        """Seconds of each edge of the ring; 0 where nobody ever had to wait for one."""
        if self.stages == 1:
            return (0.0,)
        return tuple(
            fmean(seen) if seen else 0.0
            for edge in range(self.stages)
            for seen in [[self.links[edge, way] for way in "FB" if (edge, way) in self.links]]
        )

    def exact(self) -> MeasuredCosts:
        """Costs with which the simulator repeats what was measured."""
        return MeasuredCosts(head=self.head, hand_over=self.hand_over(), visits=self.visits)

    def costs(self) -> Costs:
        """Costs in the form of the planner's file, in seconds.

        What later passes take beyond the first one, the fusion aside, is their extra; all later
        passes count alike. What may be noise counts as nothing, whichever sign it has; what is more
        counts as it is. It may be negative: pass 1 also reads the data.
        """
        virtual = [(stage, chunk) for chunk in range(self.chunks) for stage in range(self.stages)]
        embedding, fusion = self.part("embedding", first=True), self.part("fusion", first=False)
        embedding_back = self.part("embedding_backward") + self.part("fusion_backward", first=True)
        fusion_back = self.part("fusion_backward", first=False)

        def first(kind: str, part: float) -> list[float]:
            plain = [self.visits[stage, chunk, kind, 1] for stage, chunk in virtual]
            plain[0] = max(0.0, plain[0] - part)
            return plain

        forward, backward = first("F", embedding), first("B", embedding_back)

        def extra(kind: str, plain: Sequence[float], part: float) -> tuple[float, ...]:
            if len(self.passes) == 1:
                return (0.0,) * len(virtual)
            found = []
            for place, one in zip(virtual, plain, strict=True):
                later = fmean(self.visits[*place, kind, k] for k in self.passes[1:])
                noise = _ERRORS * math.hypot(
                    self.visits[*place, kind, 1] * self._error(place[0], kind, self.passes[:1]),
                    later * self._error(place[0], kind, self.passes[1:]),
                )
                beyond = later - one - (part if place == (0, 0) else 0.0)
                found.append(beyond if abs(beyond) > noise else 0.0)
            return tuple(found)

        return Costs(
            forward=tuple(forward),
            backward=tuple(backward),
            head=self.head,
            hand_over=self.hand_over(),
            embedding=embedding,
            embedding_backward=embedding_back,
            fusion=fusion,
            fusion_backward=fusion_back,
            extra_forward=extra("F", forward, fusion),
            extra_backward=extra("B", backward, fusion_back),
        )

    def _error(self, stage: int, kind: str, passes: Sequence[int]) -> float:
        """Relative standard error of the mean of some passes of a stage."""
        errors = [self.errors.get((stage, kind, k), 0.0) for k in passes]
        return math.hypot(*errors) / len(errors)


def measure(recording: Recording, cases: Sequence[Case] | None = None) -> Measured:
    """Typical times of some cases together; the default is all of them.

    Raises:
        ValueError: no case has a step.
    """
    cases = [case for case in (cases or recording.cases) if case.steps]
    if not cases:
        raise ValueError("nothing was recorded: no case has a step")
    visits: dict[Visit, list[float]] = {}
    links: dict[Edge, list[float]] = {}
    for case in cases:
        for found in (action_seconds(recording, case), part_seconds(recording, case)):
            for visit, seconds in found.items():
                visits.setdefault(visit, []).extend(seconds)
        for edge, seconds in link_seconds(recording, case).items():
            links.setdefault(edge, []).extend(seconds)
    plan = cases[0].plan
    return Measured(
        plan.stages,
        plan.chunks,
        medians(visits),
        {e: typical(s) for e, s in links.items()},
        _errors(visits),
    )


def _errors(visits: Mapping[Visit, Sequence[float]]) -> dict[tuple[int, str, int], float]:
    """Relative standard error of a typical forward and backward; of several chunks the mean."""
    found: dict[tuple[int, str, int], list[float]] = {}
    for (stage, _, kind, k), seconds in visits.items():
        if kind in ("F", "B"):
            error = standard_error(spread(seconds), len(seconds))
            found.setdefault((stage, kind, k), []).append(error)
    return {visit: fmean(errors) for visit, errors in found.items()}


def cheaper_passes(costs: Costs) -> list[str]:
    """What in measured costs makes later passes cheaper than pass 1, a line each."""
    found = []
    for name, extra in (("forwards", costs.extra_forward), ("backwards", costs.extra_backward)):
        assert isinstance(extra, tuple)
        less = [
            f"{time_text(-seconds)} on virtual stage {index}"
            for index, seconds in enumerate(extra)
            if seconds < 0
        ]
        if less:
            found.append(f"{name} of later passes take less than in pass 1: {', '.join(less)}")
    return found
