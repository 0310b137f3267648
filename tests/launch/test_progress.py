"""Reading a run's metrics file while it is written, and after crashes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalatent.launch.progress import (
    HEARTBEAT,
    Heartbeat,
    Progress,
    end_last_line,
    pass_losses,
    read_metrics,
)


def line(iteration: int, *losses: float, kind: str = "train") -> str:
    record = {
        "kind": kind,
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "loss_per_pass": {str(k): loss for k, loss in enumerate(losses, 1)},
    }
    return json.dumps(record) + "\n"


def test_what_is_trained_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = [line(i, 1.0) for i in range(1, 6)]
    again = [line(i, 2.0) for i in range(4, 8)]
    path.write_text("".join(first + again))
    records = read_metrics(path)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [pass_losses(record)[1] for record in records] == [1, 1, 1, 2, 2, 2, 2]


def test_what_was_lost_with_a_crash_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 1.0) + line(9, 1.0) + line(2, 2.0))
    assert [record["iteration"] for record in read_metrics(path)] == [1, 2]


def test_evaluations_are_no_iterations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 1.0) + line(1, 5.0, kind="evaluation") + line(2, 2.0))
    assert [pass_losses(record)[1] for record in read_metrics(path)] == [1.0, 2.0]


def test_half_a_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 1.0) + line(2, 1.0)[:20])
    end_last_line(path)
    with path.open("a") as stream:
        stream.write(line(2, 2.0))
    assert [record["iteration"] for record in read_metrics(path)] == [1, 2]
    before = path.read_bytes()
    end_last_line(path)
    assert path.read_bytes() == before


def test_progress_counts_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, math.nan))
    progress = Progress(path)
    progress.poll()
    assert (progress.iteration, progress.bad_loss) == (None, None)
    with path.open("a") as stream:
        stream.write(line(2, 1.0) + line(3, 1.0)[:-5])
        stream.flush()
        progress.poll()
        assert (progress.iteration, progress.samples) == (2, 16)
        stream.write(line(3, 1.0)[-5:])
    progress.poll()
    assert progress.iteration == 3


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    progress.poll()
    (tmp_path / "metrics.jsonl").write_text(line(1, 1.0))
    progress.poll()
    assert progress.iteration == 1
    assert read_metrics(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ((1.0, math.nan), "the loss of pass 2 is not a number at iteration 7"),
        ((math.inf, math.nan), "the loss of pass 1 is infinite at iteration 7"),
    ],
)
def test_the_first_bad_loss_is_kept(tmp_path: Path, losses: tuple, says: str) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = Progress(path)
    path.write_text(line(6, 1.0, 1.0) + line(7, *losses) + line(8, math.nan))
    progress.poll()
    assert str(progress.bad_loss) == says


def test_weights_may_be_bad_since_the_last_good_line(tmp_path: Path) -> None:
    """Where every tenth iteration is logged, a checkpoint between is not trusted."""
    path = tmp_path / "metrics.jsonl"
    progress = Progress(path, start=40)
    path.write_text(line(50, 1.0) + line(60, math.nan))
    progress.poll()
    assert progress.bad_loss is not None
    assert (progress.bad_loss.since, progress.bad_loss.iteration) == (51, 60)
    path.unlink()
    progress = Progress(path, start=40)
    path.write_text(line(50, math.nan))
    progress.poll()
    assert progress.bad_loss is not None
    assert progress.bad_loss.since == 41  # the checkpoint it came from stays


def test_steps_between_two_lines_are_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred long steps may pass between two lines of the metrics."""
    clock = [0.0]
    fake = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("megalatent.launch.progress.time", fake)
    progress = Progress(tmp_path / "metrics.jsonl", tmp_path / HEARTBEAT)
    rank = Heartbeat({"MEGALATENT_LOGS": str(tmp_path)})
    for _ in range(5):
        clock[0] += 100
        assert progress.seconds_still() >= 100
        rank.beat()
        progress.poll()
        assert progress.seconds_still() == 0
    clock[0] += 100
    progress.poll()
    assert progress.seconds_still() == 100


def test_a_heartbeat_is_for_supervisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Heartbeat({}).beat()
    Heartbeat({"MEGALATENT_LOGS": str(tmp_path / "gone")}).beat()
    assert list(tmp_path.iterdir()) == []
