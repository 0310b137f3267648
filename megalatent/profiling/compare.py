"""Two profiles beside each other: what differs, and whether it differs by more than noise.

Every figure is taken once per recorded step, so that each profile tells by itself how much the
figure varies. The noise of a difference is the half-width of its 99% interval: the medians'
standard errors, as of normal steps (1.2533 s / sqrt(n)), together, times Student's factor. Steps
of one run are not quite independent, so it is an estimate, and of a hundred figures that have not
changed one is expected to exceed it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from statistics import median, stdev
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from megalatent.errors import UserError
from megalatent.profiling.measure import (
    action_seconds,
    medians,
    part_seconds,
    rank_parts,
    typical,
    windows,
)
from megalatent.profiling.records import Case, Recording
from megalatent.profiling.rows import KIND_NAMES
from megalatent.profiling.tables import wide_console
from megalatent.profiling.units import share_text, time_text

__all__ = [
    "Comparison",
    "Difference",
    "Figure",
    "compare",
    "compare_files",
    "table",
    "to_json",
]

#: Student's factor of a two-sided 99% interval, by degrees of freedom from 1 on.
_STUDENT = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
_STUDENT_FROM = ((15, 2.947), (20, 2.845), (30, 2.750), (60, 2.660), (120, 2.617))
_NORMAL = 2.576
#: Standard error of the median of normal values, in standard errors of their mean.
_MEDIAN = math.sqrt(math.pi / 2)
#: Rows that a table shows before it leaves out what is within the noise.
_ROWS = 60


@dataclass(frozen=True, order=True)
class Figure:
    """What is compared: of the whole step, of a stage, or of a pass on a (virtual) stage."""

    name: str
    stage: int | None = None
    chunk: int | None = None
    k: int | None = None

    def __str__(self) -> str:
        parts = [self.name]
        if self.k is not None:
            parts.append(f"pass {self.k}")
        if self.stage is not None:
            parts.append(f"stage {self.stage}")
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk}")
        return ", ".join(parts)

    @property
    def is_share(self) -> bool:
        """Whether it is a share of something; else it is seconds."""
        return self.name in ("bubble", "overhead over pass 1")


@dataclass(frozen=True)
class Difference:
    """A figure of a case in both profiles.

    Attributes:
        before, after: the typical values, in seconds or shares.
        noise: by how much their difference may be other than zero by chance; None where a profile
            has only one step, and nobody knows.
    """

    case: str
    figure: Figure
    before: float
    after: float
    noise: float | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> str:
        if self.noise is None:
            return "noise unknown"
        # Times are whole nanoseconds: less is rounding, and so is a millionth of a share.
        rounding = 1e-6 if self.figure.is_share else 1e-9
        if abs(self.change) <= max(self.noise, rounding):
            return "within noise"
        if self.figure.is_share or self.figure.name == "wait":
            return "more" if self.change > 0 else "less"
        return "slower" if self.change > 0 else "faster"


class Comparison(NamedTuple):
    """Two profiles beside each other.

    Attributes:
        differences: case by case; the whole step's figures first.
        remarks: sentences on what the profiles say differently of their runs, and on what only one
            of them has.
    """

    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]


def compare_files(before: str | PathLike[str], after: str | PathLike[str]) -> Comparison:
    """Compare two files of `megalatent profile --json`.

    Raises:
        UserError: a file is no profile, or they have no case in common.
        OSError: a file cannot be read.
    """
    return compare(Recording.load(before), Recording.load(after))


def compare(before: Recording, after: Recording) -> Comparison:
    """Compare the cases that have the same name in both.

    Raises:
        UserError: no case is in both.
    """
    one = {case.name: case for case in before.cases if case.steps}
    two = {case.name: case for case in after.cases if case.steps}
    both = [name for name in one if name in two]
    if not both:
        raise UserError(
            f"nothing to compare: one profile has the cases {', '.join(one) or '(none)'}, the "
            f"other {', '.join(two) or '(none)'}; profile the same passes in both"
        )
    remarks = list(_facts(before, after))
    remarks += [f"only before: case {name}" for name in one if name not in two]
    remarks += [f"only after: case {name}" for name in two if name not in one]
    found: list[Difference] = []
    for name in both:
        left, right = _samples(before, one[name]), _samples(after, two[name])
        for figure in left:
            if figure in right:
                middle = median(left[figure]), median(right[figure])
                noise = _noise(left[figure], right[figure])
                found.append(Difference(name, figure, *middle, noise))
        remarks.append(f"{name}: {len(one[name].steps)} steps before, {len(two[name].steps)} after")
        for when, figures in (("before", left.keys() - right), ("after", right.keys() - left)):
            if figures:
                some = sorted(map(str, figures))[0]
                remarks.append(f"{name}: only {when}: {len(figures)} figures, such as {some}")
    return Comparison(tuple(found), tuple(remarks))


def _facts(before: Recording, after: Recording) -> Iterator[str]:
    for name in dict.fromkeys([*before.facts, *after.facts]):
        values = before.facts.get(name), after.facts.get(name)
        if values[0] != values[1]:
            old, new = ("nothing" if value is None else _short(str(value)) for value in values)
            yield f"{name}: {old} before, {new} after"


def _samples(recording: Recording, case: Case) -> dict[Figure, list[float]]:
    """Each figure once per step; of replicas the typical one."""
    found: dict[Figure, list[float]] = {}
    for step in case.steps:
        one = replace(case, steps=(step,))
        for figure, value in _of_step(recording, one):
            found.setdefault(figure, []).append(value)
    # A figure of some steps only would compare different things.
    return {figure: values for figure, values in found.items() if len(values) == len(case.steps)}


def _of_step(recording: Recording, case: Case) -> Iterator[tuple[Figure, float]]:
    """All figures of a case that has one step."""
    views = windows(recording, case)
    stages, chunks = case.plan.stages, case.plan.chunks
    yield Figure("step"), typical([view.step for view in views])
    yield Figure("pipeline"), typical([view.pipeline for view in views])
    yield Figure("bubble"), typical([view.bubble for view in views])
    actions = medians(action_seconds(recording, case))
    parts = medians(part_seconds(recording, case))
    for visits in (actions, parts):
        for (stage, chunk, kind, k), seconds in sorted(visits.items(), key=_in_order):
            yield Figure(KIND_NAMES[kind], stage, chunk if chunks > 1 else None, k), seconds
    for stage in range(stages):
        for chunk in range(chunks):
            passes = sorted({k for s, c, kind, k in actions if (s, c, kind) == (stage, chunk, "F")})
            times = [
                sum(actions.get((stage, chunk, kind, k), 0.0) for kind in "FB") for k in passes
            ]
            for k, time in zip(passes[1:], times[1:], strict=True):
                name = "overhead over pass 1"
                share = time / times[0] - 1 if times[0] else 0.0
                yield Figure(name, stage, chunk if chunks > 1 else None, k), share
    for stage in range(min(stages, len(views[0].wait))):
        yield Figure("wait", stage), typical([view.wait[stage] for view in views])
        yield Figure("bubble", stage), typical([view.bubble_of(stage) for view in views])
        own = [
            rank_parts(rank)
            for info, rank in zip(recording.ranks, case.steps[0].ranks, strict=True)
            if info.stage == stage
        ]
        for kind in ("reduce", "optimizer"):
            yield Figure(kind, stage), typical([seconds[kind] for seconds in own])


def _in_order(item: tuple[tuple[int, int, str, int], float]) -> tuple[int, int, int, int]:
    (stage, chunk, kind, k), _ = item
    return list(KIND_NAMES).index(kind), k, stage, chunk


def _noise(a: Sequence[float], b: Sequence[float]) -> float | None:
    if min(len(a), len(b)) < 2:
        return None
    errors = [(_MEDIAN * stdev(values)) ** 2 / len(values) for values in (a, b)]
    whole = sum(errors)
    if whole == 0:
        return 0.0
    # Welch's degrees of freedom, of two profiles that vary differently.
    freedom = whole**2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, (a, b), strict=True))
    return _student(freedom) * math.sqrt(whole)


def _student(freedom: float) -> float:
    """The factor of the next smaller number of degrees of freedom in the table."""
    whole = max(1, math.floor(freedom))
    if whole <= len(_STUDENT):
        return _STUDENT[whole - 1]
    known = [factor for least, factor in _STUDENT_FROM if least <= whole]
    return _STUDENT[-1] if not known else (known[-1] if whole < 1000 else _NORMAL)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values by name."""
    return {
        "differences": [
            {
                "case": item.case,
                **{key: value for key, value in asdict(item.figure).items() if value is not None},
                "unit": "share" if item.figure.is_share else "seconds",
                "before": item.before,
                "after": item.after,
                "change": item.change,
                "noise": item.noise,
                "verdict": item.verdict,
            }
            for item in comparison.differences
        ],
        "remarks": list(comparison.remarks),
    }


