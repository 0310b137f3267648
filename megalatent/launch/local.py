"""Local processes for one run: forked from a process that has imported everything already.

Importing torch and Megatron takes 10 to 20 seconds; a fork takes milliseconds. The launcher must
therefore not have opened CUDA, which does not survive a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from megalatent.launch.rank import RANK_SIGNALS, LastWords, run_rank
from megalatent.launch.signals import blocked

__all__ = ["RankFailure", "Stopped", "run_local"]

# Seconds that the other ranks get to say what they know once one has failed: the first to be
# noticed is not always the first that failed.
_SETTLE = 1.0
_POLL = 0.1


class RankFailure(RuntimeError):
    """A rank failed, and the run was ended because of it.

    Attributes:
        rank: the rank that failed first.
        summary: its error in one line.
        trace: its traceback, or empty.
        is_user_error: the user's to mend, so that a traceback would not help.
    """

    def __init__(self, rank: int, summary: str, trace: str, is_user_error: bool) -> None:
        super().__init__(f"rank {rank} failed: {summary}")
        self.rank = rank
        self.summary = summary
        self.trace = trace
        self.is_user_error = is_user_error


class Stopped(RuntimeError):
    """The run was stopped by a signal to the launcher before its ranks finished.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


# What ranks say when another one has gone: a consequence, not a cause.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by (remote )?peer"
    r"|socket (timeout|closed)|timed out|remote process exited|ncclRemoteError|DistNetworkError"
    r"|DistBackendError|lost connection",
    re.IGNORECASE,
)


@dataclass
class _Rank:
    rank: int
    process: Any  # of the "fork" context, which has no public type
    words_fd: int
    stderr_fd: int | None
    words: bytes = b""
    line: bytes = b""
    status: int | None = None  # negative: the signal that killed it
    ended: float = 0.0
    told_to_stop: bool = False  # the user's signal was passed on
    ended_by_us: bool = False  # because another rank had failed

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def failed(self) -> bool:
        """Ended badly, and of itself."""
        if self.status in (None, 0) or self.ended_by_us:
            return False
        # One that was told to stop may die of the signal, but not of an error.
        return not self.told_to_stop or bool(self.words)

    def signal(self, number: int) -> None:
        if not self.running:
            return
        # The group, for the data loaders; the rank itself in case it has not made its group yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, number)
                return


