"""Files that get their names together, when all of them are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from megalatent.errors import UserError, describe_os_error

__all__ = ["ASIDE", "Staging", "check_file", "check_folder"]

# Begins the names of the folders in which files are written; a killed process leaves its own.
ASIDE = ".megalatent-"


class Staging:
    """A context in which files are written aside; they are moved to their places at its end.

    An error leaves what was there before: no new file, and none of the folders that were made.
    """

    def __init__(self) -> None:
        self._made: list[Path] = []
        self._aside: dict[Path, Path] = {}
        self._moves: list[tuple[Path, Path]] = []

    def __enter__(self) -> Staging:
        return self

    def path(self, final: Path) -> Path:
        """Where to write what will be `final`; the name is the same, in a folder next to it."""
        parent = final.absolute().parent
        if parent not in self._aside:
            self._make(parent)
            # On the same disk, so that moving is renaming; hidden, so that no walk reads it.
            aside = tempfile.mkdtemp(prefix=ASIDE, dir=parent)
            self._aside[parent] = Path(aside)
        written = self._aside[parent] / final.name
        self._moves.append((written, final))
        return written

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        complete = False
        try:
            if kind is None:
                for written, final in self._moves:
                    os.replace(written, final)
                complete = True
        finally:
            for aside in self._aside.values():
                shutil.rmtree(aside, ignore_errors=True)
            if not complete:
                for folder in reversed(self._made):
                    with contextlib.suppress(OSError):  # somebody else put a file there
                        folder.rmdir()

    def _make(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            self._made.append(one)


def check_file(where: str, file: Path, overwrite: bool) -> None:
    """Raise UserError if `file` cannot be written; `where` begins the message."""
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None  # or check_folder says what stands in the way
    except OSError as error:
        raise UserError(f"{where}: {describe_os_error(error)}") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise UserError(f"{where}: {file} is a folder: give another name, or remove it")
    if mode is not None and not stat.S_ISREG(mode):
        raise UserError(f"{where}: {file} is no regular file: give another name")
    if mode is not None and not overwrite:
        raise UserError(f"{where}: {file} exists: give another name, or --overwrite")
    check_folder(where, file.absolute().parent)


def check_folder(where: str, folder: Path) -> None:
    """Raise UserError if no file can be made in `folder`, which may have to be made itself."""
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError as error:
        raise UserError(f"{where}: {describe_os_error(error)}") from None
    if not folder.is_dir():
        raise UserError(f"{where}: {folder} is a file, not a folder: give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{where}: {folder} is not writable: give another path")
