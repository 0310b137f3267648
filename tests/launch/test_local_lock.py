"""Two runs of local processes in one folder: the second refuses."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalatent.cli import main
from megalatent.config import Config
from megalatent.errors import UserError
from megalatent.launch import train_command
from megalatent.launch.local_lock import folder_for_one_run
from megalatent.launch.runfolder import Owner, RunFolder, RunLock
from megalatent.launch.slurm import Slurm
from tests.launch.fake_slurm import FakeSlurm, fake_slurm  # noqa: F401
from tests.launch.test_runfolder import locked_by, owner
from tests.launch.test_train_command import path  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def hold(folder: RunFolder, job: str = "", **options: Any) -> Any:
    environ = {"SLURM_JOB_ID": job} if job else {}
    return folder_for_one_run({"save": str(folder.path), **options}, environ)


def take(folder: RunFolder) -> None:
    with hold(folder):
        assert (holder(folder) or owner()).pid == os.getpid()
    assert holder(folder) is None


def holder(folder: RunFolder) -> Owner | None:
    return RunLock(folder, lambda job: True).holder()


@pytest.fixture
def elsewhere() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_the_command_holds_it_while_its_ranks_train(
    path: Path,  # noqa: F811
    folder: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = ["train", str(path), "--nproc=1", "--set", f"megatron.save={folder.path}"]
    line += ["--set", "megatron.save_interval=2"]

    def train_twice(config: Config) -> None:
        (tmp_path / "second").write_text(str(main(line)))

    monkeypatch.setattr(train_command, "_train", train_twice)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(line) == 0
    assert (tmp_path / "second").read_text() == "2"
    said = capfd.readouterr().err
    assert f"{folder.path} is in use by process {os.getpid()} on" in said
    assert "Traceback" not in said
    assert holder(folder) is None


@pytest.mark.parametrize("existed", [False, True])
def test_a_run_that_is_refused_leaves_no_trace(tmp_path: Path, existed: bool) -> None:
    """What it refuses may stand in the checkpoint, which only the ranks read."""
    folder = RunFolder(tmp_path / "runs" / "new" / "run")
    if existed:
        folder.path.mkdir(parents=True)
    with hold(folder):
        assert holder(folder)
    assert list(tmp_path.rglob("*")) == (
        [folder.path.parent.parent, folder.path.parent, folder.path] if existed else []
    )


def test_a_run_that_fails_lets_go_of_it(folder: RunFolder) -> None:

    def fail() -> None:
        with hold(folder):
            (folder.path / "metrics.jsonl").touch()
            raise RuntimeError("a rank failed")

    with pytest.raises(RuntimeError, match="a rank failed"):
        fail()
    assert (folder.path / "lock.1").exists()
    take(folder)
    assert (folder.path / "metrics.jsonl").exists()


def test_a_run_that_came_meanwhile_keeps_its_lock(folder: RunFolder) -> None:
    with hold(folder):
        (folder.path / "lock.1").rename(folder.path / "lock.2")
        locked_by(folder, owner("8"))
    assert holder(folder) == owner("8")


def test_a_live_process_is_refused_and_a_dead_one_is_not(
    folder: RunFolder, elsewhere: subprocess.Popen[bytes]
) -> None:
    folder.path.mkdir()
    mine = Owner.this_process()
    locked_by(folder, Owner("", mine.host, elsewhere.pid, mine.since))
    with pytest.raises(UserError, match=f"in use by process {elsewhere.pid} .*wait for it or end"):
        take(folder)
    elsewhere.kill()
    elsewhere.wait()
    take(folder)


def test_a_job_is_asked_after(folder: RunFolder, fake_slurm: FakeSlurm) -> None:  # noqa: F811
    folder.path.mkdir()
    locked_by(folder, owner("7"))
    fake_slurm.job("7", "RUNNING")
    with pytest.raises(UserError, match=r"in use by job 7 .*scancel 7"):
        take(folder)
    fake_slurm.job("7", "FAILED")
    take(folder)


def test_inside_a_job_the_job_holds_it(folder: RunFolder, fake_slurm: FakeSlurm) -> None:  # noqa: F811
    """So that the job may go on with it on another node, and no other job."""
    with hold(folder, job="7"):
        fake_slurm.job("7", "RUNNING")
        with pytest.raises(UserError, match="in use by job 7"):
            hold(folder, job="8").__enter__()
        with hold(folder, job="7"):
            pass


def test_a_job_that_nobody_can_ask_after(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that was copied from a cluster."""
    folder.path.mkdir()
    locked_by(folder, owner("7"))
    monkeypatch.setattr(Slurm, "available", lambda self: False)
    with pytest.raises(UserError, match=r"no Slurm here to ask\): if that job is over, remove"):
        take(folder)
    (folder.path / "lock.1").unlink()
    take(folder)


def test_where_files_have_no_second_name(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with hold(folder):
        pass
    assert f"{folder.path} cannot be locked (Operation not permitted)" in capsys.readouterr().err
    assert not folder.path.exists()


@pytest.mark.parametrize("options", [{"save": None}, {"skip_train": True}])
def test_a_run_that_saves_nothing_locks_nothing(folder: RunFolder, options: dict[str, Any]) -> None:
    with hold(folder, **options):
        assert not folder.path.exists()
