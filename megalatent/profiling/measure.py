"""From spans to seconds: what actions, their parts and hand-overs took, case by case.

Typical values are medians, which a machine that was busy for a moment does not move.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megalatent.passes.plan import Action, Plan
from megalatent.profiling.records import ACTIONS, PARTS, WHOLE_STEP, Case, RankStep, Recording, Span

__all__ = [
    "OTHER",
    "Edge",
    "Visit",
    "Window",
    "action_seconds",
    "link_seconds",
    "medians",
    "part_seconds",
    "rank_parts",
    "replicas",
    "spread",
    "standard_error",
    "typical",
    "windows",
]

#: (stage, chunk, kind, k)
Visit = tuple[int, int, str, int]
#: (edge, kind): edge `e` is `stage e -> stage e + 1` of the ring; kind "F", or "B" for the way back
Edge = tuple[int, str]

#: Name of a rank's time that no span covers.
OTHER = "other"
_S = 1e-9


def typical(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles over the median."""
    ordered, middle = sorted(values), typical(values)
    if len(ordered) < 2 or not middle:
        return 0.0
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.75))
    return (high - low) / 2 / middle


def standard_error(spread: float, count: int) -> float:
    """Relative standard error of the median of `count` values with this `spread`.

    Of normal values the quartiles are 0.67 deviations from the median, and the standard error of
    the median of n is 1.25 deviations over sqrt(n).
    """
    return spread / 0.67 * 1.25 / math.sqrt(count)


def replicas(recording: Recording) -> list[list[int]]:
    """Positions in `recording.ranks` of each replica's stages, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    for position, info in enumerate(recording.ranks):
        found[info.replica].append(position)
    return [
        sorted(positions, key=lambda position: recording.ranks[position].stage)
        for _, positions in sorted(found.items())
    ]


def _rank_steps(recording: Recording, case: Case) -> Iterator[tuple[int, RankStep]]:
    for step in case.steps:
        for info, rank in zip(recording.ranks, step.ranks, strict=True):
            yield info.stage, rank


def action_seconds(recording: Recording, case: Case) -> dict[Visit, list[float]]:
    """Seconds of every action of all steps and replicas, by visit."""
    found: dict[Visit, list[float]] = defaultdict(list)
    for stage, rank in _rank_steps(recording, case):
        for span in rank.of_kind(*ACTIONS):
            found[stage, span.chunk, span.kind, span.k].append(span.nanoseconds * _S)
    return dict(found)


def part_seconds(recording: Recording, case: Case) -> dict[Visit, list[float]]:
    """Seconds of the parts of actions; the kind of the visit is the kind of the part.

    Parts of one action that have the same kind are added up.
    """
    found: dict[Visit, list[float]] = defaultdict(list)
    for stage, rank in _rank_steps(recording, case):
        sums: dict[tuple[str, Action | None], int] = defaultdict(int)
        for span in rank.of_kind(*PARTS):
            sums[span.kind, span.action] += span.nanoseconds
        for (kind, action), nanoseconds in sums.items():
            assert action is not None
            found[stage, action.chunk, kind, action.k].append(nanoseconds * _S)
    return dict(found)


def rank_parts(rank: RankStep) -> dict[str, float]:
    """Seconds of a rank's step by kind of span, and what is left; they add up to the step."""
    names = {"F": "forward", "B": "backward", "H": "head"}
    order = (*names.values(), "wait", "send", *WHOLE_STEP)
    seconds = dict.fromkeys(order, 0.0)
    for span in rank.spans:
        if span.kind not in PARTS:
            seconds[names.get(span.kind, span.kind)] += span.nanoseconds * _S
    seconds[OTHER] = (rank.end - rank.start) * _S - sum(seconds.values())
    return seconds


def link_seconds(recording: Recording, case: Case) -> dict[Edge, list[float]]:
    """Seconds from the end of an action to the arrival of its output, by edge and direction.

    Only where the receiver was waiting already when the sender was done: else nobody saw it arrive.
    """
    found: dict[Edge, list[float]] = defaultdict(list)
    plan = case.plan
    for step in case.steps:
        for positions in replicas(recording):
            spans = [step.ranks[position].spans for position in positions]
            ends = {
                (stage, span.action): span.end
                for stage, own in enumerate(spans)
                for span in own
                if span.kind in ("F", "B")
            }
            for stage, own in enumerate(spans):
                for span in own:
                    source = _source(span, stage, plan)
                    if source is None or source[0] == stage:
                        continue
                    sent = ends[source]
                    if span.start < sent:
                        edge = source[0] if span.of == "F" else stage
                        found[edge, span.of].append(max(0, span.end - sent) * _S)
    return dict(found)


def _source(wait: Span, stage: int, plan: Plan) -> tuple[int, Action] | None:
    if wait.kind != "wait" or wait.action is None:
        return None
    return plan.maker(wait.action, stage)


@dataclass(frozen=True)
class Window:
    """One step of one replica.

    Attributes:
        step: seconds from the beginning of the step, on the stage that acts first, until the last
            stage has ended it.
        pipeline: seconds from the first action to the end of the last one.
        busy: seconds in actions, by stage.
        wait: seconds waiting for hand-overs since the first action of any stage, by stage.
    """

    step: float
    pipeline: float
    busy: tuple[float, ...]
    wait: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the stages' time in the pipeline in which they do not act."""
        whole = self.pipeline * len(self.busy)
        return 1 - sum(self.busy) / whole if whole else 0.0

    def bubble_of(self, stage: int) -> float:
        return 1 - self.busy[stage] / self.pipeline if self.pipeline else 0.0


def windows(recording: Recording, case: Case) -> list[Window]:
    """Every step of every recorded replica."""
    found = []
    for step in case.steps:
        for positions in replicas(recording):
            ranks = [step.ranks[position] for position in positions]
            actions = [list(rank.of_kind(*ACTIONS)) for rank in ranks]
            starts = [own[0].start for own in actions]
            first = starts.index(min(starts))
            found.append(
                Window(
                    (max(rank.end for rank in ranks) - ranks[first].start) * _S,
                    (max(own[-1].end for own in actions) - min(starts)) * _S,
                    tuple(sum(span.nanoseconds for span in own) * _S for own in actions),
                    tuple(_waited(rank, min(starts)) * _S for rank in ranks),
                )
            )
    return found


def _waited(rank: RankStep, since: int) -> int:
    return sum(max(0, span.end - max(span.start, since)) for span in rank.of_kind("wait"))


def medians(values: Mapping[Visit, Sequence[float]]) -> dict[Visit, float]:
    """The typical value of each visit."""
    return {visit: typical(seconds) for visit, seconds in values.items()}
