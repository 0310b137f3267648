"""Two profiles side by side: what differs, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megalatent.errors import UserError
from megalatent.profiling.records import read_profile

__all__ = ["Difference", "compare", "print_comparison"]

# A difference is noise below this many times the noise of both measurements together.
_TIMES = 2.0
# What two runs of the same program may differ by, whatever their own spread says.
_FLOOR = 0.01


@dataclass(frozen=True)
class Difference:
    """One figure in both profiles.

    Attributes:
        case: of the figure.
        name: of the figure.
        before, after: seconds, or a share for names that end in "fraction".
        change: relative; of a share the plain difference.
        noise: what the change would have to exceed.
    """

    case: str
    name: str
    before: float
    after: float
    change: float
    noise: float

    @property
    def is_noise(self) -> bool:
        return abs(self.change) <= self.noise


def compare(
    before: str | PathLike[str], after: str | PathLike[str]
) -> tuple[list[Difference], list[str]]:
    """All figures that both profiles have, and remarks on what they do not share.

    Raises:
        UserError: a file is no profile, or they have no case in common.
        OSError: a file cannot be read.
    """
    reports = [read_profile(path)["report"] for path in (before, after)]
    named = [{case["name"]: case for case in report["cases"]} for report in reports]
    common = [name for name in named[0] if name in named[1]]
    if not common:
        raise UserError(
            f"{before} has {', '.join(named[0])} and {after} has {', '.join(named[1])}: profile"
            " the same --passes in both"
        )
    remarks = [
        f"only in {path}: {name}"
        for path, own, other in ((before, *named), (after, *named[::-1]))
        for name in own
        if name not in other
    ]
    remarks += [
        f"{key}: {reports[0]['facts'].get(key)} and {reports[1]['facts'].get(key)}"
        for key in sorted({*reports[0]["facts"], *reports[1]["facts"]})
        if reports[0]["facts"].get(key) != reports[1]["facts"].get(key)
    ]
    found = [d for name in common for d in _case(name, named[0][name], named[1][name])]
    return found, remarks


def _case(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Difference]:
    noise = before["step_noise"] + after["step_noise"]
    for figure in ("step_seconds", "simulated_step_seconds", "reduce_seconds", "optimizer_seconds"):
        yield from _relative(name, figure, before[figure], after[figure], noise)
    shares = before["bubble_fraction"], after["bubble_fraction"]
    yield Difference(
        name, "bubble_fraction", *shares, shares[1] - shares[0], max(_FLOOR, _TIMES * noise)
    )
    for stage, (a, b) in enumerate(zip(before["stages"], after["stages"], strict=False)):
        for one, two in zip(a["passes"], b["passes"], strict=False):
            own = one["noise"] + two["noise"]
            for figure in ("forward_seconds", "backward_seconds", "head_seconds"):
                what = f"stage {stage} pass {one['k']} {figure}"
                yield from _relative(name, what, one[figure], two[figure], own)


def _relative(
    case: str, name: str, before: float, after: float, noise: float
) -> Iterator[Difference]:
    if before:
        limit = max(_FLOOR, _TIMES * noise)
        yield Difference(case, name, before, after, after / before - 1, limit)


def print_comparison(differences: list[Difference], remarks: list[str], console: Console) -> None:
    """All figures; those that changed beyond noise are marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(("passes", "figure", "before", "after", "change", "noise", "")):
        table.add_column(column, justify="left" if index in (0, 1, 6) else "right")
    for own in differences:
        share = own.name.endswith("fraction")
        shown = [f"{v:.1%}" if share else f"{v * 1e3:.4g} ms" for v in (own.before, own.after)]
        worse = "more" if own.change > 0 else "less"
        table.add_row(
            own.case,
            own.name,
            *shown,
            f"{own.change:+.1%}",
            f"{own.noise:.1%}",
            "" if own.is_noise else worse,
        )
    console.print(table)
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False)
    changed = sum(not own.is_noise for own in differences)
    console.print(f"{changed} of {len(differences)} figures changed by more than their noise")
