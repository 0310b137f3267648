"""`status`: where a run stands, across all its jobs, from the run folder and from Slurm."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megalatent.errors import UserError
from megalatent.launch import checkpoints
from megalatent.launch.mfu import utilisation
from megalatent.launch.progress import pass_losses, read_metrics
from megalatent.launch.runfolder import RunFolder
from megalatent.launch.slurm import ACTIVE_STATES, Slurm, SlurmError

__all__ = ["add_status_parser", "read_status", "run_status_command", "watch"]

_ENDED = frozenset({"finished", "failed", "cancelled", "stopped", "gone"})
_NO_ANSWER = "UNKNOWN"
_WATCH_SECONDS = 5.0
# For a moment, a job that Slurm starts again is nowhere.
_GONE_SECONDS = 60.0


class Queue:
    """What Slurm says of jobs: one question for an array, and none after one without an answer."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self._known: dict[str, dict[str, str]] = {}
        self._silent = not slurm.available()

    def state(self, job: str) -> str | None:
        """As Slurm writes it, `UNKNOWN` without an answer; None for a job that is forgotten."""
        parent = job.partition("_")[0]
        if parent not in self._known and not self._silent:
            try:
                self._known[parent] = self.slurm.task_states(parent)
            except SlurmError:
                self._silent = True
        return self._known[parent].get(job) if parent in self._known else _NO_ANSWER

    def reason(self, job: str) -> str | None:
        """Why a job waits."""
        return None if self._silent else self.slurm.job_field(job, "Reason")


def add_status_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the command line."""
    parser = subparsers.add_parser(
        "status",
        description="Shows where a run stands: its state across all restarts, iteration, tokens,"
        " loss per pass, speed, last checkpoint, and why it was restarted.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder (megatron.save)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run_status_command(args: argparse.Namespace) -> int:
    """Run `status`; 0 also for a run that failed, which is what it then shows.

    Raises:
        UserError: not a run folder.
    """
    queue = Queue(Slurm())
    folders = _run_folders(args.run)
    found = [read_status(folder, queue) for folder in folders]
    if args.json:
        is_array = folders[0].path != args.run.absolute()
        print(json.dumps({"tasks": found} if is_array else found[0], indent=1))
    else:
        print("\n\n".join(describe(status) for status in found))
    return 0


def _run_folders(path: Path) -> list[RunFolder]:
    folder = RunFolder(path)
    tasks = sorted(path.glob("task-*"), key=lambda task: (len(task.name), task.name))
    if tasks:
        return [RunFolder(task) for task in tasks]
    known = (folder.submission, folder.state_file, folder.metrics)
    if not any(file.exists() for file in known):
        raise UserError(
            f"{path}: not a run folder (no {', '.join(file.name for file in known)}): give the"
            " folder that `megalatent submit` named, or megatron.save"
        )
    return [folder]


def read_status(folder: RunFolder, queue: Queue) -> dict[str, Any]:
    """All that is known of a run; a value that is not known is None."""
    state = folder.read_state()
    submission = folder.read_submission()
    jobs = [*state.jobs, *(job for job in submission.jobs if job not in state.jobs)]
    job, job_state = _current_job(jobs, queue)
    records = read_metrics(folder.metrics)
    last = records[-1] if records else {}
    saved = checkpoints.last_complete(folder.path)
    mark = folder.finished()
    word = _word(state.status, mark is not None, job_state, bool(jobs))
    samples = last.get("consumed_samples")
    length = submission.tokens_per_sample
    return {
        "run": str(folder.path),
        "name": submission.name or folder.path.name,
        "state": word,
        "reason": state.reason or _reason(word, job, job_state, queue),
        "job": job,
        "job_state": job_state,
        "iteration": last.get("iteration"),
        "iterations": submission.target_iterations or last.get("iterations"),
        "samples": samples,
        "tokens": samples * length if samples is not None and length else None,
        "token_equivalent_tokens": last.get("token_equivalent_tokens"),
        "loss_per_pass": {
            # JSON has no NaN and no infinity: as texts, which `float()` reads back
            str(k): loss if math.isfinite(loss) else str(loss)
            for k, loss in pass_losses(last).items()
        },
        "tokens_per_second": last.get("tokens_per_second"),
        "mfu": utilisation(folder, submission, last),
        "last_checkpoint": saved.iteration if saved else None,
        "last_checkpoint_at": _time(saved.path.stat().st_mtime) if saved else None,
        "restarts": max(0, len(state.attempts) - 1),
        "failures_in_a_row": state.failures,
        "excluded_nodes": state.excluded,
        "attempts": [asdict(attempt) for attempt in state.attempts],
    }


def _current_job(jobs: list[str], queue: Queue) -> tuple[str | None, str | None]:
    """The job that runs or waits, else the last one, with Slurm's word for it."""
    state = None
    for job in jobs:
        state = queue.state(job)
        if state in ("PENDING", _NO_ANSWER) or state in ACTIVE_STATES:
            return job, state
    return (jobs[-1] if jobs else None), state