@dataclass
class _Launcher:
    grace: float
    forward_as: int | None
    signals: Set[int]
    ranks: list[_Rank] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    received: list[int] = field(default_factory=list)  # signals, not passed on yet
    stopped_by: int | None = None

    def start(
        self,
        worker: Callable[[int], None],
        rank: int,
        environment: Mapping[str, str],
        listening: socket.socket,
    ) -> None:
        words_in, words_out = os.pipe()
        stderr_in, stderr_out = os.pipe() if rank else (None, None)
        mine = [listening.fileno(), words_in]
        mine += [fd for other in self.ranks for fd in (other.words_fd, other.stderr_fd) if fd]
        if stderr_in is not None:
            mine.append(stderr_in)
        parent = os.getpid()
        unblock = self.signals - signal.pthread_sigmask(signal.SIG_BLOCK, ())

        def main() -> None:
            for fd in mine:
                os.close(fd)
            run_rank(lambda: worker(rank), environment, words_out, stderr_out, parent, unblock)

        process = multiprocessing.get_context("fork").Process(target=main, name=f"rank {rank}")
        # Until the child has its own handlers, a signal would be lost in the launcher's.
        with blocked(self.signals):
            process.start()
        started = _Rank(rank, process, words_in, stderr_in)
        self.ranks.append(started)
        for fd, what in ((words_in, "words"), (stderr_in, "stderr")):
            if fd is not None:
                os.set_blocking(fd, False)
                self.selector.register(fd, selectors.EVENT_READ, (started, what))
        os.close(words_out)
        if stderr_out is not None:
            os.close(stderr_out)

    def start_all(
        self,
        worker: Callable[[int], None],
        environments: Sequence[Mapping[str, str]],
        listening: socket.socket,
    ) -> bool:
        """Start a rank for each environment; False if a signal stopped it on the way."""
        for rank, environment in enumerate(environments):
            self.start(worker, rank, environment, listening)
            self.pass_on()
            if self.stopped_by is not None and len(self.ranks) < len(environments):
                return False
        return True

    def read(self, timeout: float) -> None:
        """Take what the ranks wrote; lines on standard error are shown with their rank."""
        for key, _ in self.selector.select(timeout):
            rank, what = key.data
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, 65536)
                if not data:
                    self.selector.unregister(key.fd)
                elif what == "words":
                    rank.words += data
                else:
                    *lines, rank.line = (rank.line + data).split(b"\n")
                    for line in lines:
                        _show(rank.rank, line)

    def reap(self) -> None:
        for rank in self.ranks:
            if rank.running and rank.process.exitcode is not None:
                rank.ended = time.monotonic()
                rank.status = rank.process.exitcode
                # What it started and could not end: data loaders of a rank that was killed.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Serve the ranks until `until()` holds or the time is over; says whether it held."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not until():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self.read(_POLL)
            self.reap()
            self.pass_on()
        return True

    @property
    def all_ended(self) -> bool:
        return not any(rank.running for rank in self.ranks)

    @property
    def failed(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.failed]

    def end_all(self) -> None:
        """SIGTERM, and SIGKILL for those that are still there after the grace period."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self.ranks:
                if rank.running:
                    rank.ended_by_us = True
                    rank.signal(number)
            seconds = self.grace if number == signal.SIGTERM else None
            if self.wait(lambda: self.all_ended, seconds):
                return

    @property
    def broken(self) -> bool:
        """A signal killed a rank before it could handle it: the others wait for it in vain."""
        return self.stopped_by is not None and any((rank.status or 0) < 0 for rank in self.ranks)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only noted here: a handler runs between any two lines, also of a rank's start.
        self.received.append(number)

    def pass_on(self) -> None:
        """Give the ranks the signals received since the last call."""
        while self.received:
            number = self.received.pop(0)
            again = self.stopped_by is not None
            self.stopped_by = self.stopped_by or number
            for rank in self.ranks:
                if rank.running:
                    rank.told_to_stop = True
                    rank.signal(signal.SIGKILL if again else (self.forward_as or number))

    def close(self) -> None:
        while self.selector.get_map() and self.selector.select(0):
            self.read(0)
        for rank in self.ranks:
            if rank.line:
                _show(rank.rank, rank.line)
            for fd in (rank.words_fd, rank.stderr_fd):
                if fd is not None:
                    os.close(fd)
        self.selector.close()


def _show(rank: int, line: bytes) -> None:
    print(f"[rank {rank}] {line.decode(errors='replace')}", file=sys.stderr, flush=True)


def run_local(
    worker: Callable[[int], None],
    nproc: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace_seconds: float = 10.0,
    forward_as: int | None = None,
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT),
) -> None:
    """Run `worker(rank)` in `nproc` forked processes and wait for all of them.

    Standard output is shared. Standard error of rank 0 is shared too, that of the others is shown
    with `[rank N]` before each line. When one rank fails, the others are ended. A signal to this
    process goes on to the ranks, once; the ranks then end in their own time (a checkpoint takes
    long), unless it came so early that it killed one of them. A second signal kills them.

    Args:
        environment: for all ranks, besides what `torch.distributed` reads (RANK, WORLD_SIZE, …).
        grace_seconds: between SIGTERM and SIGKILL for the ranks that outlive a failed one.
        forward_as: the signal that ranks get for any of `signals`; None: the same one.
        signals: what to pass on.

    Raises:
        RankFailure: a rank raised, was killed, or ended with a status that is not 0.
        Stopped: a signal stopped the run, and not all ranks ended with status 0.
    """
    launcher = _Launcher(
        grace=grace_seconds, forward_as=forward_as, signals=RANK_SIGNALS | set(signals)
    )
    with _handled(signals, launcher.on_signal), socket.socket() as listening:
        # The launcher keeps the port, so that no other program can take it, and serves torch's
        # key-value store on it: a rank that dies does not take the store with it.
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        store = None
        environments = [
            {
                **(environment or {}),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listening.getsockname()[1]),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc),
            }
            for rank in range(nproc)
        ]
        try:
            if launcher.start_all(worker, environments, listening):
                store = _serve_store(listening)
                launcher.wait(
                    lambda: launcher.all_ended or bool(launcher.failed) or launcher.broken
                )
                if not launcher.all_ended:
                    launcher.wait(lambda: launcher.all_ended, _SETTLE)
        finally:
            if not launcher.all_ended:
                launcher.end_all()
            launcher.close()
            del store  # it serves the ranks until here
    if launcher.failed:
        raise _first_cause(launcher.failed)
    finished = len(launcher.ranks) == nproc and all(rank.status == 0 for rank in launcher.ranks)
    if launcher.stopped_by is not None and not finished:
        raise Stopped(launcher.stopped_by)


def _first_cause(failed: list[_Rank]) -> RankFailure:
    """The failure that the others follow from."""
    failures: list[tuple[bool, float, RankFailure]] = []
    for rank in failed:
        words = LastWords.decode(rank.words)
        if words is not None:
            # What a user must mend is a cause, whatever words it uses.
            follows = words.follows or (
                not words.is_user_error and bool(_CONSEQUENCE.search(words.summary))
            )
            failure = RankFailure(rank.rank, words.summary, words.trace, words.is_user_error)
            failures.append((follows, words.when, failure))
        else:
            failures.append((False, rank.ended, _silent_failure(rank)))
    return min(failures, key=lambda found: found[:2])[2]


def _silent_failure(rank: _Rank) -> RankFailure:
    assert rank.status is not None
    if rank.status > 0:
        return RankFailure(rank.rank, f"the process ended with status {rank.status}", "", False)
    name = signal.Signals(-rank.status).name
    hint = (
        " (the system kills a process that needs more memory than there is)"
        if -rank.status == signal.SIGKILL
        else ""
    )
    return RankFailure(rank.rank, f"the process was killed by {name}{hint}", "", False)


def _serve_store(listening: socket.socket) -> Any:
    """Torch's key-value store on the socket. After the forks: the store runs a thread."""
    import torch.distributed

    port = listening.getsockname()[1]
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


@contextlib.contextmanager
def _handled(
    signals: tuple[int, ...], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers in the main thread only
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
