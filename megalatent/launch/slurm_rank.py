"""What every rank runs under Slurm: its place, limits, cores and last words, then the program.

    srun … python -m megalatent.launch.slurm_rank train CONFIG [options]
    srun … python -m megalatent.launch.slurm_rank my_training.py CONFIG [options]

The supervisor sets `MEGALATENT_LOGS`: errors go to its `errors/`, and SIGUSR2 writes the stacks of
all threads into `stacks/`, whatever the rank is waiting for. Imports neither torch nor Megatron;
the program does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from megalatent.launch.failure import RankError, redact, write_rank_error
from megalatent.launch.placement import meeting_point
from megalatent.training.exits import TrainingStopped

__all__ = ["cpus_beside_gpu", "main", "set_place"]


def main(argv: Sequence[str]) -> int:
    """Run `megalatent ARGV…`, or the script that `argv` begins with, as one rank; its exit code."""
    rank = set_place(os.environ)
    _raise_limits()
    if os.environ.get("MEGALATENT_BIND") == "numa":
        _bind(int(os.environ.get("LOCAL_RANK", "0")))
    logs = Path(os.environ.get("MEGALATENT_LOGS") or ".").absolute()
    if "MEGALATENT_LOGS" in os.environ:
        _dump_stacks_on_signal(logs / "stacks", rank)
    status = 1
    try:
        return _run([*argv, *_resume(os.environ)])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        message, kind, trace = str(end.code), "SystemExit", ""
    except TrainingStopped as stop:
        status, message, kind, trace = stop.status, str(stop), "stopped", ""
    except BaseException as error:
        message, kind, trace = str(error), type(error).__name__, traceback.format_exc()
    sys.stderr.write(redact(trace or message + "\n"))
    if "MEGALATENT_LOGS" in os.environ:
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        write_rank_error(logs / "errors", RankError(rank, host, time.time(), kind, message, trace))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a broken process group would keep the process alive


def set_place(environment: MutableMapping[str, str]) -> int:
    """Fill in this rank's place, and where ranks meet, from Slurm where torchrun has not; the rank.

    Raises:
        UserError: Slurm's variables make no sense.
    """
    for name, source, default in (
        ("RANK", "SLURM_PROCID", "0"),
        ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")),
        ("LOCAL_RANK", "SLURM_LOCALID", "0"),
    ):
        environment.setdefault(name, environment.get(source, default))
    if "SLURM_JOB_ID" in environment:
        environment.update(meeting_point(environment))
    return int(environment["RANK"])


def cpus_beside_gpu(bus_id: str, sysfs: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores on the same socket as a GPU.

    Args:
        bus_id: as nvidia-smi writes it, `00000000:1B:00.0`.

    Returns:
        core numbers; empty where the machine does not say.
    """
    domain, rest = bus_id.strip().lower().split(":", 1)
    try:
        text = (sysfs / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _resume(environment: Mapping[str, str]) -> list[str]:
    """What is added where torchrun starts the ranks again inside the job, after a checkpoint.

    The supervisor adds the same when the job itself starts again.
    """
    run = Path(environment.get("MEGALATENT_RUN", ""))
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not run.name:
        return []
    saved = (run / "latest_checkpointed_iteration.txt").exists()
    return shlex.split(environment["MEGALATENT_RESUME"]) if saved else []


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0].endswith(".py"):
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")
        return 0
    from megalatent.cli import main as megalatent

    return megalatent(argv)


def _raise_limits() -> None:
    """All the locked memory (InfiniBand) and open files that the node allows; no core files."""
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_STACK):
        _, hard = resource.getrlimit(what)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _bind(local_rank: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpu = visible[local_rank] if local_rank < len(visible) and visible[0] else str(local_rank)
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader", f"--id={gpu}"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return
    if found.returncode == 0 and ":" in found.stdout:
        allowed = cpus_beside_gpu(found.stdout) & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)


def _dump_stacks_on_signal(folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # stays open until the process ends: the handler must not open files
    stream = (folder / f"rank-{rank}.txt").open("w")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
