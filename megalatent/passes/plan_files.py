"""Writes the files of a plan: all of them, or none."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from megalatent.errors import UserError

__all__ = ["write_files"]


def write_files(texts: Mapping[str, tuple[str, str]]) -> None:
    """Write texts to files; nothing is changed if one of the files cannot be opened.

    Args:
        texts: of each option, the path and the text.

    Raises:
        UserError: two options name one file.
        OSError: a file cannot be written.
    """
    opened: dict[str, int] = {}
    identities: dict[tuple[int, int], str] = {}
    made: list[str] = []
    try:
        for option, (path, _) in texts.items():
            existed = os.path.lexists(path)
            # Not cut off before every file is open.
            opened[option] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            if not existed:
                made.append(path)
            status = os.fstat(opened[option])
            other = identities.setdefault((status.st_dev, status.st_ino), option)
            if other != option and stat.S_ISREG(status.st_mode):
                raise UserError(f"{other} and {option} both write {path}; give two names")
    except BaseException:
        for descriptor in opened.values():
            os.close(descriptor)
        for path in made:
            with contextlib.suppress(OSError):
                Path(path).unlink()
        raise
    for option, (_, text) in texts.items():
        descriptor = opened[option]
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 0)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