def table(comparison: Comparison, *, every: bool = False) -> str:
    """The remarks, and a table per case, for a terminal.

    Args:
        every: show all figures. Otherwise a long table leaves out figures of stages that are
            within the noise, and says how many.
    """
    console = wide_console(io.StringIO())
    for remark in comparison.remarks:
        console.print(remark, markup=False, soft_wrap=True)
    for case in dict.fromkeys(item.case for item in comparison.differences):
        own = [item for item in comparison.differences if item.case == case]
        shown = own
        if not every and len(own) > _ROWS:
            shown = [d for d in own if d.figure.stage is None or d.verdict != "within noise"]
        rows = Table(box=None, pad_edge=False)
        rows.add_column(Text(case), no_wrap=True)
        for name in ("before", "after", "change", "", "noise"):
            rows.add_column(name, justify="right", no_wrap=True)
        rows.add_column("", no_wrap=True)
        for item in shown:
            rows.add_row(*_cells(item))
        console.print()
        console.print(rows)
        if len(own) > len(shown):
            console.print(f"and {len(own) - len(shown)} figures of stages, all within noise")
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _cells(item: Difference) -> tuple[str, ...]:
    if item.figure.is_share:
        change = f"{round(100 * item.change, 1) + 0.0:+.1f} points"
        cells = [share_text(item.before), share_text(item.after), change, ""]
        noise = "?" if item.noise is None else f"±{100 * item.noise:.1f} points"
    else:
        ratio = share_text(item.change / item.before, signed=True) if item.before else ""
        sign = "+" if item.change >= 0 else ""
        cells = [
            time_text(item.before),
            time_text(item.after),
            sign + time_text(item.change),
            ratio,
        ]
        noise = "?" if item.noise is None else f"±{time_text(item.noise)}"
    return (str(item.figure), *cells, noise, item.verdict)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"
