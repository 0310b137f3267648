"""What happens inside a process that `launch.local` forks: its surroundings, and its last words."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass

from megalatent.errors import UserError
from megalatent.training.exits import TrainingStopped

__all__ = ["LAST_WORDS", "RANK_SIGNALS", "LastWords", "report", "run_rank", "work"]

# Environment variable: descriptor of the pipe for a rank's last words.
LAST_WORDS = "MEGALATENT_LAST_WORDS"

# A pipe holds 64 KiB: a longer message would block a process that nobody may be reading.
_LONGEST_TRACEBACK = 40_000
# What a launcher may handle, and a rank does not until it says so.
RANK_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """Why a rank ended, as it says itself.

    Attributes:
        when: `time.monotonic()` of the failure, comparable between processes of one machine.
        summary: one line.
        trace: traceback; empty for a mistake of the user.
        is_user_error: the user's to mend, shown without a traceback.
        follows: only because another rank failed.
    """

    when: float
    summary: str
    trace: str
    is_user_error: bool
    follows: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> LastWords | None:
        """None for what a process that died while writing left."""
        try:
            return cls(**json.loads(data))
        except ValueError:
            return None


_words_fd: int | None = None


def report(summary: str, *, follows: bool) -> bool:
    """Say why this process is about to end other than by an error of its own.

    Returns:
        whether a launcher will show it; if not, the caller must.
    """
    if _words_fd is None:
        return False
    words = LastWords(
        when=time.monotonic(),
        summary=summary[:4000],
        trace="",
        is_user_error=False,
        follows=follows,
    )
    with contextlib.suppress(OSError):
        os.write(_words_fd, words.encode())
    return True


def run_rank(
    worker: Callable[[], None],
    environment: Mapping[str, str],
    words_fd: int,
    stderr_fd: int | None,
    parent: int,
    unblock: Set[int] = frozenset(),
) -> None:
    """Run `worker` in this freshly forked process; a failure ends the process at once.

    Args:
        worker: returns when the work is done; anything it raises is a failure.
        environment: added to the process's environment.
        words_fd: pipe on which `LastWords` go out.
        stderr_fd: takes the place of standard error, if given.
        parent: process id of the launcher; when the launcher dies, so does this process.
        unblock: signals that the launcher handles and has blocked for the fork.
    """
    _settle_in({**environment, LAST_WORDS: str(words_fd)}, stderr_fd, parent, unblock)
    work(worker, words_fd)


def work(worker: Callable[[], None], words_fd: int) -> None:
    """Run `worker`; a failure goes out on the pipe and ends the process at once."""
    global _words_fd
    _words_fd = words_fd
    try:
        worker()
        return
    except SystemExit as error:
        if error.code in (None, 0):
            return
        _report(words_fd, error, f"SystemExit: {_one_line(error)}")
    except BaseException as error:
        _report(words_fd, error, f"{type(error).__name__}: {_one_line(error)}")
    # Not sys.exit: threads of a broken process group may never end.
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _settle_in(
    environment: Mapping[str, str], stderr_fd: int | None, parent: int, unblock: Set[int]
) -> None:
    # A group of its own: Ctrl-C reaches the launcher alone, which passes it on, and one signal to
    # the group reaches this rank's data loaders too.
    os.setpgid(0, 0)
    for number in RANK_SIGNALS | unblock:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before the line above
            os._exit(1)
    os.environ.update(environment)
    if stderr_fd is not None:
        os.dup2(stderr_fd, 2)
        os.close(stderr_fd)
        # The launcher's may have been replaced by something that does not end in descriptor 2.
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True
        )
    faulthandler.enable()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"


def _report(words_fd: int, error: BaseException, summary: str) -> None:
    is_user_error = isinstance(error, UserError)
    said_all = is_user_error or isinstance(error, TrainingStopped)
    trace = "" if said_all else "".join(traceback.format_exception(error))
    words = LastWords(
        when=time.monotonic(),
        summary=_one_line(error) if said_all else summary[:4000],
        trace=trace[-_LONGEST_TRACEBACK:],
        is_user_error=is_user_error,
    )
    with contextlib.suppress(OSError):
        os.write(words_fd, words.encode())
