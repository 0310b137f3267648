"""The contraction study's table and plot, from what the trainings wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Training", "draw", "markdown", "read_training"]


@dataclass(frozen=True)
class Training:
    """What one training came to.

    Attributes:
        label: its mixture.
        finished: trained to the end and evaluated.
        losses: k -> validation loss with k passes.
        changes: k -> mean over positions of |h_k - h_(k-1)| / |h_k|, k >= 2.
        curve: (iteration, training loss of pass 1) of each logged interval.
        counts: K -> steps trained with K passes.
    """

    label: str
    finished: bool = False
    losses: dict[int, float] = field(default_factory=dict)
    changes: dict[int, float] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)


def read_training(folder: Path, label: str) -> Training:
    """Read a training's `metrics.jsonl`; one that has not begun is unfinished and empty."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return Training(label)
    # A stopped run may have left half a line, and steps that were repeated after it: the last
    # record of an iteration is the one that counts.
    steps: dict[int, dict[str, Any]] = {}
    evaluation: dict[str, Any] | None = None
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        record = json.loads(line)
        if record["kind"] == "train":
            steps[record["iteration"]] = record
            evaluation = None
        elif record.get("set", "validation") == "validation":
            evaluation = record
    if not steps:
        return Training(label)
    last = steps[max(steps)]
    done = last["iteration"] == last["iterations"] and evaluation is not None
    return Training(
        label,
        finished=done,
        losses=_by_pass(evaluation["loss_per_pass"]) if evaluation and done else {},
        changes=_by_pass(evaluation["state_change"]) if evaluation and done else {},
        curve=[(i, steps[i]["loss_per_pass"]["1"]) for i in sorted(steps)],
        counts={int(k): int(n) for k, n in last["pass_counts"].items()},
    )


def _by_pass(values: dict[str, float]) -> dict[int, float]:
    return {int(k): value for k, value in values.items()}


def markdown(trainings: Sequence[Training]) -> str:
    """Loss and state change by k, two columns a training, `-` where there is nothing to say."""
    head = ["k"]
    for training in trainings:
        head.append(f"loss, {training.label}")
        if training.changes:
            head.append(f"change, {training.label}")
    rows = [head, ["---:"] * len(head)]
    for k in sorted({k for training in trainings for k in training.losses}):
        row = [str(k)]
        for training in trainings:
            row.append(_cell(training.losses.get(k), ".4f"))
            if training.changes:
                row.append(_cell(training.changes.get(k), ".2e"))
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(trainings: Sequence[Training], path: Path) -> None:
    """Training loss, and validation loss and state change by number of passes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, loss, change) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for i, training in enumerate(trainings):
        style: dict[str, Any] = {"label": training.label, "color": f"C{i}"}
        if training.curve:
            curve.plot(*zip(*training.curve, strict=True), linewidth=0.8, **style)
        if len(training.losses) > 1:
            loss.plot(*zip(*training.losses.items(), strict=True), marker=".", **style)
        else:
            for value in training.losses.values():
                loss.axhline(value, linestyle="--", **style)
        if training.changes:
            change.plot(*zip(*training.changes.items(), strict=True), marker=".", **style)
    curve.set(xlabel="iteration", ylabel="loss of pass 1", title="training")
    loss.set(xlabel="passes k", ylabel="loss", title="validation loss after k passes")
    change.set(xlabel="passes k", title="state change", yscale="log")
    change.set_ylabel(r"$|h^{(k)} - h^{(k-1)}| \,/\, |h^{(k)}|$")
    for axes in (curve, loss):
        axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)
