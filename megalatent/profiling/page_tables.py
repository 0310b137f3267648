"""The figures of the HTML page: tiles above the timeline, and the table of stages and passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalatent.profiling.measure import Window, typical, windows
from megalatent.profiling.measured_costs import Measured
from megalatent.profiling.page_data import Planned
from megalatent.profiling.records import Case, Recording
from megalatent.profiling.units import bytes_text, share_text, time_text

__all__ = ["overhead", "stage_table", "tiles"]


def _visit_seconds(measured: Measured, stage: int, chunk: int, k: int) -> float:
    return sum(measured.visits.get((stage, chunk, kind, k), 0.0) for kind in "FB")


def overhead(measured: Measured, k: int) -> float:
    """What pass k takes on all stages together beyond pass 1, as a share of pass 1."""
    virtual = [(s, c) for s in range(measured.stages) for c in range(measured.chunks)]
    first = sum(_visit_seconds(measured, *place, 1) for place in virtual)
    later = sum(_visit_seconds(measured, *place, k) for place in virtual)
    return later / first - 1 if first else 0.0


def tiles(window: Window, planned: Planned, measured: Measured) -> list[dict[str, str]]:
    """What one step comes to: name, value and note of each tile."""
    plan, bound = planned.simulation.makespan, planned.lower_bound
    busy = list(window.busy)
    slowest = busy.index(max(busy))
    mean = sum(busy) / len(busy)
    found = [
        _tile("Step", time_text(window.step), "from its start to the last rank's end"),
        _tile(
            "Pipeline",
            time_text(window.pipeline),
            f"plan {time_text(plan)} ({_percent(window.pipeline, plan)})",
        ),
        _tile(
            "Lower bound",
            time_text(bound),
            f"pipeline is {window.pipeline / bound:.3f} of it" if bound else "",
        ),
        _tile(
            "Bubble",
            share_text(window.bubble),
            f"plan {share_text(planned.simulation.bubble_fraction)}",
        ),
        *(
            _tile(
                f"Pass {k} over pass 1",
                _signed(overhead(measured, k)),
                "forward and backward, all stages",
            )
            for k in measured.passes[1:]
        ),
    ]
    if len(busy) > 1:
        note = f"busy {time_text(busy[slowest])}, {_percent(busy[slowest], mean)} of the mean"
        found.append(_tile("Busiest stage", f"stage {slowest}", note.replace("of the", "to the")))
    return found


def _tile(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _percent(value: float, base: float) -> str:
    return _signed(value / base - 1) if base else "–"


def _signed(share: float) -> str:
    return share_text(share, signed=True)


@dataclass(frozen=True)
class _Column:
    """A column of the table: a value for each virtual stage, None where there is none."""

    name: str
    values: Sequence[float | None]
    text: Any = time_text
    #: whether the largest value is marked, if values differ by more than a few percent
    marked: bool = True

    def cell(self, i: int) -> dict[str, Any]:
        value = self.values[i]
        known = [v for v in self.values if v is not None]
        worst = self.marked and value is not None and len(known) > 1 and value == max(known)
        worst = worst and value is not None and value > 1.05 * (sum(known) / len(known))
        return {"text": "" if value is None else self.text(value), "worst": bool(worst)}


def stage_table(recording: Recording, case: Case, measured: Measured) -> dict[str, Any]:
    """Typical times of every virtual stage of a case, each column's largest one marked."""
    stages, chunks = measured.stages, measured.chunks
    virtual = [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
    columns: list[_Column] = []

    def add(name: str, values: Sequence[float | None], text: Any = time_text) -> None:
        if any(value is not None for value in values):
            columns.append(_Column(name, values, text))

    for kind, name in (("F", "forward"), ("B", "backward")):
        for k in measured.passes:
            add(f"{name} {k}", [measured.visits.get((*place, kind, k)) for place in virtual])
    for k in measured.passes[1:]:
        shares: list[float | None] = [
            _visit_seconds(measured, *place, k) / _visit_seconds(measured, *place, 1) - 1
            if _visit_seconds(measured, *place, 1)
            else None
            for place in virtual
        ]
        add(f"pass {k} over 1", shares, _signed)
    for name, kinds in (
        ("head", ("H",)),
        ("embedding", ("embedding", "embedding_backward")),
        ("fusion", ("fusion", "fusion_backward")),
    ):
        add(name, [_parts(measured.visits, place, kinds) for place in virtual])
    _add_rank_columns(add, recording, case, virtual)
    several = f" of {len(case.steps)} steps" if len(case.steps) > 1 else ""
    return {
        "note": f"{case.name}: typical times{several} per action; waiting and bubble per step; "
        "coloured: the largest of a column, if it is more than 5% above the mean",
        "columns": ["stage", *(column.name for column in columns)],
        "rows": [
            [
                {"text": f"{stage}" + (f", chunk {chunk}" if chunks > 1 else "")},
                *(column.cell(i) for column in columns),
            ]
            for i, (stage, chunk) in enumerate(virtual)
        ],
    }


def _add_rank_columns(
    add: Any, recording: Recording, case: Case, virtual: Sequence[tuple[int, int]]
) -> None:
    """What is counted per rank and step stands with its first chunk."""
    found = windows(recording, case)

    def per_stage(values: Mapping[int, float]) -> list[float | None]:
        return [values.get(stage) if chunk == 0 else None for stage, chunk in virtual]

    every = {stage for stage, _ in virtual}
    add("wait", per_stage({s: typical([w.wait[s] for w in found]) for s in every}))
    add(
        "bubble",
        per_stage({s: typical([w.bubble_of(s) for w in found]) for s in every}),
        share_text,
    )
    for name, field, text in (
        ("in flight", "in_flight", "{:.0f}".format),
        (f"peak {recording.memory_kind}", "peak", bytes_text),
    ):
        peaks: dict[int, float] = {}
        for step in case.steps:
            for info, rank in zip(recording.ranks, step.ranks, strict=True):
                for sample in rank.memory:
                    peaks[info.stage] = max(peaks.get(info.stage, 0), getattr(sample, field))
        if field == "in_flight" or recording.memory_kind:
            add(name, per_stage(peaks), text)


def _parts(
    visits: Mapping[tuple[int, int, str, int], float],
    place: tuple[int, int],
    kinds: Sequence[str],
) -> float | None:
    """Typical seconds of a part, its forward and backward added up; of passes the largest."""
    stage, chunk = place
    found = []
    for kind in kinds:
        seconds = [s for visit, s in visits.items() if visit[:3] == (stage, chunk, kind)]
        if seconds:
            found.append(max(seconds))
    return sum(found) if found else None
