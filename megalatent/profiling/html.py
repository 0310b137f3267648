"""A recording as one HTML page: an interactive timeline with the plan beside the measurement.

The page holds everything it needs and asks the network for nothing; its content security policy
forbids that it could. Style and scripts are the files in `assets`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

from megalatent.passes.bounds import lower_bound
from megalatent.passes.simulate import simulate
from megalatent.profiling.measure import windows
from megalatent.profiling.measured_costs import Measured, measure
from megalatent.profiling.page_data import Planned, categories, pack_step
from megalatent.profiling.page_tables import stage_table, tiles
from megalatent.profiling.records import Case, Recording

__all__ = ["render_html", "write_html"]

#: In the order in which they build on each other.
_SCRIPTS = ("data.js", "draw.js", "timeline.js", "input.js", "page.js")
#: Spans on a page, plans not counted. Each takes about 30 bytes of the file.
_MOST_SPANS = 300_000
#: Facts of the recording that the page's first line tells.
_FACTS = {
    "model": "{}",
    "num_layers": "{} layers",
    "hidden_size": "hidden size {}",
    "seq_length": "sequences of {}",
    "micro_batch_size": "micro-batches of {}",
    "global_batch_size": "batches of {}",
    "fusion": "fusion {}",
    "recompute": "recompute {}",
}


def write_html(recording: Recording, path: str | PathLike[str], **options: Any) -> None:
    """Write the page; `options` are those of `render_html`.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(render_html(recording, **options), encoding="utf-8")


def render_html(
    recording: Recording,
    *,
    title: str = "Pipeline profile",
    findings: Mapping[str, Sequence[str]] | None = None,
    most_spans: int = _MOST_SPANS,
) -> str:
    """The page as text.

    Args:
        findings: sentences to show above the timeline, by name of the case.
        most_spans: steps are left out beyond this many spans; of each case the typical step stays.

    Raises:
        ValueError: the recording has no step.
    """
    cases = [case for case in recording.cases if case.steps]
    if not cases:
        raise ValueError("nothing was recorded: no case has a step")
    steps: list[dict[str, Any]] = []
    first = 0
    for case in cases:
        shown, best = _shown(recording, case, most_spans // len(cases))
        if case is _opened(cases):
            first = len(steps) + shown.index(best)
        case_findings = list((findings or {}).get(case.name, ()))
        steps += _case(recording, case, shown, best, case_findings)
    data = {
        "facts": _facts(recording),
        "first": first,
        "categories": categories(),
        "steps": steps,
    }
    assets = files("megalatent.profiling") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Template(read("page.html")).substitute(
        title=escape(title),
        style=read("page.css"),
        # Nothing in the data may end the element that holds it.
        data=text.replace("<", "\\u003c"),
        script="\n".join(['"use strict";', *map(read, _SCRIPTS)]),
    )


def _opened(cases: Sequence[Case]) -> Case:
    """The case that the page opens with: that with the most passes, which findings are about."""
    return max(cases, key=lambda case: (max(case.plan.passes), sum(case.plan.passes)))


def _length(case: Case, number: int) -> int:
    ranks = case.steps[number].ranks
    return max(rank.end for rank in ranks) - min(rank.start for rank in ranks)


def _shown(recording: Recording, case: Case, most_spans: int) -> tuple[list[int], int]:
    """Numbers of the steps that the page holds, and which of them is the typical one."""
    by_length = sorted(range(len(case.steps)), key=lambda number: _length(case, number))
    best = by_length[(len(by_length) - 1) // 2]
    spans = max(1, max(sum(len(rank.spans) for rank in step.ranks) for step in case.steps))
    room = max(1, most_spans // spans)
    others = [number for number in range(len(case.steps)) if number != best]
    return sorted([best, *others[: room - 1]]), best


def _case(
    recording: Recording,
    case: Case,
    shown: Sequence[int],
    best: int,
    findings: list[str],
) -> list[dict[str, Any]]:
    plan = case.plan
    measured: Measured = measure(recording, [case])
    costs = measured.exact()
    bound = lower_bound(
        plan.stages, plan.chunks, plan.passes, costs, forward_only=plan.forward_only
    )
    planned = Planned(simulate(plan, costs), bound)
    table = stage_table(recording, case, measured)
    found = windows(recording, case)
    replicas = len(found) // len(case.steps)
    left_out = len(case.steps) - len(shown)
    packed = []
    for number in shown:
        step = case.steps[number]
        mine = found[number * replicas : (number + 1) * replicas]
        window = sorted(mine, key=lambda window: window.step)[-1]
        kind = " (typical)" if number == best and len(case.steps) > 1 else ""
        notes = [f"{left_out} more steps of this case are in the recording."] if left_out else []
        packed.append(
            {
                # As Megatron logs it.
                "name": f"{case.name}, iteration {step.iteration + 1}{kind}",
                "tiles": tiles(window, planned, measured),
                "findings": [*findings, *notes],
                "stages": table,
                **pack_step(recording, case, step, planned),
            }
        )
    return packed


def _facts(recording: Recording) -> list[str]:
    """One line about the run."""
    devices = sorted({info.device for info in recording.ranks})
    hosts = len({info.host for info in recording.ranks})
    ranks = len(recording.ranks)
    places = f"{ranks} recorded {'ranks' if ranks > 1 else 'rank'} on {', '.join(devices)}"
    facts = [places + (f", {hosts} hosts" if hosts > 1 else "")]
    for name, text in _FACTS.items():
        value = recording.facts.get(name)
        if value not in (None, ""):
            facts.append(text.format(value))
    return [*facts, recording.created] if recording.created else facts
