"""Starts the ranks of one attempt with srun, and watches them until they end or have to be ended.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megalatent.launch import checkpoints
from megalatent.launch.decisions import Cause
from megalatent.launch.failure import bad_loss_in_logs, describe_failure, first_exit_code, redact
from megalatent.launch.progress import HEARTBEAT, BadLoss, Progress
from megalatent.launch.runfolder import RunFolder
from megalatent.launch.slurm import Slurm, SlurmError

__all__ = ["Ended", "Launch", "Ranks", "Signals", "free_port", "is_free", "verbatim", "why_ending"]

# Step name, by which signals reach the ranks and not the batch script.
STEP = "train"
_STACK_SECONDS = 10.0
_END_SECONDS = 90.0
_ASK_AGAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Launch:
    """How to start the ranks: `srun` and `program` are command lines; times in seconds.

    `resume` is added to the program where there is a checkpoint to resume from, of iteration
    `start` (0: none). A `hang_seconds` or `startup_seconds` of 0 waits for ever.
    """

    job: str
    srun: Sequence[str]
    program: Sequence[str]
    resume: Sequence[str]
    start: int
    logs: Path
    first_node: str
    hang_seconds: float
    startup_seconds: float
    poll_seconds: float


@dataclass(frozen=True)
class Ended:
    """Why the ranks ended, or will end at once; `iteration` is the last one logged."""

    cause: Cause
    reason: str
    returncode: int = 0
    iteration: int | None = None
    samples: int | None = None
    bad_loss: BadLoss | None = None


class Signals:
    """What Slurm tells the batch script: SIGUSR1 some time before the end, SIGTERM at the end."""

    def __init__(self) -> None:
        self.stop_soon = False
        self.ending = False
        self._wake = threading.Event()

    def install(self) -> None:
        signal.signal(signal.SIGUSR1, self._receive)
        signal.signal(signal.SIGTERM, self._receive)

    def wait(self, seconds: float) -> None:
        """Sleep, but wake up at a signal."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.stop_soon = True
        else:
            self.ending = True
        self._wake.set()


class Ranks:
    """The ranks of one attempt."""

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        slurm: Slurm,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._folder = folder
        self._slurm = slurm
        self._signals = signals
        self._say = say
        self._progress = Progress(folder.metrics, launch.logs / HEARTBEAT, launch.start)
        self._rank0 = _RankZeroLog(launch.logs / f"node-{launch.first_node}.log", folder.rank0_log)
        self._srun_lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._asked = False
        self._ask_next = 0.0

    def start(self) -> None:
        """Start srun; every rank learns its place from Slurm's variables and from these."""
        launch = self._launch
        (launch.logs / "errors").mkdir(parents=True, exist_ok=True)
        (launch.logs / "stacks").mkdir(exist_ok=True)
        port = str(free_port(launch.job))
        environment = {
            **os.environ,
            "MASTER_ADDR": launch.first_node,
            "MASTER_PORT": port,
            "MEGALATENT_LOGS": str(launch.logs),
            "MEGALATENT_RUN": str(self._folder.path),
            "MEGALATENT_RESUME": shlex.join(launch.resume),
            "PYTHONUNBUFFERED": "1",
        }
        command = [
            *launch.srun,
            f"--job-name={STEP}",
            "--label",
            f"--output={verbatim(launch.logs)}/node-%N.log",
            "--open-mode=append",
            # torchrun wants to be told on its command line
            *(word.replace("{master}", f"{launch.first_node}:{port}") for word in launch.program),
            *(launch.resume if launch.start else ()),
        ]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_srun, daemon=True)
        self._reader.start()

    def watch(self) -> Ended:
        """Until the ranks have ended, or Slurm is about to end them (then they still run)."""
        process = self._running()
        while process.poll() is None:
            self._signals.wait(self._launch.poll_seconds)
            self._rank0.pump()
            self._progress.poll()
            if self._signals.ending:
                return self._ended(*why_ending(self._slurm, self._launch.job))
            if self._signals.stop_soon and time.monotonic() >= self._ask_next:
                self._ask_to_save()
            bad = self._progress.bad_loss
            if bad is not None:
                # KILL: a save now would put the bad weights into a checkpoint
                self._kill()
                return self._ended(Cause.BAD_LOSS, str(bad), bad_loss=bad)
            limit = self._hang_limit()
            if self._still_for(limit):
                reason = f"no progress for {limit / 60:g} minutes {self._where()}"
                return self._ended(Cause.HANG, f"{reason}; {self._end_hung_ranks()}")
        return self._after_exit(process.returncode)

    @property
    def running(self) -> bool:
        return self._running().poll() is None

    def drain(self) -> None:
        """Wait for ranks that Slurm is ending; it kills this process too if they take too long."""
        process = self._running()
        while process.poll() is None:
            self._signals.wait(self._launch.poll_seconds)
            self._rank0.pump()
        self._finish_reading()

    # --- ending ---

    def _ask_to_save(self) -> None:
        first, self._asked = not self._asked, True
        if first:
            self._progress.touch()
            self._say("Slurm ends this job soon: asking the ranks to save and stop")
        if self._slurm.signal_step(self._launch.job, STEP, "TERM"):
            self._ask_next = math.inf
            return
        self._ask_next = time.monotonic() + _ASK_AGAIN_SECONDS
        if first:
            self._say("the ranks could not be signalled: trying again until they can")

    def _kill(self) -> None:
        process = self._running()
        if not self._slurm.signal_step(self._launch.job, STEP, "KILL"):
            process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._finish_reading()

    def _end_hung_ranks(self) -> str:
        """Stacks of all ranks, then the end of them; a half sentence on what was found."""
        folder = self._launch.logs / "stacks"
        self._slurm.signal_step(self._launch.job, STEP, "USR2")
        deadline = time.monotonic() + _STACK_SECONDS
        while _silent_ranks(folder) and time.monotonic() < deadline:
            self._signals.wait(0.2)
        silent = _silent_ranks(folder)
        self._kill()
        if not silent:
            return f"stacks of all ranks are in {folder}"
        return f"no stack from rank {', '.join(map(str, silent))}: stopped or stuck in the kernel"

    def _after_exit(self, returncode: int) -> Ended:
        self._finish_reading()
        self._progress.poll()
        if self._signals.ending:
            return self._ended(*why_ending(self._slurm, self._launch.job), returncode=returncode)
        bad = self._progress.bad_loss
        if bad is None and returncode != 0:
            bad = bad_loss_in_logs(self._launch.logs)
        if bad is not None:
            return self._ended(Cause.BAD_LOSS, str(bad), bad_loss=bad)
        if self._asked:
            # also when a rank was still starting and the signal killed it
            return self._ended(Cause.SIGNAL, "stopped ahead of the time limit", returncode)
        if returncode == 0:
            return self._ended(Cause.EXITED, f"the ranks ended {self._where()}", 0)
        first = describe_failure(self._launch.logs, self._srun_lines, returncode)
        return self._ended(Cause.EXITED, first, first_exit_code(self._srun_lines, returncode))

    # --- progress ---

    def _hang_limit(self) -> float:
        launch = self._launch
        return launch.startup_seconds if self._progress.iteration is None else launch.hang_seconds

    def _still_for(self, limit: float) -> bool:
        if not limit or self._progress.seconds_still() < limit:
            return False
        # a long save is progress too; only now is it worth looking at many files
        if time.time() - checkpoints.latest_activity(self._folder.path) < limit:
            self._progress.touch()
            return False
        return True

    def _where(self) -> str:
        iteration = self._progress.iteration
        return "before the first iteration" if iteration is None else f"after iteration {iteration}"

    def _ended(
        self, cause: Cause, reason: str, returncode: int = 0, bad_loss: BadLoss | None = None
    ) -> Ended:
        progress = self._progress
        return Ended(cause, reason, returncode, progress.iteration, progress.samples, bad_loss)

    # --- output ---

    def _read_srun(self) -> None:
        stream = self._running().stderr
        for line in stream or ():
            self._srun_lines.append(line.rstrip())
            sys.stdout.write(redact(line))
            sys.stdout.flush()

    def _finish_reading(self) -> None:
        # a process that outlives srun may hold the pipe open
        self._reader.join(timeout=5)
        self._rank0.pump()

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "start() comes first"
        return self._process


