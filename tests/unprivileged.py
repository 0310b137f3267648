"""Runs the command line as a user whom permissions stop, also where the tests run as root."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalatent.cli import main

_NOBODY = 65534


def run_as_nobody(arguments: Sequence[str], seconds: int = 60) -> tuple[int, str]:
    """Exit status and standard error of `megalatent ARGUMENTS`, in a forked process.

    What the command imports must have been imported: nobody may be unable to read it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status, errors = 99, io.StringIO()
        try:
            signal.alarm(seconds)
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            with contextlib.redirect_stderr(errors):
                status = main(arguments)
        except BaseException as error:  # nothing may run on in the child
            errors.write(f"{type(error).__name__}: {error}\n")
        finally:
            os.write(writer, errors.getvalue().encode()[:60_000])
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as output:
        said = output.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that everybody may enter, as pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="megalatent-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder
