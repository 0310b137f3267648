"""Puts the job back into the queue, later and on other nodes where there is a reason to.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from datetime import datetime

from megalatent.launch.runfolder import RunFolder
from megalatent.launch.signals import blocked
from megalatent.launch.slurm import Slurm, SlurmError

__all__ = ["start_again"]


def start_again(
    slurm: Slurm,
    job: str,
    folder: RunFolder,
    excluded: Sequence[str],
    delay_seconds: float,
    say: Callable[[str], None],
) -> str:
    """Requeue the running job, or submit its script anew where the site forbids requeueing.

    Args:
        excluded: nodes to leave out, besides those that the submission leaves out.

    Returns:
        the id of the job that goes on.

    Raises:
        SlurmError: neither was possible.
    """
    # Requeueing sends SIGTERM to every process of the job, also to the command that asks for it.
    with blocked({signal.SIGTERM}):
        try:
            slurm.requeue(job)
        except SlurmError as error:
            # Slurm was quicker, because a node went down, or its answer was lost: a second job
            # would run the same training
            if slurm.job_state(job) not in ("PENDING", "COMPLETING", "REQUEUED"):
                return _submit_again(slurm, job, folder, excluded, delay_seconds, say, error)
        # possible only now that the job is pending again
        try:
            if excluded:
                slurm.exclude(job, excluded)
            if _sooner_than(slurm.job_field(job, "EligibleTime"), delay_seconds):
                slurm.delay(job, delay_seconds)
        except SlurmError as error:
            say(f"the job is requeued, but without its delay and excluded nodes: {error}")
        return job


def _submit_again(
    slurm: Slurm,
    job: str,
    folder: RunFolder,
    excluded: Sequence[str],
    delay_seconds: float,
    say: Callable[[str], None],
    why: SlurmError,
) -> str:
    say(f"Slurm does not requeue this job ({why}): submitting the script again")
    options = [f"--dependency=afterany:{job}"]
    if excluded:
        options.append(f"--exclude={','.join(slurm.excluded(job, excluded))}")
    if delay_seconds > 0:
        options.append(f"--begin=now+{round(delay_seconds)}")
    _, of_array, task = job.partition("_")
    if not of_array:
        return slurm.submit(str(folder.script), options)
    # the array has one script, which would start all its tasks
    script = folder.path.parent / folder.script.name
    return f"{slurm.submit(str(script), [*options, f'--array={task}'])}_{task}"


def _sooner_than(eligible: str | None, delay_seconds: float) -> bool:
    """Whether Slurm would start the job before the delay is over (its own delay must stand)."""
    try:
        at = datetime.fromisoformat(eligible or "")
    except ValueError:
        return delay_seconds > 0
    return (at - datetime.now()).total_seconds() < delay_seconds
