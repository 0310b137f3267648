"""What goes into the metrics file is JSON, also when a loss is no number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalatent.launch.progress import pass_losses
from megalatent.training.losses import PassSums
from megalatent.training.metrics import MetricsLog, RunState


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_losses_that_are_not_finite(bad: float, tmp_path: Path) -> None:
    log = MetricsLog(
        folder=tmp_path,
        loss_group=None,
        change_group=[None],
        last_stage=True,
        speaks=True,
        state=RunState(),
    )
    sums = PassSums(loss={1: torch.tensor([bad, 1.0]), 2: torch.tensor([3.0, 2.0])})
    log.evaluation([sums], iteration=7, name="test")
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=_refuse)
    assert record["set"] == "test"
    losses = pass_losses(record)
    assert losses[2] == 1.5
    assert losses[1] == bad or (math.isnan(losses[1]) and math.isnan(bad))


@pytest.mark.parametrize("speaks", [True, False])
def test_steps_between_two_lines_are_told_to_the_supervisor(
    speaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGALATENT_LOGS", str(tmp_path))
    log = MetricsLog(
        folder=None,
        loss_group=None,
        change_group=[None],
        last_stage=True,
        speaks=speaks,
        state=RunState(),
    )
    log.step_begins()
    log.step_ends([1, 2], replicas=1, tokens=8)
    assert (tmp_path / "heartbeat").exists() is speaks
