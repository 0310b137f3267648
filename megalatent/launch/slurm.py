"""The few Slurm commands that the launcher needs, each with what can go wrong said in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalatent.errors import UserError

__all__ = ["ACTIVE_STATES", "Slurm", "SlurmError", "Step"]

# A job in one of these holds nodes, so it may still write.
ACTIVE_STATES = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"}
)

_COMMAND_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 30.0
_PATIENT_ATTEMPTS = 30
_NOT_REACHED = re.compile("Unable to contact|connect failure", re.I)
# The last one is what scontrol says of a controller that is away.
_NO_ANSWER = re.compile(
    "timed out|Unable to contact|Socket|connect failure|Unexpected message received", re.I
)

# Options whose variable is not SBATCH_ and the option's name.
_VARIABLES = {
    "TIME": "TIMELIMIT", "ARRAY": "ARRAY_INX", "MEM": "MEM_PER_NODE", "REQUEUE": "NO_REQUEUE",
}  # fmt: skip
_FOR_ALL_JOBS = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


class SlurmError(UserError):
    """A Slurm command failed: its name and the first line of what it said."""


@dataclass(frozen=True)
class Step:
    """A running step of a job: `12.1` and the name that srun gave it."""

    id: str
    name: str


class Slurm:
    """Runs Slurm's own commands, found on PATH."""

    def available(self) -> bool:
        return shutil.which("sbatch") is not None

    def submit(self, script: str, options: Sequence[str] = ()) -> str:
        """Hand in the script file; the id of the new job.

        Raises:
            SlurmError: refused, or no answer: then the job may have been taken all the same.
        """
        try:
            environment = _environment_for(Path(script).read_text(encoding="utf-8"))
        except OSError as error:
            raise SlurmError(f"{script}: {error.strerror}") from None
        answer = self._run(
            "sbatch", "--parsable", *options, script, environment=environment, once=True
        )
        numbers = re.findall(r"^(\d+)(?:;\S+)?$", answer, re.MULTILINE)  # beside a site's greetings
        if not numbers:
            raise SlurmError(f"sbatch: {_first_line(answer)!r} is no job number: see squeue --me")
        return str(numbers[-1])

    def test_only(self, script_text: str, options: Sequence[str] = ()) -> str:
        """Ask whether and when the script could start, without submitting it; Slurm's sentence."""
        # sbatch answers on standard error, with exit code 0 when the request is possible
        answer = self._run(
            *("sbatch", "--test-only", *options),
            stdin=script_text,
            environment=_environment_for(script_text),
        )
        return _first_line(answer).removeprefix("sbatch: ")

    def job_state(self, job: str) -> str | None:
        """`RUNNING`, `PENDING`, … ; None for a job that is over and forgotten.

        Of an array, the state of the task that is furthest from its end.

        Raises:
            SlurmError: the controller gave no answer, so nothing is known.
        """
        states = [state for _, state in self._listed(job)]
        alive = [state for state in states if state in ACTIVE_STATES or state == "PENDING"]
        return next(iter([*alive, *states]), None)

    def is_active(self, job: str) -> bool:
        """Whether the job holds nodes, so that it may still write.

        Raises:
            SlurmError: the controller gave no answer, so nothing is known.
        """
        return self.job_state(job) in ACTIVE_STATES

    def task_states(self, job: str) -> dict[str, str]:
        """Id -> state of a job, or of each task of an array, in one question."""
        return dict(self._listed(job, "--array"))

    def _listed(self, job: str, *options: str) -> list[tuple[str, str]]:
        command = ("squeue", "--noheader", "--states=all", *options, f"--jobs={job}", "-o", "%i %T")
        try:
            lines = self._run(*command).splitlines()
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return []
            raise
        words = (line.split() for line in lines)
        return [(found[0], found[1]) for found in words if len(found) == 2]

    def job_field(self, job: str, field: str) -> str | None:
        """One field of `scontrol show job`, such as `Reason` or `NodeList`; None: not known."""
        try:
            answer = self._run("scontrol", "--oneliner", "show", "job", job)
        except SlurmError:
            return None
        # a path may have spaces in it: the value ends where the next name begins
        found = re.search(rf"(?:^| ){field}=(.*?)(?= [A-Z][\w/:]*=|\s*$)", answer, re.MULTILINE)
        return found.group(1) if found else None

    def excluded(self, job: str, more: Sequence[str] = ()) -> list[str]:
        """The nodes that a job must not run on, and `more`."""
        nodes = self.job_field(job, "ExcNodeList")
        already = self.host_names(nodes) if nodes and nodes != "(null)" else []
        return list(dict.fromkeys([*already, *more]))

    def steps(self, job: str) -> list[Step]:
        answer = self._run("squeue", "--noheader", "--steps", f"--jobs={job}", "-o", "%i %j")
        return [Step(*line.split(None, 1)) for line in answer.splitlines() if " " in line.strip()]

    def signal_step(self, job: str, name: str, signal_name: str) -> bool:
        """Send a signal to every process of the job's step `name`; False where it is gone."""
        try:
            ids = [step.id for step in self.steps(job) if step.name.strip() == name]
            for step_id in ids:
                self._run("scancel", f"--signal={signal_name}", step_id)
        except SlurmError:
            return False
        return bool(ids)

    def cancel(self, jobs: Sequence[str]) -> None:
        self._run("scancel", *jobs)

    def requeue(self, job: str) -> None:
        """Patiently: while the controller is away, the job keeps its nodes."""
        self._run("scontrol", "requeue", job, attempts=_PATIENT_ATTEMPTS)

    def exclude(self, job: str, nodes: Sequence[str]) -> None:
        """Keep a pending job off `nodes` too."""
        names = ",".join(self.excluded(job, nodes))
        self._run("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")

    def nodes_left(self, job: str, without: Sequence[str]) -> int | None:
        """How many nodes of its partition a job may run on `without` these; None: not known."""
        partition = self.job_field(job, "Partition")
        if partition is None:
            return None
        listed = ("sinfo", "--noheader", "--Node", "-o", "%N", f"--partition={partition}")
        try:
            return len({*self._run(*listed).split()} - {*self.excluded(job, without)})
        except SlurmError:
            return None

    def delay(self, job: str, seconds: float) -> None:
        """Let a pending job start no sooner than in `seconds`."""
        self._run("scontrol", "update", f"JobId={job}", f"StartTime=now+{max(1, round(seconds))}")

    def host_names(self, node_list: str) -> list[str]:
        """`node[0-2]` -> node0, node1, node2."""
        return self._run("scontrol", "show", "hostnames", node_list).split()

    def _run(
        self,
        *command: str,
        stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
        once: bool = False,
        attempts: int = 3,
    ) -> str:
        # A busy controller times out now and then: that is no reason to lose a run. But what must
        # happen `once` is not tried again where only the answer may be missing.
        for attempt in range(attempts):
            try:
                done = subprocess.run(
                    command,
                    input=stdin,
                    env=environment,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_COMMAND_SECONDS,
                )
            except FileNotFoundError:
                raise SlurmError(
                    f"{command[0]} was not found: run this where Slurm's commands are on PATH"
                ) from None
            except OSError as error:
                raise SlurmError(f"{command[0]}: {error.strerror}") from None
            except subprocess.TimeoutExpired:
                reason = f"no answer within {_COMMAND_SECONDS:.0f} s"
            else:
                if done.returncode == 0:
                    return done.stdout or done.stderr
                reason = _first_line(done.stderr or done.stdout)
                if not _NO_ANSWER.search(reason):
                    raise SlurmError(f"{command[0]}: {reason}")
            if once and not _NOT_REACHED.search(reason):
                raise SlurmError(
                    f"{command[0]}: {reason}: it may have done it all the same, see squeue --me"
                )
            time.sleep(min(1 + attempt, _LONGEST_PAUSE_SECONDS))
        raise SlurmError(f"{command[0]}: {reason}")


def _environment_for(script: str) -> dict[str, str]:
    """The environment for sbatch, in which nothing overrules the script.

    sbatch takes SBATCH_PARTITION and the like before the script's own line. And a job submitted
    from inside another one would inherit what describes that one.
    """
    options = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    names = [name.upper().replace("-", "_") for name in options]
    overruled = {f"SBATCH_{_VARIABLES.get(name, name)}" for name in names}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in overruled and (not name.startswith("SLURM_") or name in _FOR_ALL_JOBS)
    }


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # sbatch says "allocation failure: why" or "sbatch: error: why", sometimes after a note
    errors = [line for line in lines if "error" in line or "failure" in line]
    line = (errors or lines or ["failed without a word"])[-1 if errors else 0]
    return re.sub(r"^\w+: error: ", "", line)
