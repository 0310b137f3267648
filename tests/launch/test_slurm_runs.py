"""Whole runs on a real Slurm of several local nodes, through everything that can stop them.

The scenarios run side by side, because they mostly wait: each test then looks at its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from megalatent import cli
from megalatent.launch.runfolder import RunFolder
from megalatent.launch.slurm import Slurm
from tests.launch import lab as laboratory
from tests.launch.lab import Lab, Run, lab_for_tests, same_training, standin_alone, submit

# `make test` runs each scenario once, `make test-all` three times and the slow ones too.
pytestmark = pytest.mark.slurm

_NODES = 40


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_for_tests(_NODES) as started:
        yield started


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return standin_alone(tmp_path_factory.mktemp("alone") / "x", ranks=4)


Scenario = Callable[[Lab, Path], Run]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


@pytest.fixture(
    scope="module", params=["", *(pytest.param(n, marks=pytest.mark.full) for n in "23")]
)
def runs(
    lab: Lab, reference: list[dict], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """All scenarios at once; in the long tests three times, one after another."""
    base = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(len(SCENARIOS)) as threads:
        yield {
            name: threads.submit(function, lab, base / name) for name, function in SCENARIOS.items()
        }
    shutil.rmtree(base, ignore_errors=True)
    lab.heal()


# --- scenarios ---


def pause_at(iteration: int) -> tuple[str, str]:
    """The ranks wait in this iteration, once, until something outside has happened."""
    return "--env", f"STANDIN_FAULT=pause:0:{iteration}"


@scenario
def plain(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder)
    run.wait_for_end()
    return run


@scenario
def early_signal(lab: Lab, folder: Path) -> Run:
    """What Slurm does `--signal-lead` seconds before the time limit, and before preemption."""
    run = submit(lab, folder, *pause_at(13))
    run.wait_for_fault()
    lab.command("scancel", "--batch", "--signal=USR1", run.jobs[0])
    run.wait_for_end()
    return run


@scenario
def requeued(lab: Lab, folder: Path) -> Run:
    """In a folder whose name means something to bash, to Slurm and to YAML."""
    run = submit(lab, folder / "it's 100% odd: $HOME #1 größe", *pause_at(17))
    run.wait_for_fault()
    lab.command("scontrol", "requeue", run.jobs[0])
    run.wait_for_end()
    return run


@scenario
def preempted(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, *pause_at(12))
    run.wait_for_fault()
    nodes = ",".join(run.nodes())
    lab.command(
        "sbatch", "--partition=urgent", f"--nodelist={nodes}", "--nodes=2", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 2",
    )  # fmt: skip
    run.wait_for_end()
    return run


@scenario
def killed_rank(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, "--env", "STANDIN_FAULT=kill:3:16")
    run.wait_for_end()
    return run


@scenario
def stopped_rank(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, "--env", "STANDIN_FAULT=stop:1:16", "--hang-minutes", "0.3")
    run.wait_for_end()
    return run


@scenario
def node_lost_in_step(lab: Lab, folder: Path) -> Run:
    run = submit(
        lab, folder, *pause_at(14), "--node-check=basic", "--node-check-seconds=30",
    )  # fmt: skip
    run.wait_for_fault()
    lab.tool("kill-node", run.nodes()[1].removeprefix("node"))
    run.wait_for_end()
    return run


@scenario
def first_node_lost_in_save(lab: Lab, folder: Path) -> Run:
    """The node of the batch script, with the supervisor on it."""
    run = submit(lab, folder, "--env", "STANDIN_FAULT=half:3:20")
    run.wait_for_fault()
    lab.tool("kill-node", run.nodes()[0].removeprefix("node"))
    run.wait_for_end()
    return run


@scenario
def cancelled(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, *pause_at(12))
    run.wait_for_fault()
    lab.command("scancel", run.jobs[0])
    run.wait_for_end()
    run.wait_for_jobs()
    return run


@scenario
def not_a_number(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, "--env", "STANDIN_FAULT=nan:2:20:always")
    run.wait_for_end()
    run.wait_for_jobs()
    return run


@scenario
def always_failing(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, "--env", "STANDIN_FAULT=raise:2:5:always", "--max-requeues", "1")
    run.wait_for_end()
    run.wait_for_jobs()
    return run


@scenario
def chained(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, *pause_at(12), "--chain", "3")
    run.wait_for_fault()
    lab.command("scancel", "--batch", "--signal=USR1", run.jobs[0])
    run.wait_for_end()
    run.wait_for_jobs()
    return run


@scenario
def chained_with_a_failure(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, "--chain", "2", "--env", "STANDIN_FAULT=kill:0:12")
    run.wait_for_end()
    run.wait_for_jobs()
    return run


@scenario
def array(lab: Lab, folder: Path) -> Run:
    """One run folder per task, each through a failure of its own."""
    run = submit(
        lab, folder, "--array=0-1", "--set", "megatron.seed={task}",
        "--env", "STANDIN_FAULT=kill:1:15",
    )  # fmt: skip
    tasks = [Run(lab, RunFolder(run.folder.path / f"task-{n}"), run.jobs) for n in (0, 1)]
    for task in tasks:
        task.wait_for_end()
    return run


@scenario
def after_another(lab: Lab, folder: Path) -> Run:
    """`--dependency`: starts when the other has ended, with its checkpoint to go on from."""
    first = submit(lab, folder / "first", *pause_at(12))
    second = submit(lab, folder / "second", f"--dependency=afterok:{first.jobs[0]}")
    first.wait_for_fault()
    assert Slurm().job_state(second.jobs[0]) == "PENDING"
    assert second.state.attempts == []
    (first.folder.path / "go").touch()
    second.wait_for_end()
    assert first.state.status == "finished"
    assert (second.state.attempts[0].started) >= (first.state.attempts[0].ended or "")
    return second


@scenario
def twice_in_one_folder(lab: Lab, folder: Path) -> Run:
    run = submit(lab, folder, *pause_at(6))
    run.wait_for_fault()
    again = lab.command("sbatch", "--parsable", str(run.folder.script)).strip()
    run.jobs.append(again)
    run.wait("the second job", lambda: Slurm().job_state(again) == "FAILED")
    (run.folder.path / "go").touch()
    run.wait_for_end()
    return run


@scenario
def bad_node(lab: Lab, folder: Path) -> Run:
    """The first node to be asked has lost a GPU, for as long as the run lasts."""
    folder.mkdir(parents=True)
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        f"""#!/bin/bash
        if mkdir {folder}/claimed 2>/dev/null; then echo $SLURMD_NODENAME >{folder}/bad; fi
        while [ ! -s {folder}/bad ]; do sleep 0.1; done
        gpus="0 1"; if [ "$(cat {folder}/bad)" = "$SLURMD_NODENAME" ]; then gpus=0; fi
        for i in $gpus; do case "$*" in
          *memory.used*) echo "$i, 3, 0" ;; *hw_slowdown*) echo "$i, Not Active" ;;
          *name*) echo "NVIDIA H100 80GB HBM3" ;;
        esac; done
        """
    )
    tool.chmod(0o755)
    run = submit(
        lab, folder / "x", "--gpus-per-node=2", "--node-check=basic",
        f"--env=PATH={tool.parent}:{os.environ['PATH']}",
    )  # fmt: skip
    run.wait_for_end()
    return run


# --- what must hold ---


def attempts(run: Run) -> list[tuple[str | None, int, int | None]]:
    return [(a.outcome, a.from_iteration, a.to_iteration) for a in run.state.attempts]


def test_a_run_without_trouble(runs: dict, reference: list[dict]) -> None:
    run = runs["plain"].result()
    assert attempts(run) == [("exited", 0, 40)]
    assert run.folder.finished()["iteration"] == 40
    same_training(run, reference)


def test_early_signal_saves_and_resumes_at_the_next_sample(runs: dict, reference: list) -> None:
    run = runs["early_signal"].result()
    (outcome, start, saved), second = attempts(run)
    assert (outcome, start) == ("asked to stop", 0)
    assert saved is not None
    assert saved == 13
    assert second == ("exited", saved, 40)
    # nothing is trained twice
    assert len(list(laboratory.raw_records(run))) == 40
    same_training(run, reference)


def test_requeue_by_hand(runs: dict, reference: list) -> None:
    run = runs["requeued"].result()
    first, second = attempts(run)
    assert first[0] == "requeued by Slurm"
    assert second == ("exited", first[2], 40)
    same_training(run, reference)


def test_preemption(runs: dict, reference: list) -> None:
    run = runs["preempted"].result()
    first, *_, last = attempts(run)
    assert first[0] in ("preempted", "requeued by Slurm")
    assert last == ("exited", first[2], 40)
    same_training(run, reference)


def test_a_killed_rank_is_named_and_the_run_goes_on(runs: dict, reference: list) -> None:
    run = runs["killed_rank"].result()
    assert attempts(run) == [("exited", 0, 10), ("exited", 10, 40)]
    assert run.state.attempts[0].reason.startswith("rank 3 on node")
    assert run.state.attempts[0].reason.endswith("Killed")
    same_training(run, reference)


def test_a_hang_leaves_stacks_and_the_run_goes_on(runs: dict, reference: list) -> None:
    run = runs["stopped_rank"].result()
    assert attempts(run) == [("hang", 0, 10), ("exited", 10, 40)]
    first = run.state.attempts[0]
    assert "no progress for 0.3 minutes after iteration 15" in first.reason
    assert "no stack from rank 1: stopped" in first.reason
    stacks = run.folder.logs / first.name / "stacks"
    for rank in (0, 2, 3):
        assert "standin_worker.py" in (stacks / f"rank-{rank}.txt").read_text()
    same_training(run, reference)


def test_a_lost_node_is_left_out(runs: dict, reference: list) -> None:
    run = runs["node_lost_in_step"].result()
    first, last = run.state.attempts[0], run.state.attempts[-1]
    assert (first.from_iteration, first.to_iteration) == (0, 10)
    assert (last.from_iteration, last.to_iteration) == (10, 40)
    lost = run.wait("host names", run.nodes)  # of the last attempt
    assert first.nodes != last.nodes, lost
    same_training(run, reference)


def test_a_half_written_checkpoint_is_never_resumed_from(runs: dict, reference: list) -> None:
    run = runs["first_node_lost_in_save"].result()
    first, second = attempts(run)[:2]
    assert first[:2] == ("lost", 0)
    assert second[1] == 10
    assert "deleted the half-written checkpoint iter_0000020" in run.folder.rank0_log.read_text()
    same_training(run, reference)


def test_scancel_ends_the_run(runs: dict) -> None:
    run = runs["cancelled"].result()
    assert run.state.status == "cancelled"
    assert len(run.state.attempts) == 1
    assert run.folder.finished() is None
    assert run.state.attempts[0].ended


def test_a_loss_that_is_not_a_number_stops_the_run(runs: dict) -> None:
    run = runs["not_a_number"].result()
    assert run.state.status == "failed"
    assert run.state.reason == "the loss of pass 1 is not a number at iteration 20"
    # iteration 20 was saved with bad weights: the last good one is what is left
    assert run.state.attempts[-1].to_iteration == 10
    assert (run.folder.path / "latest_checkpointed_iteration.txt").read_text() == "10"


def test_giving_up_shows_the_first_error(runs: dict) -> None:
    run = runs["always_failing"].result()
    assert run.state.status == "failed"
    assert len(run.state.attempts) == 2
    assert run.state.reason.startswith("gave up after starting again once")
    assert "rank 2 on node" in run.state.reason
    assert run.state.reason.endswith("RuntimeError: the machine is on fire at iteration 5")


def test_a_chain_hands_over_and_its_leftover_does_nothing(runs: dict, reference: list) -> None:
    run = runs["chained"].result()
    first, second = run.state.attempts
    assert [first.job, second.job] == run.jobs[:2]
    assert first.outcome == "asked to stop"
    assert second.to_iteration == 40
    leftover = (run.folder.logs / f"slurm-{run.jobs[2]}.log").read_text()
    assert "the run finished at iteration 40: nothing to do" in leftover
    same_training(run, reference)


def test_a_failure_in_a_chain_is_mended_by_the_same_job(runs: dict, reference: list) -> None:
    run = runs["chained_with_a_failure"].result()
    assert [attempt.job for attempt in run.state.attempts] == [run.jobs[0]] * 2
    assert attempts(run) == [("exited", 0, 10), ("exited", 10, 40)]
    leftover = (run.folder.logs / f"slurm-{run.jobs[1]}.log").read_text()
    assert "finished at iteration 40: nothing to do" in leftover
    same_training(run, reference)


def test_array_tasks_are_runs_of_their_own(runs: dict, reference: list) -> None:
    run = runs["array"].result()
    for number in (0, 1):
        task = Run(run.lab, RunFolder(run.folder.path / f"task-{number}"), run.jobs)
        assert attempts(task) == [("exited", 0, 10), ("exited", 10, 40)]
        same_training(task, reference)
    assert not run.folder.metrics.exists()


def test_a_dependency_is_waited_for(runs: dict, reference: list) -> None:
    same_training(runs["after_another"].result(), reference)


def test_the_second_run_in_a_folder_refuses(runs: dict, reference: list) -> None:
    run = runs["twice_in_one_folder"].result()
    first, second = run.jobs
    said = (run.folder.logs / f"slurm-{second}.log").read_text()
    assert f"is in use by job {first}" in said
    assert said.count("\n") == 1
    assert [attempt.job for attempt in run.state.attempts] == [first]
    same_training(run, reference)


def test_a_bad_node_is_left_out_and_the_run_starts_elsewhere(runs: dict, reference: list) -> None:
    run = runs["bad_node"].result()
    (node,) = run.state.excluded
    assert run.state.excluded[node] == "1 of 2 GPUs visible"
    # more than two where a start was lost to a node that another scenario has crashed
    first, *_, last = run.state.attempts
    assert first.outcome == "bad nodes"
    assert first.reason == f"{node}: 1 of 2 GPUs visible"
    assert node not in run.nodes()
    assert last.to_iteration == 40
    same_training(run, reference)


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--nodes=2", "--gpus-per-node=8"], "to start at"),
        (["--nodes=2", "--gpus-per-node=8", "--exclude=node[0,3]"], "to start at"),
        (["--nodes=2", "--gpus-per-node=9", "--ranks-per-node=8"], "not available"),
        (["--nodes=900"], "not available"),
        (["--nodes=2", "--partition=nowhere"], "Invalid partition"),
    ],
)
def test_what_slurm_thinks_of_a_script(
    lab: Lab,
    flags: list[str],
    answer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = laboratory.tiny_config(tmp_path, global_batch_size=7200)
    line = ["submit", str(config), "--test-only", f"--shared-paths={tmp_path}", *flags]
    status = cli.main([*line, "--set", f"megatron.save={tmp_path / 'run'}"])
    out, err = capsys.readouterr()
    assert answer in out + err
    assert status == (0 if answer == "to start at" else 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_time_limit_that_nobody_announces(lab: Lab, reference: list, tmp_path: Path) -> None:
    """Slurm's real limit of a minute, with no early signal: the ranks save at the very end."""
    run = submit(
        lab, tmp_path / "x", "--time=1", "--signal-lead=1", "--env=STANDIN_STEP_SECONDS=3",
    )  # fmt: skip
    # the signal would be sent, up to a minute too early: the script is told to ignore it
    lab.command("scontrol", "show", "job", run.jobs[0])
    run.wait("the end", run.folder.finished)
    assert len(run.state.attempts) >= 2
    assert {a.outcome for a in run.state.attempts[:-1]} <= {"time limit", "asked to stop"}
    same_training(run, reference)


@pytest.mark.full
def test_torchrun_starts_the_ranks_of_each_node(lab: Lab, reference: list, tmp_path: Path) -> None:
    run = submit(
        lab, tmp_path / "x", "--launcher=torchrun", "--env=STANDIN_FAULT=kill:1:15",
    )  # fmt: skip
    run.wait_for_end()
    assert attempts(run) == [("exited", 0, 10), ("exited", 10, 40)]
    same_training(run, reference)