def _word(status: str, finished: bool, job_state: str | None, submitted: bool) -> str:
    if finished:
        return "finished"
    if job_state == "PENDING":
        return "queued"
    if job_state in ACTIVE_STATES:
        return "running" if status != "failed" else status
    if status in _ENDED or job_state == _NO_ANSWER:
        return status
    if not submitted:
        return "local"
    # the supervisor said it runs or waits, but no job is left to do so
    return "cancelled" if job_state == "CANCELLED" else "gone"


def _reason(word: str, job: str | None, job_state: str | None, queue: Queue) -> str:
    if job_state == _NO_ANSWER:
        return "Slurm does not answer: this is what the run folder says"
    if word == "gone":
        return "none of its jobs is in the queue any more: submit it again to go on"
    reason = queue.reason(job) if job and job_state == "PENDING" else None
    return f"Slurm: {reason}" if reason else ""


def describe(status: dict[str, Any]) -> str:
    """The status as text for a terminal."""
    return "\n".join(_lines(status))


def _lines(status: dict[str, Any]) -> Iterator[str]:
    job = f", job {status['job']}" if status["job"] else ""
    yield f"{status['name']}: {status['state']}{job}"
    if status["reason"]:
        yield f"  {status['reason']}"
    yield f"  run folder       {status['run']}"
    if status["iteration"] is not None:
        of = f" of {status['iterations']}" if status["iterations"] else ""
        yield f"  iteration        {status['iteration']}{of}"
    if status["tokens"] is not None:
        yield f"  tokens           {status['tokens']:,}"
    if status["loss_per_pass"]:
        losses = [f"pass {k}: {float(loss):.4f}" for k, loss in status["loss_per_pass"].items()]
        yield f"  loss             {', '.join(losses)}"
    if status["tokens_per_second"]:
        mfu = f", MFU {status['mfu']:.1%}" if status["mfu"] is not None else ""
        yield f"  speed            {status['tokens_per_second']:,.0f} tokens/s{mfu}"
    saved = status["last_checkpoint"]
    at = f" ({status['last_checkpoint_at']})" if saved is not None else ""
    yield f"  last checkpoint  {saved if saved is not None else 'none'}{at}"
    for node, why in status["excluded_nodes"].items():
        yield f"  left out         {node}: {why}"
    yield f"  restarts         {status['restarts']}"
    for attempt in status["attempts"]:
        span = f"{attempt['from_iteration']} -> {_or(attempt['to_iteration'], '…')}"
        why = f"{attempt['outcome']}: {attempt['reason']}" if attempt["ended"] else "running"
        yield (
            f"    {attempt['started']}  job {attempt['job']}.{attempt['restart']}"
            f"  {attempt['nodes']}  checkpoint {span}  {why}"
        )


def _or(value: Any, otherwise: str) -> Any:
    return otherwise if value is None else value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def watch(path: Path, slurm: Slurm) -> int:
    """Follow a run, or the tasks of an array, to the end; 0 where all finished.

    Prints rank 0's log of a single run, and each change of state. Ctrl-C only stops watching.
    """
    offset = 0
    before: dict[str, str] = {}
    alive = time.monotonic()
    try:
        while True:
            folders = _run_folders(path)
            queue = Queue(slurm)
            found = [read_status(folder, queue) for folder in folders]
            if len(folders) == 1:
                offset = _show_new(folders[0].rank0_log, offset)
            for status in found:
                if status["state"] != before.get(status["run"]):
                    before[status["run"]] = status["state"]
                    which = f"{status['name']}: " if len(found) > 1 else ""
                    line = f"megalatent: {which}{status['state']} {status['reason']}"
                    print(line.rstrip(), flush=True)
            words = set(before.values())
            if "gone" not in words:
                alive = time.monotonic()
            if words <= _ENDED and (
                "gone" not in words or time.monotonic() > alive + _GONE_SECONDS
            ):
                print("\n\n".join(describe(status) for status in found))
                return 0 if words == {"finished"} else 1
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; see `megalatent status {path}`")
        return 0


def _show_new(log: Path, offset: int) -> int:
    if not log.exists():
        return offset
    with log.open("rb") as stream:
        stream.seek(offset)
        new = stream.read()
    print(new.decode(errors="replace"), end="", flush=True)
    return offset + len(new)
