"""The run folder's state and its lock."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from megalatent.errors import UserError
from megalatent.launch.runfolder import Attempt, Owner, RunFolder, RunLock, State
from megalatent.launch.slurm import SlurmError

ALIVE, DEAD = (lambda job: True), (lambda job: False)


def owner(job: str = "", pid: int = 1, host: str = "elsewhere") -> Owner:
    return Owner(job=job, host=host, pid=pid, since="2026-01-01T00:00:00Z")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def locked_by(folder: RunFolder, holder: Owner) -> None:
    numbers = [int(path.suffix[1:]) for path in folder.path.glob("lock.*")]
    path = folder.path / f"lock.{max(numbers, default=0) + 1}"
    path.write_text(json.dumps(asdict(holder)))


def test_state_reads_back(folder: RunFolder) -> None:
    assert folder.read_state() == State()
    attempt = Attempt("12", 1, "node[0-1]", "2026-01-01T00:00:00Z", 10, outcome="hang")
    state = State("waiting", "x", ["12"], 2, 10, {"node0": "bad"}, [attempt])
    folder.write_state(state)
    assert folder.read_state() == state
    assert os.listdir(folder.path) == ["state.json"]


@pytest.mark.parametrize("text", ['{"status": "running"', "", "null", "[]", '{"attempts": 1}'])
def test_a_state_file_that_is_none(folder: RunFolder, text: str) -> None:
    folder.state_file.write_text(text)
    with pytest.raises(UserError, match="not a state file"):
        folder.read_state()


@pytest.mark.parametrize("text", ["", "{", "null", "{}", '{"iteration": "x"}'])
def test_a_mark_that_is_none(folder: RunFolder, text: str) -> None:
    folder.finished_mark.write_text(text)
    with pytest.raises(UserError, match="not the mark of a finished run"):
        folder.finished()


def test_a_full_disk_leaves_the_old_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_state(State("running"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write_state(State("waiting"))
    assert folder.read_state().status == "running"
    assert os.listdir(folder.path) == ["state.json"]


def test_one_at_a_time(folder: RunFolder) -> None:
    first = RunLock(folder, ALIVE)
    first.acquire(owner("1"))
    with pytest.raises(UserError, match=r"in use by job 1 .*scancel 1"):
        RunLock(folder, ALIVE).acquire(owner("2"))
    first.release()
    RunLock(folder, ALIVE).acquire(owner("2"))


@pytest.mark.parametrize("repeat", range(10))
def test_of_many_at_once_one_wins(folder: RunFolder, repeat: int) -> None:
    locked_by(folder, owner("0"))
    won, refused = [], []
    active = {str(number) for number in range(1, 9)}
    barrier = threading.Barrier(8)

    def contend(number: int) -> None:
        barrier.wait()
        try:
            RunLock(folder, active.__contains__).acquire(owner(str(number), pid=number))
            won.append(number)
        except UserError:
            refused.append(number)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == 7


def test_the_job_itself_comes_back_after_a_crash(folder: RunFolder) -> None:
    locked_by(folder, owner("7"))
    RunLock(folder, ALIVE).acquire(owner("7"))


def test_the_lock_of_a_job_that_is_over(folder: RunFolder) -> None:
    locked_by(folder, owner("6"))
    RunLock(folder, DEAD).acquire(owner("7"))


def test_nobody_knows_whether_the_job_lives(folder: RunFolder) -> None:
    def no_answer(job: str) -> bool:
        raise SlurmError("squeue: timed out")

    locked_by(folder, owner("6"))
    with pytest.raises(SlurmError):
        RunLock(folder, no_answer).acquire(owner("7"))
    assert RunLock(folder, ALIVE).holder() == owner("6")


def test_a_process_holds_it(folder: RunFolder) -> None:
    locked_by(folder, Owner.this_process())
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        RunLock(folder, DEAD).acquire(owner("7"))
    locked_by(folder, owner(pid=99999999, host=socket.gethostname()))
    RunLock(folder, DEAD).acquire(owner("7"))


def test_a_later_process_of_the_same_number_does_not_hold_it(folder: RunFolder) -> None:
    """As number 1 in a container that was started again."""
    locked_by(folder, owner(pid=os.getpid(), host=socket.gethostname()))
    mine = Owner.this_process()
    RunLock(folder, DEAD).acquire(mine)
    assert RunLock(folder, DEAD).holder() == mine


def test_a_process_of_another_host(folder: RunFolder) -> None:
    locked_by(folder, owner(pid=5))
    with pytest.raises(UserError, match="remove"):
        RunLock(folder, DEAD).acquire(owner("7"))


def test_locks_leave_no_trail(folder: RunFolder) -> None:
    for number in range(1, 6):
        lock = RunLock(folder, ALIVE)
        lock.acquire(owner(str(number)))
        lock.release()
    assert os.listdir(folder.path) == ["lock.5"]
    assert RunLock(folder, ALIVE).holder() is None


def test_releasing_leaves_a_lock_of_somebody_else(folder: RunFolder) -> None:
    lock = RunLock(folder, ALIVE)
    lock.acquire(owner("7"))
    locked_by(folder, owner("8"))
    lock.release()
    assert RunLock(folder, ALIVE).holder() == owner("8")
