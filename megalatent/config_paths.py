"""Looking at paths that a configuration names: what the system refuses becomes one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megalatent.config_values import require
from megalatent.errors import UserError

__all__ = ["check_writable", "expanded", "looking_at", "read_path", "same_folder"]


def expanded(path: str) -> str:
    """The path with the home folder in place of a leading `~/`, as a shell would give it."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def read_path(value: object, where: str) -> str | None:
    """A path in a section of our own, or null."""
    require(value is None or isinstance(value, str), where, value, "is no path", "write a path")
    return expanded(value) if isinstance(value, str) else None


@contextlib.contextmanager
def looking_at(where: str, path: str) -> Iterator[None]:
    """Turn an error of the system about `path`, given as the option `where`, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        culprit = f" ({error.filename})" if error.filename and error.filename != path else ""
        raise UserError(
            f"{where}: {path}: {error.strerror or error}{culprit}: give a path that this user"
            f" ({os.geteuid()}) can use"
        ) from None
    except ValueError as error:
        # A null character, or one that no file name can hold.
        raise UserError(f"{where}: {path!r}: no path ({error}): give another one") from None


def same_folder(first: str | None, second: str | None) -> bool:
    """Whether two options name one folder, however they are written."""
    if first is None or second is None:
        return False
    return os.path.realpath(first) == os.path.realpath(second)


def check_writable(where: str, path: str) -> None:
    """The folder exists and is writable, or can be made in its nearest existing parent.

    Raises:
        UserError: it cannot.
    """
    if not path:
        raise UserError(f"{where}: the path is empty: give a folder, or leave the option out")
    with looking_at(where, path):
        existing = Path(path).absolute()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise UserError(
                f"{where}: {path}: {existing} is a file, not a folder: give another folder"
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"{where}: {path}: {existing} is not writable: give another folder")
