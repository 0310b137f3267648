"""Errors that are the user's to mend: shown as one line, never as a traceback."""

from __future__ import annotations

import errno
import os

__all__ = ["UserError", "describe_os_error", "is_mistake"]

# What to do about what the operating system refuses.
_REMEDIES = {
    errno.EACCES: "give a path that you may use, or change its permissions",
    errno.EPERM: "give a path that you may use, or change its permissions",
    errno.ENOENT: "give a path that exists",
    errno.ENOTDIR: "one of its folders is a file: give another path",
    errno.EISDIR: "give a file, not a folder",
    errno.EEXIST: "give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "its links lead back to themselves: give another path",
    errno.EROFS: "give a path on another disk",
}
# The path is right, and the machine cannot serve it.
_TROUBLES = {
    errno.ENOSPC: "make room, or write to another disk",
    errno.EDQUOT: "make room, or write to another disk",
    errno.EIO: "the disk or the network failed: try again, or use another disk",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "close other programs",
}


class UserError(ValueError):
    """What was given, what is wrong with it, and what to do, in one sentence.

    The command line prints it as `megalatent: error: …` and exits with code 2.
    """


def is_mistake(error: OSError) -> bool:
    """Whether a path that was given is at fault, and not the state of the machine."""
    return error.filename is not None and error.errno in _REMEDIES


def describe_os_error(error: OSError) -> str | None:
    """The path, what is wrong with it and what to do; None where the error says too little."""
    remedy = _REMEDIES.get(error.errno or 0) or _TROUBLES.get(error.errno or 0)
    name = error.filename if error.filename2 is None else error.filename2
    if error.strerror is None or (name is None and error.errno not in _TROUBLES):
        return None
    parts = [error.strerror[0].lower() + error.strerror[1:]]
    if isinstance(name, (str, bytes)):
        parts.insert(0, os.fsdecode(name) or "''")
    return ": ".join([*parts, remedy] if remedy else parts)
