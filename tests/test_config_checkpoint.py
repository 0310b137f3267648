"""The checkpoint to load: half-written and damaged ones are found before anything starts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalatent.config import Config
from megalatent.errors import UserError
from tests.test_config import config

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run folder with whole checkpoints of steps 3 and 9, as Megatron lays them out."""
    folder = tmp_path / "run"
    for iteration in (3, 9):
        inside = folder / f"iter_{iteration:07d}"
        dcp.save(  # type: ignore[attr-defined]
            {"weight": torch.arange(1000.0)}, checkpoint_id=inside, no_dist=True
        )
        (inside / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        torch.save({"iteration": iteration}, inside / "common.pt")
    (folder / TRACKER).write_text("9")
    return folder


def resuming(folder: Path, **options: Any) -> Config:
    # Written differently, and still the folder that it saves to.
    return config(load=f"{folder}/", save=str(folder), save_interval=5, **options)


def problem(folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        resuming(folder, **options).check(1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_and_absent_checkpoints_pass(saved: Path, tmp_path: Path) -> None:
    resuming(saved).check(1)
    resuming(tmp_path / "not there yet").check(1)
    (saved / TRACKER).unlink()
    resuming(saved).check(1)


@pytest.mark.parametrize("text", ["", "abc", "²", "-1", "9\n3"])
def test_a_half_written_tracker(saved: Path, text: str) -> None:
    (saved / TRACKER).write_text(text)
    found = problem(saved)
    assert "no iteration" in found
    assert f"write 9 into {saved}/{TRACKER}" in found


def test_a_tracker_that_is_not_text(saved: Path) -> None:
    (saved / TRACKER).write_bytes(b"\xff\x00\xff")
    assert "no iteration" in problem(saved)


def test_a_checkpoint_that_is_gone(saved: Path) -> None:
    shutil.rmtree(saved / "iter_0000009")
    found = problem(saved)
    assert "has no iter_0000009 (there are iter_0000003)" in found
    assert "write 3 into" in found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".metadata", "lacks .metadata"),
        ("metadata.json", "lacks metadata.json"),
        ("__0_0.distcp", "lacks __0_0.distcp"),
    ],
)
def test_a_file_is_missing(saved: Path, name: str, expected: str) -> None:
    (saved / "iter_0000009" / name).unlink()
    found = problem(saved)
    assert expected in found
    assert "to go on from iter_0000003, write 3 into" in found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".metadata", "its .metadata is damaged"),
        ("metadata.json", "its metadata.json is damaged"),
        ("common.pt", "its common.pt is damaged"),
        ("__0_0.distcp", "its __0_0.distcp has"),
    ],
)
def test_a_file_is_cut_off(saved: Path, name: str, expected: str) -> None:
    path = saved / "iter_0000009" / name
    os.truncate(path, path.stat().st_size // 2)
    assert expected in problem(saved)


def test_an_empty_checkpoint(saved: Path) -> None:
    shutil.rmtree(saved / "iter_0000009")
    (saved / "iter_0000009").mkdir()
    assert "the checkpoint is empty" in problem(saved)


def test_another_step_need_not_be_the_last(saved: Path) -> None:
    (saved / "iter_0000009" / ".metadata").unlink()
    resuming(saved, ckpt_step=3).check(1)


def test_what_is_repaired_before_the_start_is_no_mistake(saved: Path) -> None:
    (saved / TRACKER).write_text("")
    resuming(saved).check(1, checkpoints_repaired=True)
    elsewhere = config(load=str(saved), save=f"{saved}2", save_interval=5)
    with pytest.raises(UserError, match="no iteration"):
        elsewhere.check(1, checkpoints_repaired=True)
