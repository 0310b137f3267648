"""Which checkpoints of a run are whole, read from the files alone.

Megatron writes a checkpoint's shards first, then `.metadata`, then `metadata.json`, then the
number into `latest_checkpointed_iteration.txt`. A crash can stop it anywhere, even inside that
last file, and Megatron reads an empty tracker file as "exit without an error".

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megalatent.launch.runfolder import write_atomically

__all__ = ["Checkpoint", "checkpoints", "last_complete", "latest_activity", "repair"]

_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Checkpoint:
    """A folder `iter_0000100`; `complete` once nothing is left to write into it."""

    iteration: int
    path: Path
    complete: bool


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in Megatron's save folder, oldest first."""
    found = []
    for path in folder.glob("iter_*"):
        number = re.fullmatch(r"iter_(\d{7,})", path.name)
        if number and path.is_dir():
            iteration = int(number.group(1))
            found.append(Checkpoint(iteration, path, _is_complete(path, iteration, folder)))
    return sorted(found, key=lambda checkpoint: checkpoint.iteration)


def last_complete(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint."""
    whole = [checkpoint for checkpoint in checkpoints(folder) if checkpoint.complete]
    return whole[-1] if whole else None


def repair(folder: Path, before: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Make Megatron resume from the last complete checkpoint (of an iteration below `before`).

    Deletes half-written checkpoints, which nothing can load, renames those from `before` on, whose
    weights are bad, to `bad_iter_…`, and rewrites the tracker file where it says something else.
    Call it only while no rank runs.

    Returns:
        the checkpoint to resume from, None to start at step 0; and what was done, a line each.
    """
    done = []
    for checkpoint in checkpoints(folder):
        if not checkpoint.complete:
            shutil.rmtree(checkpoint.path)
            done.append(f"deleted the half-written checkpoint {checkpoint.path.name}")
        elif before is not None and checkpoint.iteration >= before:
            done.append(f"set {checkpoint.path.name} aside as {_set_aside(checkpoint.path).name}")
    newest = last_complete(folder)
    tracker = folder / _TRACKER
    if newest is not None and _tracked(folder) != newest.iteration:
        write_atomically(tracker, str(newest.iteration))
        done.append(f"pointed {_TRACKER} at iteration {newest.iteration}")
    elif newest is None and tracker.exists() and _tracked(folder) != "release":
        tracker.unlink()
        done.append(f"removed {_TRACKER}: no checkpoint is complete")
    return newest, done


def _set_aside(path: Path) -> Path:
    """Under a name that nothing resumes from, also when the run is started again."""
    target = path.with_name(f"bad_{path.name}")
    shutil.rmtree(target, ignore_errors=True)  # of an earlier time that ended in the same way
    return path.rename(target)


def latest_activity(folder: Path) -> float:
    """When a file of the newest checkpoint last changed (seconds since the epoch; 0: never)."""
    found = checkpoints(folder)
    if not found:
        return 0.0
    newest = found[-1].path
    times = [newest.stat().st_mtime]
    for path in newest.iterdir():
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # a temporary file, renamed meanwhile
            continue
    return max(times)


def _is_complete(path: Path, iteration: int, folder: Path) -> bool:
    distributed = any((path / name).exists() for name in ("common.pt", ".metadata"))
    if distributed or next(path.glob("*.distcp"), None):
        try:
            json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return False
        return (path / ".metadata").exists()
    # other formats leave no mark of their own: the tracker file is written last
    tracked = _tracked(folder)
    return isinstance(tracked, int) and iteration <= tracked and any(path.iterdir())


def _tracked(folder: Path) -> int | str | None:
    try:
        text = (folder / _TRACKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else text
