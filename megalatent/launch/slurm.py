"""The few Slurm commands that the launcher needs, each with what can go wrong said in one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megalatent.errors import UserError

__all__ = ["ACTIVE_STATES", "Slurm", "SlurmError", "Step"]

# A job in one of these holds nodes, so it may still write.
ACTIVE_STATES = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"}
)

_COMMAND_SECONDS = 60.0


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
        """Hand in the script file; the id of the new job."""
        answer = self._run("sbatch", "--parsable", *options, script)
        return answer.strip().splitlines()[-1].split(";")[0]

    def test_only(self, script_text: str, options: Sequence[str] = ()) -> str:
        """Ask whether and when the script could start, without submitting it; Slurm's sentence."""
        # sbatch answers on standard error, with exit code 0 when the request is possible
        answer = self._run("sbatch", "--test-only", *options, stdin=script_text)
        return _first_line(answer).removeprefix("sbatch: ")

    def job_state(self, job: str) -> str | None:
        """`RUNNING`, `PENDING`, … ; None for a job that is over and forgotten.

        Raises:
            SlurmError: the controller gave no answer, so nothing is known.
        """
        try:
            answer = self._run("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T")
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return None
            raise
        lines = answer.split()
        return lines[0] if lines else None

    def job_field(self, job: str, field: str) -> str | None:
        """One field of `scontrol show job`, such as `Reason` or `NodeList`."""
        try:
            answer = self._run("scontrol", "--oneliner", "show", "job", job)
        except SlurmError:
            return None
        found = re.search(rf"(?:^| ){field}=(\S*)", answer)
        return found.group(1) if found else None

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
        self._run("scontrol", "requeue", job)

    def exclude(self, job: str, nodes: Sequence[str]) -> None:
        """Keep a pending job off `nodes`, in place of the nodes excluded until now."""
        self._run("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}")

    def delay(self, job: str, seconds: float) -> None:
        """Let a pending job start no sooner than in `seconds`."""
        self._run("scontrol", "update", f"JobId={job}", f"StartTime=now+{max(1, round(seconds))}")

    def host_names(self, node_list: str) -> list[str]:
        """`node[0-2]` -> node0, node1, node2."""
        return self._run("scontrol", "show", "hostnames", node_list).split()

    def _run(self, *command: str, stdin: str | None = None) -> str:
        # A busy controller times out now and then: that is no reason to lose a run.
        for attempt in range(3):
            try:
                done = subprocess.run(
                    command, input=stdin, capture_output=True, text=True, timeout=_COMMAND_SECONDS
                )
            except FileNotFoundError:
                raise SlurmError(
                    f"{command[0]} was not found: run this where Slurm's commands are on PATH"
                ) from None
            except subprocess.TimeoutExpired:
                reason = f"no answer within {_COMMAND_SECONDS:.0f} s"
            else:
                if done.returncode == 0:
                    return done.stdout or done.stderr
                reason = _first_line(done.stderr or done.stdout)
                if not re.search(
                    "timed out|Unable to contact|Socket|connect failure", reason, re.I
                ):
                    break
            time.sleep(1 + attempt)
        raise SlurmError(f"{command[0]}: {reason}")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # sbatch says "allocation failure: why" or "sbatch: error: why", sometimes after a note
    errors = [line for line in lines if "error" in line or "failure" in line]
    line = (errors or lines or ["failed without a word"])[-1 if errors else 0]
    return re.sub(r"^\w+: error: ", "", line)
