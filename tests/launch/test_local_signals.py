"""Signals to the launcher of local ranks: passed on, never lost, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megalatent.launch import rank as rank_module
from megalatent.launch.local import RankFailure, Stopped, _Launcher
from tests.launch.test_local import no_process_is_left, run, sleep_long
from tests.waiting import HANG, wait_until

__all__ = ["no_process_is_left"]

# Signals go to a launcher of its own: a process forked from this one.


def waits(folder: Path, rank: int) -> None:
    """As Megatron's --exit-signal-handler: go on until the signal comes."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    (folder / f"up{rank}").touch()
    while not stop:
        time.sleep(0.02)


def saves(folder: Path, rank: int) -> None:
    waits(folder, rank)
    time.sleep(0.5)
    (folder / f"saved{rank}").touch()


def dies(folder: Path, rank: int) -> None:
    (folder / f"up{rank}").touch()
    sleep_long()


def ignores(folder: Path, rank: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dies(folder, rank)


def stays(folder: Path, rank: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"told{rank}").touch())
    dies(folder, rank)


def fails_to_save(folder: Path, rank: int) -> None:
    waits(folder, rank)
    if rank == 1:
        raise OSError("disk full")
    sleep_long()


class Launched:
    def __init__(
        self, folder: Path, worker: Callable[[Path, int], None], forward_as: int | None = None
    ) -> None:
        self.said = folder / "said"

        def launch() -> None:
            try:
                run(lambda rank: worker(folder, rank), 2, forward_as=forward_as)
                said, status = "done", 0
            except Stopped as error:
                said, status = str(error), 128 + error.number
            except RankFailure as error:
                said, status = str(error), 1
            self.said.write_text(said)
            os._exit(status)

        self.process = multiprocessing.get_context("fork").Process(target=launch)
        self.process.start()
        self.wait_for_ranks(folder, "up")
        self.ranks = psutil.Process(self.process.pid).children()

    def wait_for_ranks(self, folder: Path, mark: str) -> None:
        """Until both have left it."""

        def have_left_it() -> bool:
            assert self.process.is_alive()
            return all((folder / f"{mark}{rank}").exists() for rank in range(2))

        wait_until(f"mark {mark!r} of both ranks", have_left_it)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int | None, str]:
        self.process.join(timeout=HANG)
        _, alive = psutil.wait_procs(self.ranks, timeout=HANG)
        assert alive == []
        return self.process.exitcode, self.said.read_text() if self.said.exists() else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_ranks_save(tmp_path: Path, number: int) -> None:
    launched = Launched(tmp_path, saves, forward_as=signal.SIGTERM)
    launched.signal(number)
    assert launched.end() == (0, "done")
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_a_signal_ends_ranks_that_do_not_handle_it(tmp_path: Path) -> None:
    launched = Launched(tmp_path, dies)
    launched.signal(signal.SIGTERM)
    assert launched.end() == (128 + signal.SIGTERM, "stopped by SIGTERM")


def test_a_second_signal_kills(tmp_path: Path) -> None:
    launched = Launched(tmp_path, stays)
    launched.signal(signal.SIGTERM)
    launched.wait_for_ranks(tmp_path, "told")
    assert launched.process.is_alive()  # it waits for its ranks
    launched.signal(signal.SIGTERM)
    assert launched.end() == (128 + signal.SIGTERM, "stopped by SIGTERM")


def test_a_failure_while_saving_is_shown(tmp_path: Path) -> None:
    launched = Launched(tmp_path, fails_to_save)
    launched.signal(signal.SIGTERM)
    assert launched.end() == (1, "rank 1 failed: OSError: disk full")


@pytest.mark.parametrize("started", [0, 2])
@pytest.mark.parametrize("to_the_group", [False, True])
def test_a_signal_during_the_start_is_not_lost(
    started: int, to_the_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when a child has been forked and still has the launcher's handlers."""
    start = _Launcher.start
    settle = rank_module._settle_in

    def settle_late(*args: Any) -> None:
        time.sleep(0.3)
        settle(*args)

    def start_then_signal(self: _Launcher, worker: Any, rank: int, *rest: Any) -> None:
        start(self, worker, rank, *rest)
        if rank == started:
            if to_the_group:  # as Ctrl-C does, as long as the child has no group of its own
                child = self.ranks[-1].process.pid
                os.kill(child, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rank_module, "_settle_in", settle_late)
    monkeypatch.setattr(_Launcher, "start", start_then_signal)
    with pytest.raises(Stopped) as caught:
        run(lambda rank: sleep_long(), 3)
    assert caught.value.number == signal.SIGINT


def test_a_signal_that_kills_one_rank_ends_those_that_handle_it(tmp_path: Path) -> None:
    """One rank was not ready for the signal; the other waits for it, and would for ever."""

    def one_is_not_ready(folder: Path, rank: int) -> None:
        if rank == 0:
            dies(folder, rank)
        waits(folder, rank)
        sleep_long()

    launched = Launched(tmp_path, one_is_not_ready)
    launched.signal(signal.SIGTERM)
    assert launched.end() == (128 + signal.SIGTERM, "stopped by SIGTERM")


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    launched = Launched(tmp_path, ignores)
    launched.process.kill()
    assert launched.end()[0] == -signal.SIGKILL


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(lambda rank: None, 1)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(RankFailure):
        run(lambda rank: os._exit(1), 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_stopped_names_the_signal() -> None:
    assert str(Stopped(signal.SIGINT)) == "stopped by SIGINT"
