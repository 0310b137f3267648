"""The steps of a recording in the form in which the HTML page holds them.

Spans become columns of little-endian numbers in base64, sorted by rank and start, with times in
ticks since the start of the step. A tick is a nanosecond, or more where a step is longer than 32
bits of them.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megalatent.passes.plan import Plan
from megalatent.passes.simulate import Simulation
from megalatent.profiling.hand_overs import hand_overs
from megalatent.profiling.records import PARTS, Case, Recording, Span, Step
from megalatent.profiling.rows import KIND_NAMES, rank_name

__all__ = ["CATEGORIES", "Planned", "categories", "pack_step"]

#: Passes that have a shade of their own; later ones share the last.
SHADES = 4
_LARGEST = 2**32 - 1


@dataclass(frozen=True)
class Category:
    """What spans are coloured by. `color` is a variable of the style sheet, `letter` a label."""

    kind: str
    shade: int
    name: str
    color: str
    letter: str = ""


def _action_categories(kind: str, letter: str) -> Iterable[Category]:
    name = KIND_NAMES[kind]
    for k in range(1, SHADES + 1):
        later = " and later" if k == SHADES else ""
        yield Category(kind, k, f"{name}, pass {k}{later}", f"{name}-{k}", letter)


CATEGORIES: tuple[Category, ...] = (
    *_action_categories("F", "F"),
    *_action_categories("B", "B"),
    Category("H", 0, "head", "head", "H"),
    *(
        Category(kind, 0, KIND_NAMES[kind], color)
        for kind, color in (
            ("wait", "wait"),
            ("send", "wait"),
            ("reduce", "reduce"),
            ("optimizer", "optimizer"),
            *((part, "other") for part in PARTS),
        )
    ),
)
_NUMBER = {(category.kind, category.shade): i for i, category in enumerate(CATEGORIES)}


def category_of(kind: str, k: int) -> int:
    """Number of the category of spans of a kind and pass."""
    return _NUMBER[kind, min(k, SHADES) if kind in "FB" else 0]


def categories() -> list[dict[str, Any]]:
    """The categories as plain values."""
    return [
        {
            "name": category.name,
            "kind": KIND_NAMES[category.kind],
            "color": category.color,
            "letter": category.letter,
            "work": category.kind in ("F", "B", "H"),
            "waits": category.kind in ("wait", "send"),
            "closes": category.kind in ("reduce", "optimizer"),
        }
        for category in CATEGORIES
    ]


@dataclass(frozen=True)
class Planned:
    """What the plan of a case says with the measured costs; times in seconds."""

    simulation: Simulation
    lower_bound: float


class _Columns:
    """Spans of all ranks, column by column."""

    def __init__(self, start: int, tick: int) -> None:
        self.origin, self.tick = start, tick
        self.category, self.k, self.chunk, self.of = (array("B") for _ in range(4))
        self.micro_batch, self.source = array("i"), array("i")
        self.start, self.length = array("I"), array("I")
        self.counts: list[int] = []
        self.parts: list[list[int]] = []

    def add(self, span: Span) -> None:
        category = category_of(span.kind, span.k)
        self.category.append(category)
        self.of.append(category_of(span.of, span.k) if span.of else category)
        self.k.append(min(span.k, 255))
        self.chunk.append(max(0, min(span.chunk, 255)))
        self.micro_batch.append(span.micro_batch)
        self.source.append(-1)
        start = (span.start - self.origin) // self.tick
        self.start.append(start)
        self.length.append((span.end - self.origin) // self.tick - start)

    def packed(self) -> dict[str, Any]:
        return {
            "counts": self.counts,
            "parts": self.parts,
            "category": _base64(self.category),
            "pass": _base64(self.k),
            "chunk": _base64(self.chunk),
            "of": _base64(self.of),
            "micro_batch": _base64(self.micro_batch),
            "source": _base64(self.source),
            "start": _base64(self.start),
            "length": _base64(self.length),
        }


def _base64(column: array[int]) -> str:
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")


def pack_step(recording: Recording, case: Case, step: Step, planned: Planned) -> dict[str, Any]:
    """One step with its plan, as plain values."""
    start = min(rank.start for rank in step.ranks)
    end = max(rank.end for rank in step.ranks)
    first_action = min(
        (span.start for rank in step.ranks for span in rank.of_kind("F", "B", "H")), default=start
    )
    makespan = round(planned.simulation.makespan * 1e9)
    longest = max(end, first_action + makespan) - start
    tick = max(1, -(-longest // _LARGEST))
    measured = _measured(recording, case, step, _Columns(start, tick))
    plan = _planned(recording, case.plan, planned.simulation, first_action, _Columns(start, tick))
    bound = first_action - start + round(planned.lower_bound * 1e9)
    return {
        "tick_nanoseconds": tick,
        "chunks": case.plan.chunks,
        "passes": list(case.plan.passes),
        "rows": [{"name": rank_name(info, recording)} for info in recording.ranks],
        "length": (end - start) // tick,
        "plan_length": (first_action - start + makespan) // tick,
        "bound_length": bound // tick,
        "measured": measured.packed(),
        "plan": plan.packed(),
    }


def _measured(recording: Recording, case: Case, step: Step, columns: _Columns) -> _Columns:
    places: list[dict[int, int]] = []
    for rank in step.ranks:
        whole = [(i, span) for i, span in enumerate(rank.spans) if span.kind not in PARTS]
        whole.sort(key=lambda pair: (pair[1].start, pair[1].end))
        first = len(columns.start)
        by_action = {}
        for at, (_, span) in enumerate(whole, first):
            columns.add(span)
            by_action[span.kind, span.action] = at
        places.append({i: at for at, (i, _) in enumerate(whole, first)})
        columns.counts.append(len(whole))
        for span in rank.of_kind(*PARTS):
            holder = by_action.get((span.of, span.action))
            if holder is not None:
                category = category_of(span.kind, span.k)
                columns.parts.append([holder, category, span.nanoseconds // columns.tick])
    for item in hand_overs(recording.ranks, case.plan, step):
        columns.source[places[item.receiver][item.used]] = places[item.sender][item.sent]
    return columns


def _planned(
    recording: Recording, plan: Plan, simulation: Simulation, start: int, columns: _Columns
) -> _Columns:
    """The simulated spans, for each recorded rank those of its stage."""
    firsts: dict[tuple[int, int], int] = {}
    for info in recording.ranks:
        firsts[info.replica, info.stage] = len(columns.start)
        actions = plan.actions[info.stage]
        for action, (begin, end) in zip(actions, simulation.spans[info.stage], strict=True):
            span = Span(
                action.kind,
                start + round(begin * 1e9),
                start + round(end * 1e9),
                action.micro_batch,
                action.k,
                action.chunk,
            )
            columns.add(span)
        columns.counts.append(len(actions))
    _link(plan, firsts, columns)
    return columns


def _link(plan: Plan, firsts: dict[tuple[int, int], int], columns: _Columns) -> None:
    index: Sequence[dict[Any, int]] = [
        {action: i for i, action in enumerate(actions)} for actions in plan.actions
    ]
    for (replica, stage), first in firsts.items():
        for i, action in enumerate(plan.actions[stage]):
            source = plan.maker(action, stage)
            if source is None or source[0] == stage or (replica, source[0]) not in firsts:
                continue
            columns.source[first + i] = firsts[replica, source[0]] + index[source[0]][source[1]]
