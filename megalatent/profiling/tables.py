"""A profile in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from megalatent.profiling.advice import Advice
from megalatent.profiling.diagnose import Finding
from megalatent.profiling.report import CaseReport, Report
from megalatent.profiling.units import bytes_text, share_text, time_text

__all__ = ["print_profile", "wide_console"]

_MOST_RANKS = 16
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "update"}


def wide_console(stream: IO[str]) -> Console:
    """Wider than any table: figures that are cut off would be of no use; terminals wrap lines."""
    # Only if height is given too, rich asks no terminal.
    return Console(file=stream, width=1000, height=100, highlight=False)


def print_profile(
    report: Report, findings: Sequence[Finding], advice: Advice, stream: IO[str]
) -> None:
    """Steps, stages, ranks, findings and advice."""
    console = wide_console(stream)
    console.print(_steps(report.cases))
    # The case with the most passes has all of them; the others are in the JSON file.
    deepest = max(report.cases, key=lambda case: (max(case.passes), sum(case.passes)))
    console.print(_stages(deepest))
    console.print(_ranks(deepest))
    if deepest.links:
        console.print(f"hand-overs, {deepest.name}: {_links(deepest)}", soft_wrap=True)
    for finding in findings:
        console.print(f"[bold]{finding.kind}:[/bold] {finding.text}", soft_wrap=True)
    if not findings:
        console.print("no stage, link or pass stands out")
    console.print(_advice(advice))
    best = next(option for option in advice.options if not option.changes_batch)
    if best.overrides:
        console.print(
            f"the best with this batch ({best.name}): {best.arguments}",
            soft_wrap=True,
            markup=False,
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table


def _steps(cases: Sequence[CaseReport]) -> Table:
    mfu = any(case.mfu is not None for case in cases)
    table = _table(
        "steps",
        "passes",
        "step",
        "±",
        "simulated",
        "bound",
        "over 1",
        "bubble",
        "simulated",
        "bound",
        "tokens/s",
        "equivalent",
        *(["MFU"] if mfu else []),
    )
    for case in cases:
        table.add_row(
            case.name,
            _time(case.step_seconds),
            share_text(case.step_noise),
            _time(case.simulated_step_seconds),
            _time(case.lower_bound_seconds),
            _more(case.over_one_pass),
            share_text(case.bubble_fraction),
            share_text(case.simulated_bubble_fraction),
            share_text(case.lower_bound_bubble_fraction),
            f"{case.tokens_per_second:,.0f}",
            f"{case.token_equivalent_tokens_per_second:,.0f}",
            *(["" if case.mfu is None else f"{case.mfu:.1%}"] if mfu else []),
        )
    return table


def _stages(case: CaseReport) -> Table:
    table = _table(
        f"stages, {case.name}: of one micro-batch; each pass, and what it takes over pass 1",
        "stage",
        "pass",
        "forward",
        "backward",
        "over 1",
        "head",
        "embedding",
        "fusion",
        "kept",
        "over 1",
        "in a step",
    )
    for stage in case.stages:
        for own in stage.passes:
            first = own.k == 1
            embedding = stage.embedding_seconds + stage.embedding_backward_seconds
            mark = " slowest" if stage.stage == case.slowest_stage and len(case.stages) > 1 else ""
            table.add_row(
                f"{stage.stage}{mark}" if first else "",
                str(own.k),
                _time(own.forward_seconds),
                _time(own.backward_seconds),
                "" if first else _more(own.overhead_over_pass_1),
                _time(own.head_seconds),
                _time(embedding) if first else "",
                _time(own.fusion_seconds + own.fusion_backward_seconds),
                "" if own.activation_bytes is None else bytes_text(own.activation_bytes),
                _more(own.activation_overhead_over_pass_1) if not first else "",
                _time(stage.work_seconds) if first else "",
            )
    if len(case.stages) > 1:
        more = share_text(case.imbalance)
        table.caption = f"imbalance: the slowest stage has {more} more than the mean"
        table.caption_justify = "left"
    return table


def _ranks(case: CaseReport) -> Table:
    parts = list(case.ranks[0].parts)
    decimals = _decimals(max(rank.step_seconds for rank in case.ranks) * 1e3)
    memory = any(rank.allocated_peak_bytes is not None for rank in case.ranks)
    table = _table(
        f"ranks, {case.name}: where a step goes, in ms; held: most activations",
        "rank",
        "stage",
        "step",
        *(_SHORT.get(part, part) for part in parts),
        "bubble",
        "held",
        *(["memory"] if memory else []),
    )
    for rank in case.ranks[:_MOST_RANKS]:
        peak = rank.allocated_peak_bytes
        table.add_row(
            str(rank.rank),
            str(rank.stage),
            f"{rank.step_seconds * 1e3:.{decimals}f}",
            *(f"{rank.parts[part] * 1e3:.{decimals}f}" for part in parts),
            share_text(rank.bubble_fraction),
            str(rank.in_flight),
            *(["" if peak is None else bytes_text(peak)] if memory else []),
        )
    if len(case.ranks) > _MOST_RANKS:
        table.caption = f"and {len(case.ranks) - _MOST_RANKS} more, in the JSON file"
    return table


def _links(case: CaseReport) -> str:
    shown = []
    for link in case.links:
        ways = [
            "never waited for" if seconds is None else _time(seconds)
            for seconds in (link.forward_seconds, link.backward_seconds)
        ]
        both = ways[0] if ways[0] == ways[1] else f"{ways[0]} and back {ways[1]}"
        shown.append(f"{link.source}→{link.target} {both}")
    return "; ".join(shown)


def _advice(advice: Advice) -> Table:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in advice.weights.items())
    table = _table(
        f"settings, best first ({shares})",
        "setting",
        "step",
        "tokens/s",
        "gain",
        "held",
        "activations",
        "memory",
    )
    for option in advice.options:
        table.add_row(
            option.name + (" (another batch)" if option.changes_batch else ""),
            _time(option.predicted_step_seconds),
            f"{option.tokens_per_second:,.0f}",
            _more(option.gain) if option.overrides else "",
            str(option.peak_in_flight),
            "" if option.activation_bytes is None else bytes_text(option.activation_bytes),
            "" if option.predicted_peak_bytes is None else bytes_text(option.predicted_peak_bytes),
        )
    return table


def _more(value: float | None) -> str:
    return "" if value is None else share_text(value, signed=True)


def _decimals(value: float) -> int:
    """Digits after the point with which a value has four digits."""
    return min(6, max(0, 3 - math.floor(math.log10(value)))) if value > 0 else 0


def _time(seconds: float) -> str:
    return time_text(seconds) if seconds else ""
