"""Local ranks: what is shown, who is blamed, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megalatent.errors import UserError
from megalatent.launch import local
from megalatent.launch import rank as rank_module
from megalatent.launch.local import RankFailure, run_local
from tests.waiting import HANG, wait_until


@pytest.fixture(autouse=True)
def no_process_is_left() -> object:
    yield
    wait_until("all processes end", lambda: not psutil.Process().children(recursive=True))


def run(worker: Callable[[int], None], nproc: int = 3, **options: object) -> None:
    run_local(worker, nproc, grace_seconds=1.0, **options)  # type: ignore[arg-type]


def failure(worker: Callable[[int], None], nproc: int = 3) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run(worker, nproc)
    return caught.value


def sleep_long() -> None:
    time.sleep(600)


def test_ranks_find_each_other(tmp_path: Path) -> None:
    def worker(rank: int) -> None:
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
        assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank), "3")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        (tmp_path / str(rank)).write_text(f"{total.item()} {os.environ['EXTRA']}")
        dist.destroy_process_group()

    run(worker, environment={"EXTRA": "yes"})
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["6.0 yes"] * 3


def test_output(capfd: pytest.CaptureFixture[str]) -> None:
    def worker(rank: int) -> None:
        print(f"out {rank}")
        print(f"err {rank}\nlast {rank}", end="", file=sys.stderr)

    run(worker, 2)
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["out 0", "out 1"]
    assert "err 0\nlast 0" in printed.err
    assert "[rank 1] err 1\n[rank 1] last 1\n" in printed.err


def test_the_error_of_the_rank_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """The others fail too, because a connection broke; they are not shown."""

    def worker(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 1:
            raise KeyError("the cause\nin two lines")
        dist.all_reduce(torch.ones(1))

    found = failure(worker)
    assert found.rank == 1
    assert found.summary == "KeyError: 'the cause\\nin two lines'"
    assert str(found) == f"rank 1 failed: {found.summary}"
    assert "in worker" in found.trace
    assert not found.is_user_error
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A rank calls it with whether it ends first; the others then wait until that was noticed."""
    monkeypatch.setattr(local, "_SETTLE", HANG)  # for these others; it is over when they end
    number = tmp_path / "first"

    def ends(first: bool) -> None:
        if first:
            number.write_text(str(os.getpid()))
            return
        pid = int(wait_until("the first one", lambda: number.exists() and number.read_text()))
        # Its parent asks for its status, and only then is it gone.
        wait_until("the end of the first one", lambda: not psutil.pid_exists(pid))

    return ends


def test_a_consequence_that_is_noticed_first_is_not_blamed(
    one_by_one: Callable[[bool], None],
) -> None:
    def worker(rank: int) -> None:
        one_by_one(rank == 0)
        if rank == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        raise ValueError("the cause")

    found = failure(worker, 2)
    assert (found.rank, found.summary) == (1, "ValueError: the cause")


def test_the_first_of_two_causes_is_blamed(one_by_one: Callable[[bool], None]) -> None:
    def worker(rank: int) -> None:
        one_by_one(rank == 2)
        raise ValueError(f"of rank {rank}")

    assert failure(worker).rank == 2


def test_only_consequences_blame_the_first(one_by_one: Callable[[bool], None]) -> None:
    def worker(rank: int) -> None:
        one_by_one(rank == 1)
        raise RuntimeError("Socket Timeout")

    assert failure(worker).rank == 1


def test_a_mistake_of_the_user() -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            raise UserError("the checkpoint lacks x")
        sleep_long()

    found = failure(worker)
    assert found.is_user_error
    assert (found.summary, found.trace) == ("the checkpoint lacks x", "")


def test_a_killed_rank() -> None:
    def worker(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    found = failure(worker)
    assert found.rank == 2
    assert "killed by SIGKILL" in found.summary


def test_who_ends_because_of_another_rank_is_not_blamed(
    one_by_one: Callable[[bool], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """It speaks first and in its own words, and nothing of it is shown besides the cause."""

    def worker(rank: int) -> None:
        one_by_one(rank == 0)
        if rank == 0:
            assert rank_module.report("rank 1 has left us", follows=True)
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)

    found = failure(worker, 2)
    assert found.rank == 1
    assert "SIGKILL" in found.summary
    assert "left us" not in capfd.readouterr().err


def test_a_stall_is_told_by_the_rank_that_saw_it() -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            assert rank_module.report("no progress for 5 s", follows=False)
            os._exit(1)
        sleep_long()

    assert str(failure(worker, 2)) == "rank 1 failed: no progress for 5 s"


def test_without_a_launcher_nobody_shows_a_report() -> None:
    assert rank_module.report("no progress", follows=False) is False


def test_a_crash_in_native_code(capfd: pytest.CaptureFixture[str]) -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        sleep_long()

    assert "killed by SIGSEGV" in failure(worker).summary
    # The stack at the crash, from the interpreter.
    assert "[rank 1] Fatal Python error" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "expected"), [(7, "SystemExit: 7"), ("no data", "SystemExit: no data")]
)
def test_a_rank_that_exits(code: int | str, expected: str) -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            sys.exit(code)
        sleep_long()

    assert failure(worker).summary == expected


def test_a_hard_exit() -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            os._exit(9)
        sleep_long()

    assert failure(worker).summary == "the process ended with status 9"


def test_exit_zero_is_a_good_end() -> None:
    run(lambda rank: sys.exit(0), 2)


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            time.sleep(0.3)
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleep_long()

    assert failure(worker).rank == 1


def test_a_thread_that_never_ends_does_not_keep_a_failed_rank() -> None:
    def worker(rank: int) -> None:
        threading.Thread(target=sleep_long).start()
        raise ValueError("the cause")

    assert failure(worker, 1).rank == 0


def test_processes_of_a_killed_rank_end_with_it() -> None:
    """As the workers of a data loader; the fixture above finds those that are left."""

    def worker(rank: int) -> None:
        if rank == 0:
            subprocess.Popen(["sleep", "600"])
            os.kill(os.getpid(), signal.SIGKILL)
        sleep_long()

    assert failure(worker, 2).rank == 0
