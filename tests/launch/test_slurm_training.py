"""The real training command on a real Slurm: two nodes, a pipeline across them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalatent.launch.progress import read_metrics
from tests.launch.lab import ROOT, Lab, Run, lab_for_tests, same_training, submit, tiny_config
from tests.waiting import HANG

# Minutes of real jobs: `make test-all` runs them.
pytestmark = [pytest.mark.slurm, pytest.mark.full]

# Fast enough to wait for, with every kind of step: one pass and two.
OPTIONS = {"train_iters": 12, "save_interval": 5, "eval_iters": 1, "eval_interval": 1000}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_for_tests(nodes=4) as started:
        yield started


@pytest.fixture(scope="module")
def trained(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is going on, or waits to be asked to stop."""
    entry = Path(__file__).with_name("paused_training.py")
    return submit(lab, tmp_path_factory.mktemp("trained") / "slurm", entry=entry, **OPTIONS)


def by_hand(lab: Lab, folder: Path, template: str, *arguments: str) -> str:
    """`sbatch` of a template on two nodes with two ranks each; its log."""
    cluster = folder / "cluster.env"
    cluster.write_text(f"MEGALATENT_PYTHON={sys.executable}\nPYTHONPATH={ROOT}\n")
    log = folder / "job.log"
    line = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0"]
    line += ["--cpus-per-task=1", f"--output={log}", str(ROOT / "slurm" / template), *arguments]
    environment = {**lab.environment, "MEGALATENT_CLUSTER_ENV": str(cluster)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=2 * HANG)
    text = log.read_text() if log.exists() else ""
    assert done.returncode == 0, (done.stderr, text[-3000:])
    return text


def test_a_pipeline_across_nodes_trains_as_it_does_without_slurm(
    lab: Lab, trained: Run, tmp_path: Path
) -> None:
    """Interrupted by Slurm's early signal, resumed, and still the same losses at every step."""
    run = trained
    run.wait("the pause", lambda: len(list(run.folder.path.glob("paused-*"))) == 4)
    lab.command("scancel", "--batch", "--signal=USR1", run.jobs[0])

    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "run"
    config = tiny_config(alone.parent, save=str(alone), **OPTIONS)
    line = [sys.executable, "-m", "megalatent.cli", "train", str(config), "--nproc=4"]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=2 * HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = read_metrics(alone / "metrics.jsonl")
    assert len(reference) == OPTIONS["train_iters"]
    assert {len(record["loss_per_pass"]) for record in reference} >= {1, 2}

    run.wait_for_end()
    assert run.state.status == "finished", run.story()
    first, second = run.state.attempts
    assert first.nodes == "node[0-1]"
    assert (first.outcome, first.to_iteration) == ("asked to stop", 2)
    assert second.from_iteration == first.to_iteration
    same_training(run, reference)
    assert "loss pass 1" in (run.folder.logs / first.name / "node-node1.log").read_text()


def test_a_checkpoint_is_evaluated_on_two_nodes(lab: Lab, trained: Run, tmp_path: Path) -> None:
    trained.wait_for_end()
    config = tiny_config(tmp_path, **OPTIONS)
    passes = ["--set", "latent.passes.eval_passes=5"]
    log = by_hand(lab, tmp_path, "evaluate.sbatch", str(config), str(trained.folder.path), *passes)
    # another rank may write between two lines
    rows = re.findall(r"^ +\| +(\d+) \| +([\d.]+) \|", log[log.index("validation by pass") :], re.M)
    assert [int(number) for number, _ in rows[:5]] == [1, 2, 3, 4, 5]
    assert all(float(loss) > 0 for _, loss in rows)


def test_a_pipeline_across_nodes_is_profiled(lab: Lab, tmp_path: Path) -> None:
    """The first node writes what both recorded."""
    config = tiny_config(tmp_path, **OPTIONS)
    out = tmp_path / "out"
    cases = ["--passes", "1,2", "--steps", "2", "--warmup", "1"]
    log = by_hand(lab, tmp_path, "profile.sbatch", str(config), str(out), *cases)
    found = json.loads((out / "profile.json").read_text())
    assert [rank["host"] for rank in found["recording"]["ranks"]] == ["node0", "node1"]
    for case in found["report"]["cases"]:
        assert all(rank["bubble_fraction"] > 0 for rank in case["ranks"])
    assert "2 hosts" in (out / "profile.html").read_text()
    assert {"costs.json", "profile.trace.json"} <= {path.name for path in out.iterdir()}
    assert "bubble" in log
