"""The real training command on a real Slurm: two nodes, a pipeline across them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalatent.launch.progress import read_metrics
from tests.launch.lab import Lab, lab_for_tests, same_training, submit, tiny_config

# Minutes of real jobs: `make test-all` runs them.
pytestmark = [pytest.mark.slurm, pytest.mark.full]

# Fast enough to wait for, with every kind of step: one pass and two.
OPTIONS = {"train_iters": 12, "save_interval": 5, "eval_iters": 1, "eval_interval": 1000}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_for_tests(nodes=4) as started:
        yield started


def test_a_pipeline_across_nodes_trains_as_it_does_without_slurm(lab: Lab, tmp_path: Path) -> None:
    """Interrupted by Slurm's early signal, resumed, and still the same losses at every step."""
    run = submit(lab, tmp_path / "slurm", entry=None, **OPTIONS)
    run.wait_for_iteration(2)
    lab.command("scancel", "--batch", "--signal=USR1", run.jobs[0])

    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "run"
    config = tiny_config(alone.parent, save=str(alone), **OPTIONS)
    line = [sys.executable, "-m", "megalatent.cli", "train", str(config), "--nproc=4"]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = read_metrics(alone / "metrics.jsonl")
    assert len(reference) == OPTIONS["train_iters"]
    assert {len(record["loss_per_pass"]) for record in reference} >= {1, 2}

    run.wait_for_end(seconds=600)
    assert run.state.status == "finished", run.story()
    first, second = run.state.attempts
    assert first.nodes == "node[0-1]"
    assert first.outcome == "asked to stop"
    assert second.from_iteration == first.to_iteration
    same_training(run, reference)
    assert "loss pass 1" in (run.folder.logs / first.name / "node-node1.log").read_text()
