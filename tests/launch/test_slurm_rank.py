"""What surrounds every rank under Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalatent.launch.slurm_rank import cpus_beside_gpu, set_place
from tests.waiting import HANG, wait_until


def run(tmp_path: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "megalatent.launch.slurm_rank", str(script), "one", "two"],
        env={**os.environ, "MEGALATENT_LOGS": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
    )


SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


def test_the_place_comes_from_slurm(tmp_path: Path) -> None:
    program = "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])"
    done = run(tmp_path, program, **SLURM)
    assert done.stdout == "5 8 ['one', 'two']\n"
    assert done.returncode == 0


def test_ranks_without_a_supervisor_meet_on_the_first_node() -> None:
    """Templates like `profile.sbatch` start ranks and nothing else."""
    job = {"SLURM_JOB_ID": "41", "SLURM_STEP_NODELIST": "gpu[03-04]"}
    environment = {**SLURM, **job}
    set_place(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("gpu03", "20041")
    environment = {**SLURM, **job, "MASTER_ADDR": "fabric03", "MASTER_PORT": "9"}
    set_place(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("fabric03", "9")


def test_torchrun_knows_better() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", **SLURM}
    assert set_place(environment) == 3
    assert environment["WORLD_SIZE"] == "4"


@pytest.mark.parametrize("code", [0, 2, 17])
def test_exit_codes_pass(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, f"import sys\nsys.exit({code})").returncode == code
    assert not list(tmp_path.glob("errors/*"))


def test_a_run_that_megatron_stops_keeps_its_exit_code(tmp_path: Path) -> None:
    """Another job may start again after some of them, and must not after others."""
    program = (
        "from megalatent.training.exits import TrainingStopped\n"
        "raise TrainingStopped('ran the step again', 17)"
    )
    done = run(tmp_path, program, **SLURM)
    assert done.returncode == 17
    assert "Traceback" not in done.stderr
    error = json.loads((tmp_path / "errors" / "rank-5.json").read_text())
    assert error["message"] == "ran the step again"


def test_an_error_is_left_without_secrets(tmp_path: Path) -> None:
    program = "raise ValueError('no access with hunter22')"
    done = run(tmp_path, program, SITE_PASSWORD="hunter22", SLURMD_NODENAME="node3", **SLURM)
    assert done.returncode == 1
    assert "hunter22" not in done.stdout + done.stderr
    error = json.loads((tmp_path / "errors" / "rank-5.json").read_text())
    assert error["host"] == "node3"
    assert error["kind"] == "ValueError"
    assert error["message"] == "no access with <SITE_PASSWORD>"
    assert "program.py" in error["traceback"]


def test_threads_that_never_end_do_not_keep_a_failed_rank(tmp_path: Path) -> None:
    program = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\nraise ValueError('x')"
    )
    assert run(tmp_path, program).returncode == 1


def test_a_signal_dumps_the_stacks_of_a_stuck_rank(tmp_path: Path) -> None:
    script, stuck = tmp_path / "stuck.py", tmp_path / "stuck"
    script.write_text(
        "import pathlib, sys, time\n"
        "def stuck_here():\n    pathlib.Path(sys.argv[1]).touch()\n    time.sleep(3600)\n"
        "stuck_here()\n"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megalatent.launch.slurm_rank",
            str(script),
            str(stuck),
        ],
        env={**os.environ, "MEGALATENT_LOGS": str(tmp_path), **SLURM},
    )
    stacks = tmp_path / "stacks" / "rank-5.txt"
    try:
        wait_until("the rank to be stuck", stuck.exists)
        process.send_signal(signal.SIGUSR2)
        wait_until("its stack", lambda: "in stuck_here" in stacks.read_text())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_restart_inside_the_job_resumes(tmp_path: Path) -> None:
    program = "import sys\nprint(sys.argv[1:])"
    run_folder = {"MEGALATENT_RUN": str(tmp_path), "MEGALATENT_RESUME": "--set 'a=b c'"}
    again = {**run_folder, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert run(tmp_path, program, **again).stdout == "['one', 'two']\n"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert run(tmp_path, program, **again).stdout == "['one', 'two', '--set', 'a=b c']\n"
    # the first time, the supervisor decides
    first = {**run_folder, "TORCHELASTIC_RESTART_COUNT": "0"}
    assert run(tmp_path, program, **first).stdout == "['one', 'two']\n"


def test_cores_beside_a_gpu(tmp_path: Path) -> None:
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    (device / "local_cpulist").write_text("0-2,8,64-65\n")
    assert cpus_beside_gpu("00000000:1B:00.0\n", tmp_path) == {0, 1, 2, 8, 64, 65}
    assert cpus_beside_gpu("00000000:9C:00.0", tmp_path) == set()
