"""A run of local processes keeps its run folder to itself, as a run in a Slurm job does."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalatent.errors import UserError
from megalatent.launch.runfolder import Owner, RunFolder, RunLock
from megalatent.launch.slurm import Slurm, SlurmError

__all__ = ["folder_for_one_run"]

# What file systems without hard links answer; a lock needs one.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@contextlib.contextmanager
def folder_for_one_run(megatron: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[None]:
    """Hold the folder that a run saves to; nothing where it saves nothing.

    A run that has left nothing in it, because it was refused, leaves no trace of the lock either.

    Args:
        megatron: the run's options, `save` and `skip_train` among them.
        environ: says which Slurm job this is, if it is one: Slurm is then asked whether it lives.

    Raises:
        UserError: another run works in the folder, or nobody can tell.
    """
    if not megatron.get("save") or megatron.get("skip_train"):
        yield
        return
    folder = RunFolder(Path(megatron["save"]))
    missing = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder, lambda job: _is_active(job, lock))
    try:
        lock.acquire(Owner.this_process(environ.get("SLURM_JOB_ID", "")))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        print(
            f"megalatent: note: {folder.path} cannot be locked ({error.strerror}): start no second"
            " run in it",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the disk is full: a lock of a dead process is none
            lock.release()
            if [path.name for path in folder.path.iterdir()] == [lock.file.name]:
                lock.file.unlink()
            for path in missing:
                path.rmdir()  # only what is empty


def _is_active(job: str, lock: RunLock) -> bool:
    slurm = Slurm()
    try:
        if slurm.available():
            return slurm.is_active(job)
        why = "there is no Slurm here to ask"
    except SlurmError as error:
        why = str(error)
    raise UserError(
        f"{lock.file.parent} is in use by {lock.holder()} ({why}): if that job is over, remove"
        f" {lock.file}"
    )
