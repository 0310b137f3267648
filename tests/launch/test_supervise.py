"""The supervisor around a stand-in srun: what it decides, what it asks of Slurm, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalatent.launch.runfolder import Attempt, Owner, RunFolder, RunLock, State
from tests.launch.fake_slurm import FakeSlurm, fake_slurm  # noqa: F401
from tests.launch.lab import STANDIN, tiny_config
from tests.waiting import HANG, wait_until

JOB = "7"


class Supervised:
    """Starts the supervisor as a batch script would, in a run folder of its own."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.slurm = slurm
        self.folder = RunFolder(folder / "run")
        self.folder.path.mkdir()
        self.config = tiny_config(folder, save=str(self.folder.path), train_iters=20)
        self.process: subprocess.Popen[str] | None = None
        slurm.job(JOB, "RUNNING")

    def start(self, *options: str, job: str = JOB, restart: int = 0, **environment: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megalatent.launch.supervise"),
                *(f"--run={self.folder.path}", "--srun=srun", f"--python={sys.executable}"),
                *("--node-check=off", "--target-iterations=20", "--poll-seconds=0.05"),
                *("--back-off-seconds=60", "--resume=--set"),
                *(f"--resume=megatron.load='{self.folder.path}'", *options, "--"),
                *(sys.executable, "-m", "megalatent.launch.slurm_rank", str(STANDIN)),
                *(str(self.config), "--set", f"megatron.save='{self.folder.path}'"),
            ],
            env={
                **os.environ,
                "SLURM_JOB_ID": job,
                "SLURM_RESTART_COUNT": str(restart),
                "SLURM_JOB_NODELIST": "node[0-1]",
                "STANDIN_STEP_SECONDS": "0.02",
                "STANDIN_SAVE_SECONDS": "0",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        said, _ = self.process.communicate(timeout=HANG)
        return self.process.returncode, said

    def run(self, *options: str, **more: Any) -> tuple[int, str]:
        self.start(*options, **more)
        return self.end()

    def start_and_pause(self, *options: str, iteration: int) -> subprocess.Popen[str]:
        """Up to this iteration, where the ranks wait for SIGTERM or the file `go`."""
        self.start(*options, STANDIN_FAULT=f"pause:0:{iteration}")
        assert self.process is not None
        wait_until(f"iteration {iteration}", (self.folder.path / "fault-0").exists)
        return self.process

    @property
    def state(self) -> State:
        return self.folder.read_state()


@pytest.fixture
def supervised(
    tmp_path: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Supervised]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # the stand-ins for GPUs are others
    run = Supervised(tmp_path, fake_slurm)
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.kill()


def test_a_finished_run_is_marked_and_never_started_again(supervised: Supervised) -> None:
    code, said = supervised.run()
    assert code == 0, said
    assert supervised.state.status == "finished"
    assert (supervised.folder.finished() or {})["iteration"] == 20
    assert RunLock(supervised.folder, lambda job: True).holder() is None
    log = supervised.folder.rank0_log.read_text()
    assert "iteration 20 loss" in log
    before = supervised.folder.metrics.read_bytes()
    code, said = supervised.run(job="8")
    assert code == 0
    assert "finished at iteration 20: nothing to do" in said
    assert supervised.folder.metrics.read_bytes() == before
    assert supervised.slurm.calls("scontrol").count("requeue 7") == 0


def test_early_signal_saves_then_requeues(supervised: Supervised) -> None:
    process = supervised.start_and_pause(iteration=5)
    process.send_signal(signal.SIGUSR1)
    code, said = supervised.end()
    assert code == 0, said
    attempt = supervised.state.attempts[0]
    assert attempt.to_iteration == 5
    assert "requeue 7" in supervised.slurm.calls("scontrol")
    # nothing is wrong with the nodes, and nothing failed: no delay, nothing left out
    assert not [call for call in supervised.slurm.calls("scontrol") if "update" in call]
    code, said = supervised.run(restart=1)
    assert code == 0, said
    assert [a.from_iteration for a in supervised.state.attempts] == [0, attempt.to_iteration]


def test_a_failed_rank_is_requeued_later_and_given_up_in_the_end(supervised: Supervised) -> None:
    fault = {"STANDIN_FAULT": "raise:2:3:always"}
    for restart in range(2):
        code, said = supervised.run("--max-requeues=2", restart=restart, **fault)
        assert code == 0, said
        assert supervised.state.failures == restart + 1
    delays = [c for c in supervised.slurm.calls("scontrol") if "StartTime" in c]
    assert delays == ["update JobId=7 StartTime=now+60", "update JobId=7 StartTime=now+120"]
    code, said = supervised.run("--max-requeues=2", restart=2, **fault)
    assert code == 1
    reason = supervised.state.reason
    assert reason == (
        "gave up after starting again 2 times without a new checkpoint: rank 2 on node1: "
        "RuntimeError: the machine is on fire at iteration 3"
    )
    assert supervised.slurm.calls("scontrol").count("requeue 7") == 2
    # a leftover job of a chain does not try again either
    code, said = supervised.run(job="8")
    assert code == 1
    assert "failed and is not started again" in said


def test_failures_with_progress_between_them_do_not_add_up(supervised: Supervised) -> None:
    supervised.run("--max-requeues=1", STANDIN_FAULT="kill:1:12:always")
    assert supervised.state.failures == 1
    # the second attempt fails at the same place, with no newer checkpoint than iteration 10
    code, _ = supervised.run("--max-requeues=1", restart=1, STANDIN_FAULT="kill:1:12:always")
    assert code == 1
    supervised.folder.write_state(
        State(status="waiting", failures=1, failures_at=0, jobs=[JOB], attempts=[])
    )
    code, _ = supervised.run("--max-requeues=1", restart=2, STANDIN_FAULT="kill:1:12:always")
    assert code == 0
    assert supervised.state.failures == 1


def test_a_hang_is_ended_with_stacks(supervised: Supervised) -> None:
    code, said = supervised.run("--hang-minutes=0.1", STANDIN_FAULT="hang:3:5")
    assert code == 0, said
    attempt = supervised.state.attempts[0]
    assert attempt.outcome == "hang"
    assert "after iteration 4" in (attempt.reason or "")
    stacks = supervised.folder.logs / attempt.name / "stacks"
    for rank in range(4):
        assert "in main" in (stacks / f"rank-{rank}.txt").read_text()
    assert "requeue 7" in supervised.slurm.calls("scontrol")


def test_a_run_that_never_begins_is_a_hang_too(supervised: Supervised) -> None:
    code, said = supervised.run("--startup-minutes=0.03", STANDIN_STEP_SECONDS="600")
    assert code == 0, said
    assert "before the first iteration" in (supervised.state.attempts[0].reason or "")


def test_a_bad_loss_keeps_the_last_good_checkpoint(supervised: Supervised) -> None:
    # saved at 10, bad from 15 on, and saved again at 20 before anybody looks
    code, said = supervised.run(
        "--poll-seconds=5", STANDIN_FAULT="nan:0:15", STANDIN_STEP_SECONDS="0"
    )
    assert code == 1, said
    assert supervised.state.status == "failed"
    assert supervised.state.reason == "the loss of pass 1 is not a number at iteration 15"
    assert (supervised.folder.path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert not supervised.slurm.calls("scontrol").count("requeue 7")
    # nor does the run resume from bad weights when a person starts it again
    supervised.folder.write_state(State())
    code, said = supervised.run(job="8")
    assert code == 0, said
    assert supervised.state.attempts[0].from_iteration == 10


def test_a_wrong_config_is_not_tried_again(supervised: Supervised) -> None:
    worker = supervised.folder.path / "wrong.py"
    worker.write_text(
        "import sys\nprint('megalatent: error: megatron.lr: missing', file=sys.stderr)\n"
        "sys.exit(2)\n"
    )
    supervised.config = Path("unused")
    supervised.process = subprocess.Popen(
        [
            *(sys.executable, "-m", "megalatent.launch.supervise", "--node-check=off"),
            *(f"--run={supervised.folder.path}", "--srun=srun", "--", sys.executable, "-m"),
            *("megalatent.launch.slurm_rank", str(worker)),
        ],
        env={**os.environ, "SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "node[0-1]"},
        stdout=subprocess.PIPE,
        text=True,
    )
    code, _ = supervised.end()
    assert code == 1
    assert supervised.state.reason == "megatron.lr: missing"
    assert not supervised.slurm.calls("scontrol").count("requeue 7")


def test_time_limit_without_an_early_signal_requeues_before_slurm_kills(
    supervised: Supervised,
) -> None:
    (supervised.slurm.folder / "reason").write_text("TimeLimit")
    process = supervised.start_and_pause(iteration=13)
    process.send_signal(signal.SIGTERM)
    # Slurm signals the ranks too
    pids = (supervised.slurm.folder / "pids").read_text().split()
    for pid in pids:
        os.kill(int(pid), signal.SIGTERM)
    code, said = supervised.end()
    assert code == 0, said
    attempt = supervised.state.attempts[0]
    assert attempt.outcome == "time limit"
    assert "requeue 7" in supervised.slurm.calls("scontrol")
    # what the ranks saved after that counts
    assert attempt.to_iteration == 13


@pytest.mark.parametrize(
    ("words", "outcome", "status"),
    [
        ("", "cancelled", "cancelled"),
        (" DUE TO JOB REQUEUE", "requeued by Slurm", "waiting"),
        (" DUE TO NODE FAILURE", "requeued by Slurm", "waiting"),
        (" DUE TO PREEMPTION", "preempted", "waiting"),
    ],
)
def test_slurm_says_why_it_ends_a_job(
    supervised: Supervised, words: str, outcome: str, status: str
) -> None:
    process = supervised.start_and_pause(iteration=12)
    (supervised.slurm.folder / "stderr").write_text(
        f"slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2026-01-01T00:00:00{words} ***\n"
    )
    process.send_signal(signal.SIGTERM)
    for pid in (supervised.slurm.folder / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    supervised.end()
    assert supervised.state.attempts[0].outcome == outcome
    assert supervised.state.status == status
    # Slurm has requeued those itself; only a preempted job may need it
    requeues = supervised.slurm.calls("scontrol").count("requeue 7")
    assert requeues == (1 if outcome == "preempted" else 0)


def test_a_run_that_ends_while_it_is_stopped_is_finished(supervised: Supervised) -> None:
    """The script alone is told to end, and the ranks train on."""
    process = supervised.start_and_pause(iteration=12)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    (supervised.folder.path / "go").touch()
    code, said = supervised.end()
    assert code == 0, said
    assert (supervised.folder.finished() or {})["iteration"] == 20
    assert supervised.state.status == "finished"
    assert supervised.state.attempts[0].to_iteration == 20


def test_a_second_run_in_the_folder_refuses(supervised: Supervised) -> None:
    process = supervised.start_and_pause(iteration=2)
    second = Supervised.__new__(Supervised)
    second.__dict__.update(supervised.__dict__)
    code, said = second.run(job="8")
    assert code == 2
    assert f"{supervised.folder.path} is in use by job 7" in said
    assert said.count("\n") == 1
    assert process.poll() is None
    (supervised.folder.path / "go").touch()
    code, said = supervised.end()
    assert code == 0, said


def test_the_lock_of_a_crashed_job_is_taken_over(supervised: Supervised) -> None:
    owner = Owner(job="5", host="elsewhere", pid=1, since="2026-01-01T00:00:00Z")
    (supervised.folder.path / "lock.3").write_text(json.dumps(owner.__dict__))
    supervised.slurm.job("5", "FAILED")
    code, said = supervised.run()
    assert code == 0, said


def test_attempts_that_were_cut_off_count_as_failures(supervised: Supervised) -> None:
    lost = Attempt(JOB, 0, "node[0-1]", "2026-01-01T00:00:00Z", 0)
    supervised.folder.logs.mkdir()
    supervised.folder.write_state(State(status="running", jobs=[JOB], attempts=[lost]))
    code, said = supervised.run("--max-requeues=0", restart=1)
    assert code == 1, said
    assert supervised.state.attempts[0].outcome == "lost"
    assert "node[0-1] went down" in supervised.state.reason


def test_a_half_written_checkpoint_goes_when_the_ranks_have_ended(supervised: Supervised) -> None:
    """On a full disk it leaves no room to write down what happened."""
    code, said = supervised.run("--hang-minutes=0.1", STANDIN_FAULT="half:2:10")
    assert code == 0, said
    assert supervised.state.attempts[0].outcome == "hang"
    assert not (supervised.folder.path / "iter_0000010").exists()


def test_without_a_hang_limit_nothing_is_a_hang(supervised: Supervised) -> None:
    code, said = supervised.run("--hang-minutes=0", "--startup-minutes=0")
    assert code == 0, said
    assert supervised.state.status == "finished"


def test_the_ranks_are_asked_until_they_can_be(supervised: Supervised) -> None:
    """The queue gives no answer just when the time is almost over."""
    process = supervised.start_and_pause("--poll-seconds=0.1", iteration=12)
    pids, away = supervised.slurm.folder / "pids", supervised.slurm.folder / "away"
    pids.rename(away)
    process.send_signal(signal.SIGUSR1)
    log = supervised.folder.rank0_log
    wait_until("the question", lambda: "could not be signalled" in log.read_text())
    away.rename(pids)
    code, said = supervised.end()
    assert code == 0, said
    assert supervised.state.attempts[0].to_iteration == 12
    assert said.count("could not be signalled") == 1


def test_a_path_with_spaces_does_not_hide_why_slurm_ends_a_job(supervised: Supervised) -> None:
    fake = supervised.slurm.folder
    show = fake / "scontrol"
    show.write_text(show.read_text().replace("$F/stderr", "$F/an odd=log 100%/stderr"))
    (fake / "an odd=log 100%").mkdir()
    (fake / "an odd=log 100%" / "stderr").write_text(
        "slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT"
        " ***\n"
    )
    process = supervised.start_and_pause(iteration=3)
    process.send_signal(signal.SIGTERM)
    for pid in (fake / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    code, said = supervised.end()
    assert code == 0, said
    assert supervised.state.attempts[0].outcome == "time limit"


def test_a_bad_node_is_left_out_before_any_step(supervised: Supervised) -> None:
    tool = supervised.slurm.folder / "nvidia-smi"
    tool.write_text(
        "#!/bin/bash\n"
        'count=2; [ "$SLURMD_NODENAME" = node1 ] && count=1\n'
        'for i in $(seq 0 $((count - 1))); do case "$*" in\n'
        '  *memory.used*) echo "$i, 3, 0" ;; *hw_slowdown*) echo "$i, Not Active" ;;\n'
        '  *name*) echo "NVIDIA H100 80GB HBM3" ;; esac; done\n'
    )
    tool.chmod(0o755)
    code, said = supervised.run("--node-check=basic", "--gpus-per-node=2")
    assert code == 0, said
    assert supervised.state.excluded == {"node1": "1 of 2 GPUs visible"}
    calls = supervised.slurm.calls("scontrol")
    assert "requeue 7" in calls
    assert "update JobId=7 ExcNodeList=node1" in calls
    assert supervised.state.attempts[0].outcome == "bad nodes"
    assert not supervised.folder.metrics.exists()


@pytest.mark.parametrize(("nodes", "excluded"), [(2, False), (3, True)])
def test_a_job_is_not_left_without_nodes(
    supervised: Supervised, nodes: int, excluded: bool
) -> None:
    """Slurm lets a job that cannot run anywhere wait for ever."""
    (supervised.slurm.folder / "nodes").write_text("".join(f"node{n}\n" for n in range(nodes)))
    fault = "import os, sys; sys.exit(os.environ['SLURMD_NODENAME'] == 'node1')"
    python = supervised.folder.path / "python"
    python.write_text(f'#!/bin/bash\n{sys.executable} -c "{fault}" && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, said = supervised.run("--node-check=basic", f"--python={python}")
    assert code == 0, said
    assert supervised.state.attempts[0].outcome == "bad nodes"
    assert supervised.state.excluded == ({"node1": "left no result"} if excluded else {})
    assert ("not left out, because 1 others are too few: node1" in said) is not excluded
    assert "requeue 7" in supervised.slurm.calls("scontrol")


def test_nodes_that_the_submission_leaves_out_stay_out(supervised: Supervised) -> None:
    """Slurm puts a new list in place of the old one."""
    (supervised.slurm.folder / "excluded").write_text("node7,node9")
    state = State(status="waiting", jobs=[JOB], excluded={"node3": "1 of 8 GPUs", "node9": "x"})
    supervised.folder.write_state(state)
    code, said = supervised.run(STANDIN_FAULT="kill:1:5")
    assert code == 0, said
    updates = [call for call in supervised.slurm.calls("scontrol") if "ExcNodeList" in call]
    assert updates == ["update JobId=7 ExcNodeList=node7,node9,node3"]


def test_a_fault_of_all_nodes_is_no_reason_to_leave_them_out(supervised: Supervised) -> None:
    code, said = supervised.run("--node-check=basic", "--gpus-per-node=2")
    assert code == 1, said
    assert supervised.state.reason == (
        "all 2 nodes failed the node check: node0: 0 of 2 GPUs visible: nvidia-smi fails"
    )
    assert supervised.state.excluded == {}


def test_where_requeueing_is_forbidden_the_script_is_submitted_again(
    supervised: Supervised,
) -> None:
    supervised.slurm.answer("scontrol", 0, "")
    supervised.folder.script.write_text("#!/bin/bash\n")
    refuse = supervised.slurm.folder / "scontrol"
    refuse.write_text(
        refuse.read_text().replace(
            "case", 'case "$1" in requeue) echo "Requeue is disabled" >&2; exit 1 ;; esac\ncase', 1
        )
    )
    supervised.run("--max-requeues=3", STANDIN_FAULT="kill:1:5")
    assert supervised.slurm.submitted() == [
        f"--parsable --dependency=afterany:7 --begin=now+60 {supervised.folder.script}"
    ]
    assert supervised.state.jobs == ["7", "101"]
    assert supervised.state.status == "waiting"


def test_a_task_is_submitted_again_without_its_sisters(supervised: Supervised) -> None:
    array = supervised.folder.path.parent
    supervised.folder.path.rename(array / "task-3")
    supervised.folder = RunFolder(array / "task-3")
    supervised.config.write_text(supervised.config.read_text().replace("/run\n", "/task-3\n"))
    (array / "job.sbatch").write_text("#!/bin/bash\n")
    refuse = supervised.slurm.folder / "scontrol"
    no = 'case "$1" in requeue) echo "Requeue is disabled" >&2; exit 1 ;; esac\ncase'
    refuse.write_text(refuse.read_text().replace("case", no, 1))
    task = {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": "3"}
    code, said = supervised.run(STANDIN_FAULT="kill:1:5", **task)
    assert code == 0, said
    assert supervised.slurm.submitted() == [
        f"--parsable --dependency=afterany:7_3 --begin=now+60 --array=3 {array}/job.sbatch"
    ]
    assert supervised.state.jobs == ["7_3", "101_3"]


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_a_lost_answer_to_requeueing_does_not_submit_the_run_twice(
    supervised: Supervised, state: str
) -> None:
    script = supervised.slurm.folder / "scontrol"
    said_nothing = f'case "$1" in requeue) echo {state} >"$F/job-7"; exit 143 ;; esac\ncase'
    script.write_text(script.read_text().replace("case", said_nothing, 1))
    code, said = supervised.run(STANDIN_FAULT="kill:1:5")
    assert code == 0, said
    assert supervised.slurm.submitted() == []
    assert supervised.state.status == "waiting"


def test_the_command_that_requeues_survives_the_signal_it_causes(supervised: Supervised) -> None:
    script = supervised.slurm.folder / "scontrol"
    # as Slurm does: everything in the job is terminated, the command itself too
    signals = 'case "$1" in requeue) kill -TERM $$; sleep 0.2; echo done >>"$F/requeued" ;; esac'
    script.write_text(script.read_text().replace("case", f"{signals}\ncase", 1))
    code, said = supervised.run(STANDIN_FAULT="kill:1:5")
    assert code == 0, said
    assert (supervised.slurm.folder / "requeued").read_text() == "done\n"
    # what comes after it still happens
    assert "update JobId=7 StartTime=now+60" in supervised.slurm.calls("scontrol")


def test_a_controller_that_is_away_is_waited_for(supervised: Supervised) -> None:
    script = supervised.slurm.folder / "scontrol"
    away = """case "$1" in requeue) if [ ! -e "$F/asked" ]; then touch "$F/asked"
    echo "Unexpected message received for job 7" >&2; exit 1; fi ;; esac
    case"""
    script.write_text(script.read_text().replace("case", away, 1))
    code, said = supervised.run(STANDIN_FAULT="kill:1:5")
    assert code == 0, said
    assert supervised.slurm.calls("scontrol").count("requeue 7") == 2
    assert supervised.state.status == "waiting"


def test_a_task_of_an_array_requeues_itself_alone(supervised: Supervised) -> None:
    task = {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": "3"}
    code, said = supervised.run(STANDIN_FAULT="kill:1:5", **task)
    assert code == 0, said
    asked = supervised.slurm.calls("scontrol")
    assert "requeue 7_3" in asked
    assert not [call for call in asked if call in ("requeue 7", "update JobId=7 StartTime=now+60")]


def test_without_slurm_it_says_what_is_missing(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-m", "megalatent.launch.supervise", "--run=x", "--srun=srun", "x"],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "SLURM_JOB_ID is not set" in done.stdout
    assert not (tmp_path / "x").exists()
