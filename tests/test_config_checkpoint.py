"""The checkpoint to load: half-written and damaged ones are found before anything starts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
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


def test_a_run_is_not_replaced_by_another(saved: Path) -> None:
    given = {"save": str(saved), "save_interval": 3}
    with pytest.raises(UserError, match="holds a run that has come to iteration 9"):
        config(**given).check(1)
    config(**given, load=str(saved)).check(1)
    # Weights alone begin a new run, also from the folder itself.
    for load in (str(saved), None):
        with pytest.raises(UserError, match=r"megatron\.load=\S+ --set megatron\.finetune=false;"):
            config(**given, finetune=True, load=load).check(1)
    config(**given, skip_train=True).check(1)
    config(**given).check(1, checkpoints_repaired=True)


@pytest.mark.parametrize(
    ("split", "documents", "empty"),
    [
        (None, 1000, None),
        (None, 79, "test"),
        (None, 9, "validation"),
        ("98,2,0", 30, None),
        ("98,2,0", 20, "validation"),
        ("98 2 0", 20, "validation"),
        ("90,10,0", 79, None),
        ("50,50,0", 1, "training"),
    ],
)
def test_each_set_has_a_document(
    split: str | None, documents: int, empty: str | None, tmp_path: Path
) -> None:
    """Megatron rounds the bounds of the shares to whole documents."""
    (tmp_path / "x.bin").touch()
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 4, documents, documents + 1)
    (tmp_path / "x.idx").write_bytes(head)
    given = config(mock_data=False, data_path=[str(tmp_path / "x")])
    given = dataclasses.replace(given, megatron={**given.megatron, "split": split})
    if split is None:
        given.megatron.pop("split")
    if empty is None:
        given.check(1)
    else:
        with pytest.raises(UserError, match=f"split: .* for the {empty} set"):
            given.check(1)