def why_ending(slurm: Slurm, job: str) -> tuple[Cause, str]:
    """Slurm ends a job with the same SIGTERM whatever the reason; its log line tells them apart."""
    if slurm.job_field(job, "Reason") == "TimeLimit":
        return Cause.TIME_LIMIT, "time limit reached"
    own = os.path.realpath("/proc/self/fd/2")  # into which Slurm writes too
    log = own if os.path.isfile(own) else slurm.job_field(job, "StdErr")
    words = _last_cancel_words(log or "")
    if "TIME LIMIT" in words:
        return Cause.TIME_LIMIT, "time limit reached"
    if "PREEMPTION" in words:
        return Cause.PREEMPTED, "preempted by another job"
    if "NODE FAILURE" in words:
        return Cause.SLURM_REQUEUE, "a node went down"
    if "REQUEUE" in words:
        return Cause.SLURM_REQUEUE, "requeued by scontrol or by preemption"
    return Cause.CANCELLED, "cancelled (scancel)"


class _RankZeroLog:
    """Copies rank 0's lines of a node log, labelled `0: ` by srun, into one log of all attempts."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._target = target
        self._offset = 0
        self._rest = b""

    def pump(self) -> None:
        try:
            with self._source.open("rb") as stream:
                stream.seek(self._offset)
                new = stream.read()
        except OSError:  # not there yet, or a shared file system that does not answer just now
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        mine = [line for line in lines if re.match(rb" *0: ", line)]
        if mine:
            with contextlib.suppress(OSError), self._target.open("ab") as stream:
                stream.writelines(line.lstrip()[3:] + b"\n" for line in mine)


def _silent_ranks(folder: Path) -> list[int]:
    """Ranks whose stack file, which they create when they start, is still empty."""
    empty = [path for path in folder.glob("rank-*.txt") if path.stat().st_size == 0]
    return sorted(int(path.stem.removeprefix("rank-")) for path in empty)


def verbatim(path: Path) -> str:
    """A path for an option of Slurm that gives % a meaning."""
    return str(path).replace("%", "%%")


def free_port(job: str, ports: int = 1) -> int:
    """The first of `ports` on this host, the ranks' master, that other jobs hardly ask for."""
    first = 20000 + (int(re.sub(r"\D", "", job) or 0) * 7) % 10000
    for port in range(first, first + 200):
        if all(is_free(port + more) for more in range(ports)):
            return port
    raise SlurmError(f"ports {first} to {first + 199} of this host are all in use")


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of this host."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _last_cancel_words(log: str) -> str:
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, os.path.getsize(log) - 20000))
            tail = stream.read().decode(errors="replace")
    except OSError:
        return ""
    found = re.findall(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ ?(.*?) ?\*\*\*", tail)
    return found[-1] if found else ""
