"""`megalatent status`: one answer from the run folder and the queue."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalatent import cli
from megalatent.launch.mfu import flops_per_token, peak_flops
from megalatent.launch.runfolder import Attempt, RunFolder, State, Submission
from megalatent.launch.slurm import Slurm
from megalatent.launch.status import watch
from tests.launch.fake_slurm import FakeSlurm, fake_slurm  # noqa: F401
from tests.launch.test_checkpoints import write as write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    first = Attempt("12", 0, "node[0-1]", "2026-01-01T00:00:00Z", 0)
    first.ended, first.to_iteration = "2026-01-01T01:00:00Z", 20
    first.outcome, first.reason = "hang", "no progress for 30 minutes after iteration 25"
    second = Attempt("12", 1, "node[2-3]", "2026-01-01T01:01:00Z", 20)
    run.write_state(
        State("running", jobs=["12"], attempts=[first, second], excluded={"node1": "1 of 8 GPUs"})
    )
    run.write_submission(
        Submission(
            name="fbt", jobs=["12"], target_iterations=100, tokens_per_sample=4096,
            flops_per_token=1e9, ranks=16,
        )
    )  # fmt: skip
    record = {
        "kind": "train", "iteration": 30, "consumed_samples": 240, "passes_per_step": 1.5,
        "loss_per_pass": {"1": 3.25, "2": 3.0}, "tokens_per_second": 1e6,
    }  # fmt: skip
    run.metrics.write_text(json.dumps(record) + "\n")
    write_checkpoint(run.path, 20)
    check = run.logs / "12.1" / "check-basic"
    check.mkdir(parents=True)
    (check / "node2.json").write_text(json.dumps({"gpu": "NVIDIA H100 80GB HBM3", "facts": {}}))
    return run


def status(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict:
    assert cli.main(["status", str(folder.path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_running_run(
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_slurm.job("12", "RUNNING")
    found = status(folder, capsys)
    assert found["state"] == "running"
    assert (found["iteration"], found["iterations"]) == (30, 100)
    assert found["tokens"] == 240 * 4096
    assert found["loss_per_pass"] == {"1": 3.25, "2": 3.0}
    assert found["last_checkpoint"] == 20
    assert found["restarts"] == 1
    assert found["attempts"][0]["reason"].startswith("no progress for 30 minutes")
    # a million tokens a second, 1.5 passes of 1e9 operations each, on 16 GPUs of 0.99e15
    assert found["mfu"] == pytest.approx(1e6 * 1.5 * 1e9 / (16 * 0.99e15))
    assert cli.main(["status", str(folder.path)]) == 0
    text = capsys.readouterr().out
    assert "fbt: running, job 12" in text
    assert "iteration        30 of 100" in text
    assert "pass 1: 3.2500, pass 2: 3.0000" in text
    assert "node1: 1 of 8 GPUs" in text
    assert "hang: no progress for 30 minutes after iteration 25" in text


@pytest.mark.parametrize(
    ("known", "job", "word"),
    [
        ("running", "RUNNING", "running"),
        ("waiting", "PENDING", "queued"),
        ("waiting", "COMPLETING", "running"),
        ("running", "CANCELLED", "cancelled"),
        ("running", None, "gone"),
        ("failed", "FAILED", "failed"),
        ("cancelled", "CANCELLED", "cancelled"),
        ("stopped", "COMPLETED", "stopped"),
        # submitted again after a failure
        ("submitted", "PENDING", "queued"),
    ],
)
def test_state(
    known: str,
    job: str | None,
    word: str,
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = folder.read_state()
    state.status = known
    folder.write_state(state)
    if job:
        fake_slurm.job("12", job)
    assert status(folder, capsys)["state"] == word


def test_a_bad_loss_is_still_json(
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {"kind": "train", "iteration": 31, "loss_per_pass": {"1": "NaN", "2": "Infinity"}}
    with folder.metrics.open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    assert cli.main(["status", str(folder.path), "--json"]) == 0
    text = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert found["loss_per_pass"] == {"1": "nan", "2": "inf"}
    assert cli.main(["status", str(folder.path)]) == 0
    assert "pass 1: nan, pass 2: inf" in capsys.readouterr().out


def test_no_answer_is_not_the_end(
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_slurm.answer("squeue", 1, "squeue: error: Access denied")
    found = status(folder, capsys)
    assert (found["state"], found["job_state"]) == ("running", "UNKNOWN")
    assert "Slurm does not answer" in found["reason"]


def pauses(monkeypatch: pytest.MonkeyPatch, steps: Iterator[Callable[[], object]]) -> None:
    """Do one step in place of each pause of `watch`."""
    fake = SimpleNamespace(sleep=lambda seconds: next(steps)(), monotonic=time.monotonic)
    monkeypatch.setattr("megalatent.launch.status.time", fake)


def test_watching_an_array(
    tmp_path: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tasks = [RunFolder(tmp_path / f"task-{number}") for number in (0, 1)]
    for number, run in enumerate(tasks):
        run.path.mkdir()
        run.write_submission(Submission(name=f"x/{run.path.name}", jobs=[f"12_{number}"]))
    for number in (0, 1):
        fake_slurm.job(f"12_{number}", "RUNNING")
    steps = iter([lambda: tasks[1].mark_finished(5), lambda: tasks[0].mark_finished(5)])
    pauses(monkeypatch, steps)
    assert watch(tmp_path, Slurm()) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        "megalatent: x/task-0: running",
        "megalatent: x/task-1: running",
        "megalatent: x/task-1: finished",
        "megalatent: x/task-0: finished",
    ]
    # one question for all tasks, each time
    assert len(fake_slurm.calls("squeue")) == 3


def test_watching_waits_for_a_job_that_is_nowhere_for_a_moment(
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_slurm.job("12", "NODE_FAIL")
    steps = iter([lambda: fake_slurm.job("12", "PENDING"), lambda: folder.mark_finished(100)])
    pauses(monkeypatch, steps)
    assert watch(folder.path, Slurm()) == 0
    assert "megalatent: queued" in capsys.readouterr().out


def test_a_finished_run_stays_finished(
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder.mark_finished(100)
    fake_slurm.job("12", "RUNNING")  # a leftover of the chain, about to end
    assert status(folder, capsys)["state"] == "finished"


def test_a_run_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    run = RunFolder(tmp_path)
    record = {"kind": "train", "iteration": 5, "iterations": 9, "loss_per_pass": {"1": 2.0}}
    run.metrics.write_text(json.dumps(record) + "\n")
    found = status(run, capsys)
    assert (found["state"], found["iteration"], found["iterations"]) == ("local", 5, 9)
    assert found["mfu"] is None


def test_an_array_shows_each_task(
    folder: RunFolder,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    for task in (2, 10):
        run = RunFolder(folder.path / f"task-{task}")
        run.path.mkdir()
        run.write_state(State("failed", f"reason of {task}"))
    found = status(folder, capsys)
    assert [task["reason"] for task in found["tasks"]] == ["reason of 2", "reason of 10"]


def test_not_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_status_starts_without_torch(folder: RunFolder) -> None:
    import subprocess
    import sys

    line = [sys.executable, "-X", "importtime", "-m", "megalatent.cli", "status", str(folder.path)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " torch" not in done.stderr


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 0.99e15),
        ("NVIDIA H100 PCIe", 0.756e15),
        ("NVIDIA H200", 0.99e15),
        ("NVIDIA H20", 0.148e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA A100-SXM4-80GB", 0.312e15),
        ("Tesla T4", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


@pytest.mark.parametrize(
    ("megatron", "latent"),
    [
        ({}, {}),
        ({"window_size": [255, 0], "window_attn_skip_freq": 4}, {"attention_gate": True}),
        (
            {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 96,
             "moe_layer_freq": "[0,1,1,1]*4", "moe_shared_expert_intermediate_size": 64},
            {},
        ),
        ({"num_experts": 4, "moe_layer_freq": 3}, {}),
    ],
    ids=["plain", "windows and gates", "experts in some layers", "experts of the dense size"],
)  # fmt: skip
def test_flops_agree_with_the_count_of_a_run(
    megatron: dict[str, Any], latent: dict[str, Any]
) -> None:
    """What is known before Megatron has completed its options: the same, within a percent."""
    from megatron.training.training import num_floating_point_operations

    from megalatent.config import Config
    from megalatent.config_megatron import parse
    from megalatent.training.flops import StepFlops
    from tests.launch.test_submit import LARGE

    given: dict[str, Any] = {
        "latent": {"model": latent},
        "megatron": {
            **LARGE, "save": "x", "group_query_attention": True, "num_query_groups": 4, **megatron,
        },
    }  # fmt: skip
    config = Config.from_mapping(given)
    args = parse(config.megatron_argv())
    ours = flops_per_token(args, config.latent)
    # as Megatron completes them
    args.padded_vocab_size = args.vocab_size
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    args.data_parallel_size = 1
    theirs = StepFlops(args, config.latent, num_floating_point_operations).per_token(1)
    assert ours == pytest.approx(theirs, rel=0.01)
