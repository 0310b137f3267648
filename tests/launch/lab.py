"""A local Slurm for tests, and runs in it that are followed until they end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent import cli
from megalatent.launch.progress import read_metrics
from megalatent.launch.runfolder import RunFolder, State
from megalatent.launch.slurm import Slurm
from tests.waiting import HANG, reserve_ports, wait_until

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "local_slurm.sh"
STANDIN = Path(__file__).with_name("standin_worker.py")

# One `submit` at a time: Megatron's argument checks are not made for threads.
_SUBMITTING = threading.Lock()


def tiny_config(folder: Path, **megatron: Any) -> Path:
    """A config of a very small model on made-up data, two pipeline stages."""
    options = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 32,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "train_iters": 40,
        "lr": 1e-3,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 128,
        "mock_data": True,
        "pipeline_model_parallel_size": 2,
        "save_interval": 10,
        "log_interval": 1,
        **megatron,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({"latent": {}, "megatron": options}))
    return path


class Lab:
    """A running local Slurm."""

    def __init__(self, folder: Path, nodes: int) -> None:
        port = reserve_ports(nodes + 100)
        self.environment = {
            **os.environ,
            "LOCAL_SLURM_DIR": str(folder),
            "LOCAL_SLURM_NODES": str(nodes),
            "LOCAL_SLURM_PORT": str(port),
            # The ports of a run come from its job's number: runs in another lab have others.
            "LOCAL_SLURM_FIRST_JOB": str(port),
            "LOCAL_SLURM_PREEMPT": "1",
            # A busy machine is no dead node, and saves take their time there.
            "LOCAL_SLURM_NODE_TIMEOUT": "15",
            "LOCAL_SLURM_KILL_WAIT": "15",
            "SLURM_CONF": f"{folder}/etc/slurm.conf",
        }

    def tool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(TOOL), *arguments]
        return subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True, timeout=HANG,
        )  # fmt: skip

    def heal(self) -> None:
        """Boot the nodes that were crashed."""
        for node in self.command("sinfo", "-h", "-N", "-t", "down", "-o", "%N").split():
            self.tool("start-node", node.removeprefix("node"))

    def command(self, *line: str) -> str:
        done = subprocess.run(
            line, env=self.environment, capture_output=True, text=True, timeout=HANG
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout


@contextlib.contextmanager
def lab_for_tests(nodes: int) -> Iterator[Lab]:
    """A local Slurm that this process's commands talk to.

    Skips, with the reason, where this machine cannot run one.
    """
    # sockets have a length limit, so not in pytest's own folder
    folder = Path(tempfile.mkdtemp(prefix="lab", dir="/tmp"))
    folder.rmdir()
    lab = Lab(folder, nodes)
    for action in ("install", "up"):
        done = lab.tool(action)
        if done.returncode == 77:
            pytest.skip(f"no local Slurm: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", lab.environment["SLURM_CONF"])
        yield lab
    lab.tool("down")


@dataclass
class Run:
    """A submitted run."""

    lab: Lab
    folder: RunFolder
    jobs: list[str]

    @property
    def state(self) -> State:
        return self.folder.read_state()

    def wait(self, what: str, until: Callable[[], Any]) -> Any:
        """Poll until `until()` is true; its value."""
        try:
            # All scenarios run side by side: one may well take minutes.
            return wait_until(what, until, 2 * HANG, pause=0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.story()}") from None

    def wait_for_fault(self) -> None:
        """Until the first fault of STANDIN_FAULT has happened.

        The end of the iteration before it is too early: whatever is done to the ranks between
        the two keeps the fault from happening now, and it then happens in a later attempt.
        """
        self.wait("the fault", (self.folder.path / "fault-0").exists)

    def wait_for_end(self) -> State:
        ends = ("finished", "failed", "cancelled", "stopped")
        return self.wait("the end", lambda: self.state.status in ends and self.state)

    def wait_for_jobs(self) -> None:
        """Until none of the run's jobs is in the queue any more."""
        slurm, over = Slurm(), {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", None}
        known = {*self.jobs, *self.state.jobs}
        self.wait("the jobs", lambda: {slurm.job_state(job) for job in known} <= over)

    def nodes(self) -> list[str]:
        """The nodes of the attempt that runs."""
        slurm = Slurm()
        attempt = self.wait("an attempt", lambda: self.state.attempts)[-1]
        return slurm.host_names(attempt.nodes)

    def story(self) -> str:
        """All that could explain a failing test."""
        logs = sorted(self.folder.logs.glob("**/*.log"))
        texts = [f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs]
        queue = subprocess.run(
            ["squeue", "-l"], env=self.lab.environment, capture_output=True, text=True
        )
        return "\n".join([json.dumps(self.state.__dict__, default=str), queue.stdout, *texts])


def submit(
    lab: Lab, folder: Path, *flags: str, entry: Path | None = STANDIN, **megatron: Any
) -> Run:
    """`megalatent submit` of the tiny config, 2 nodes with 2 ranks each, onto the local Slurm."""
    folder.mkdir(parents=True)
    config = tiny_config(folder, save=str(folder / "run"), **megatron)
    defaults = {
        "--nodes": "2",
        "--gpus-per-node": "0",
        "--ranks-per-node": "2",
        "--time": "30",
        "--node-check": "off",
        # a node for itself: other runs are preempted and crashed beside it
        "--sbatch-options": "--exclusive",
        "--back-off-seconds": "1",
        # The repository too: it may have been cloned into a folder that nodes keep to themselves.
        "--shared-paths": f"{folder.parent}:{Path(__file__).parents[2]}",
        **({"--entry": str(entry)} if entry else {}),
    }
    line = ["submit", str(config)]
    for flag, value in defaults.items():
        if flag not in flags:
            line.append(f"{flag}={value}")
    with _SUBMITTING:
        status = cli.main([*line, *flags])
    assert status == 0, (status, line, flags)
    run = RunFolder(folder / "run")
    return Run(lab, run, run.read_submission().jobs)


def standin_alone(folder: Path, ranks: int, **megatron: Any) -> list[dict[str, Any]]:
    """The metrics of the same training without Slurm and without interruption."""
    folder.mkdir(parents=True)
    config = tiny_config(folder, save=str(folder / "run"), **megatron)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserve_ports(1)),
        "STANDIN_STEP_SECONDS": "0",
        "STANDIN_SAVE_SECONDS": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(STANDIN), str(config)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    assert [process.wait(HANG) for process in processes] == [0] * ranks
    return read_metrics(folder / "run" / "metrics.jsonl")


def raw_records(run: Run) -> Iterator[dict[str, Any]]:
    """Every iteration of the metrics file, repeated ones included."""
    for line in run.folder.metrics.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            yield record


def same_training(run: Run, reference: Sequence[dict[str, Any]]) -> None:
    """Every step was trained on the samples of the uninterrupted run, with the same losses."""
    wanted = {record["iteration"]: record for record in reference}
    seen = set()
    for record in raw_records(run):
        expected = wanted[record["iteration"]]
        assert record["consumed_samples"] == expected["consumed_samples"]
        assert record.get("first_sample") == expected.get("first_sample")
        for number, loss in expected["loss_per_pass"].items():
            assert record["loss_per_pass"][number] == pytest.approx(loss, abs=1e-6)
        seen.add(record["iteration"])
    assert seen == set(wanted), run.story()
    assert [record["iteration"] for record in read_metrics(run.folder.metrics)] == sorted(wanted)
