"""Which checkpoints count, whatever moment a crash has chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalatent.launch.checkpoints import last_complete, latest_activity, repair

TRACKER = "latest_checkpointed_iteration.txt"

# In the order in which Megatron writes them.
STEPS = ("common.pt", "__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json")


def write(folder: Path, iteration: int, steps: int = len(STEPS), tracked: bool = True) -> Path:
    target = folder / f"iter_{iteration:07d}"
    target.mkdir()
    for name in STEPS[:steps]:
        (target / name).write_text("{}")
    if tracked:
        (folder / TRACKER).write_text(str(iteration))
    return target


@pytest.mark.parametrize("steps", range(len(STEPS)))
def test_a_save_cut_off_anywhere_is_not_resumed_from(tmp_path: Path, steps: int) -> None:
    write(tmp_path, 10)
    half = write(tmp_path, 20, steps, tracked=False)
    newest, done = repair(tmp_path)
    assert newest is not None
    assert newest.iteration == 10
    assert (tmp_path / TRACKER).read_text() == "10"
    if steps:  # an empty folder is no harm
        assert not half.exists()
        assert done == ["deleted the half-written checkpoint iter_0000020"]


def test_metadata_cut_off_in_the_middle(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20) / "metadata.json").write_text('{"sharded_ba')
    newest, _ = repair(tmp_path)
    assert newest is not None
    assert newest.iteration == 10
    assert (tmp_path / TRACKER).read_text() == "10"


@pytest.mark.parametrize("text", ["", "1", "30", "nonsense"])
def test_the_tracker_is_mended(tmp_path: Path, text: str) -> None:
    """Megatron exits with code 0 on an empty tracker file, and trains nothing."""
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / TRACKER).write_text(text)
    newest, _ = repair(tmp_path)
    assert newest is not None
    assert newest.iteration == 20
    assert (tmp_path / TRACKER).read_text() == "20"


def test_the_first_save_was_cut_off(tmp_path: Path) -> None:
    write(tmp_path, 10, 3)
    newest, _ = repair(tmp_path)
    assert newest is None
    assert not (tmp_path / TRACKER).exists()


def test_before_an_iteration(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    newest, _ = repair(tmp_path, before=30)
    assert newest is not None
    assert newest.iteration == 20
    assert (tmp_path / TRACKER).read_text() == "20"
    # also when a person starts the run again; the weights are there to look at
    assert repair(tmp_path) == (newest, [])
    assert (tmp_path / "bad_iter_0000030" / ".metadata").exists()


def test_other_formats_are_judged_by_the_tracker(tmp_path: Path) -> None:
    for iteration in (10, 20):
        shard = tmp_path / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
        shard.parent.mkdir(parents=True)
        shard.touch()
    (tmp_path / TRACKER).write_text("10")
    newest = last_complete(tmp_path)
    assert newest is not None
    assert newest.iteration == 10


def test_a_checkpoint_that_is_not_of_training_stays(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / TRACKER).write_text("release")
    assert repair(tmp_path) == (None, [])
    assert (tmp_path / TRACKER).read_text() == "release"


def test_writing_is_activity(tmp_path: Path) -> None:
    assert latest_activity(tmp_path) == 0
    target = write(tmp_path, 10, 2)
    assert latest_activity(tmp_path) == max(p.stat().st_mtime for p in (target, *target.iterdir()))
