"""What stands in a run folder, which is the folder that Megatron saves to, and who may work in it.

    RUN/config.yaml      the configuration, overrides included    RUN/job.sbatch   the job script
    RUN/environment.txt  versions at submission                   RUN/state.json   attempts so far
    RUN/iter_0000100/    a checkpoint                             RUN/lock.1       who works here
    RUN/metrics.jsonl    one line per logged iteration            RUN/submitted.json what, when
    RUN/logs/rank0.log   rank 0 of all attempts in one file
    RUN/logs/12.0/       job 12, first start: node logs, node check, stacks, errors
    RUN/finished.json    the run reached its last iteration

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from megalatent.errors import UserError

__all__ = [
    "Attempt",
    "Owner",
    "RunFolder",
    "RunLock",
    "State",
    "Submission",
    "now",
    "write_atomically",
]


def now() -> str:
    """The time in UTC, to the second: `2026-11-30T08:15:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part, also after a crash."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:  # a full disk
        temporary.unlink(missing_ok=True)
        raise


@dataclass
class Attempt:
    """One start of the job on its nodes, from step `from_iteration` on."""

    job: str
    restart: int
    nodes: str
    started: str
    from_iteration: int
    ended: str | None = None
    to_iteration: int | None = None
    outcome: str | None = None
    reason: str | None = None

    @property
    def name(self) -> str:
        return f"{self.job}.{self.restart}"


@dataclass
class State:
    """What the supervisor knows of a run across its jobs. Only it writes this, under the lock.

    Attributes:
        status: submitted, running, waiting (to start again), finished, failed (not started again
            by itself), cancelled, or stopped (time used up, nothing left that continues it).
        reason: one line on why.
        jobs: those that have run, oldest first.
        failures: in a row, without a new checkpoint between them.
        failures_at: the last complete checkpoint at the last of them.
        excluded: node -> why it is left out.
    """

    status: str = "submitted"
    reason: str = ""
    jobs: list[str] = field(default_factory=list)
    failures: int = 0
    failures_at: int = 0
    excluded: dict[str, str] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)


@dataclass
class Submission:
    """What `submit` knows; only it writes this.

    Attributes:
        jobs: ids, a chain in order.
        target_iterations, target_samples: where the run is finished, one of them.
        tokens_per_sample: sequence length.
        flops_per_token: of one pass, forward and backward.
        ranks: GPUs, 0 on CPUs.
    """

    name: str = ""
    jobs: list[str] = field(default_factory=list)
    at: str = ""
    target_iterations: int | None = None
    target_samples: int | None = None
    tokens_per_sample: int | None = None
    flops_per_token: float | None = None
    ranks: int = 0


class RunFolder:
    """Paths of a run folder and its state file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.rank0_log = self.logs / "rank0.log"
        self.finished_mark = self.path / "finished.json"
        self.state_file = self.path / "state.json"
        self.script = self.path / "job.sbatch"
        self.submission = self.path / "submitted.json"
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.txt"

    def attempt_logs(self, attempt: str) -> Path:
        return self.logs / attempt

    def read_state(self) -> State:
        """The state; a fresh one where the file is missing.

        Raises:
            UserError: the file is not readable as a state.
        """
        try:
            raw = json.loads(self.state_file.read_text(encoding="utf-8"))
            attempts = [Attempt(**attempt) for attempt in raw.pop("attempts")]
            return State(**raw, attempts=attempts)
        except FileNotFoundError:
            return State()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.state_file}: not a state file ({error}): move it away to start afresh"
            ) from None

    def write_state(self, state: State) -> None:
        write_atomically(self.state_file, json.dumps(asdict(state), indent=1) + "\n")

    def read_submission(self) -> Submission:
        """What `submit` left; an empty one for a script submitted by hand."""
        try:
            return Submission(**json.loads(self.submission.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return Submission()

    def write_submission(self, submission: Submission) -> None:
        write_atomically(self.submission, json.dumps(asdict(submission), indent=1) + "\n")

    def finished(self) -> dict[str, Any] | None:
        """The mark of a finished run: `{"iteration": …, "at": …}`.

        Raises:
            UserError: the file is not readable as a mark.
        """
        try:
            mark = json.loads(self.finished_mark.read_text(encoding="utf-8"))
            return {"iteration": int(mark["iteration"]), **mark}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.finished_mark}: not the mark of a finished run ({error}): remove it where"
                " the run is not finished"
            ) from None

    def mark_finished(self, iteration: int) -> None:
        write_atomically(
            self.finished_mark, json.dumps({"iteration": iteration, "at": now()}) + "\n"
        )


@dataclass(frozen=True)
class Owner:
    """Who holds a run folder: a Slurm job, or a process where `job` is empty."""

    job: str
    host: str
    pid: int
    since: str
    held: bool = True

    @classmethod
    def this_process(cls, job: str = "") -> Owner:
        return cls(job=job, host=socket.gethostname(), pid=os.getpid(), since=now())

    def is_running(self) -> bool:
        """Whether the process, one of this host, still runs: itself, not a later one of its number.

        In containers each one begins to count anew.
        """
        try:
            started = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        return started < datetime.fromisoformat(self.since).timestamp() + 1

    def __str__(self) -> str:
        who = f"job {self.job}" if self.job else f"process {self.pid}"
        return f"{who} on {self.host} since {self.since}"


class RunLock:
    """At most one run in a folder, also over NFS and after crashes.

    Each holder makes the next of `lock.1`, `lock.2`, …: making a file that must not exist yet is
    what only one of several can do. The newest file always stays, so nobody can act on an old
    picture of the folder; releasing it means to write that down. A lock left by a crash is
    recognised by asking whether its owner still lives: Slurm for a job, the process table for a
    process of this host.
    """

    def __init__(self, folder: RunFolder, job_active: Callable[[str], bool]) -> None:
        """`job_active(job)`: whether that job holds nodes; raises where Slurm does not answer."""
        self._folder = folder.path
        self._job_active = job_active
        self._mine: tuple[int, Owner] | None = None

    def acquire(self, owner: Owner) -> None:
        """Take the lock.

        Raises:
            UserError: somebody else works in the folder, or nobody can tell.
        """
        ready = self._folder / f".lock.{owner.host}.{owner.pid}"
        write_atomically(ready, json.dumps(asdict(owner)))
        try:
            while self._mine is None:
                number, holder = self._newest()
                # the job's own earlier start ended before Slurm started the job again
                if holder is not None and not (owner.job and holder.job == owner.job):
                    self._refuse_if_alive(holder)
                with contextlib.suppress(FileExistsError):
                    os.link(ready, self._path(number + 1))
                    self._mine = number + 1, owner
        finally:
            ready.unlink(missing_ok=True)
        for old in self._numbers():
            if old < self._mine[0]:
                self._path(old).unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back, unless somebody has taken it over."""
        if self._mine is None:
            return
        number, owner = self._mine
        if self._newest() == (number, owner):
            write_atomically(self._path(number), json.dumps(asdict(replace(owner, held=False))))
        self._mine = None

    def holder(self) -> Owner | None:
        """Who holds the lock, alive or not."""
        return self._newest()[1]

    @property
    def file(self) -> Path:
        """Where that is written down."""
        return self._path(self._newest()[0])

    def _refuse_if_alive(self, holder: Owner) -> None:
        if holder.job:
            if self._job_active(holder.job):
                raise UserError(
                    f"{self._folder} is in use by {holder}: wait for it, stop it with 'scancel "
                    f"{holder.job}', or give this run another --name"
                )
            return
        if holder.host != socket.gethostname():
            raise UserError(
                f"{self._folder} is in use by {holder}: if that process is gone, remove {self.file}"
            )
        if holder.is_running():
            raise UserError(f"{self._folder} is in use by {holder}: wait for it or end it")

    def _newest(self) -> tuple[int, Owner | None]:
        """The newest lock's number, 0 for none, and who holds it, None where it was released."""
        while True:
            number = max(self._numbers(), default=0)
            if number == 0:
                return 0, None
            with contextlib.suppress(FileNotFoundError):  # a newer one has come meanwhile
                owner = Owner(**json.loads(self._path(number).read_text(encoding="utf-8")))
                return number, owner if owner.held else None

    def _numbers(self) -> list[int]:
        names = (path.suffix[1:] for path in self._folder.glob("lock.*"))
        return [int(name) for name in names if name.isdigit()]

    def _path(self, number: int) -> Path:
        return self._folder / f"lock.{number}"
