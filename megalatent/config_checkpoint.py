"""The checkpoint that a run is to load is there and whole.

Megatron meets a half-written tracker file with `sys.exit()`, which says nothing and counts as
success, and a damaged checkpoint with an exception on every rank. Both can be seen beforehand.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

from megalatent.config_paths import looking_at, same_folder
from megalatent.errors import UserError

__all__ = ["check_checkpoints"]

_TRACKER = "latest_checkpointed_iteration.txt"


def check_checkpoints(args: argparse.Namespace, *, repaired: bool) -> None:
    """Raise a `UserError` for the first checkpoint that cannot be loaded.

    Args:
        args: Megatron's, not validated.
        repaired: whether something else mends the run's own checkpoints before it starts.
    """
    # A run that loads what it saves starts anew the first time and resumes afterwards.
    resumes = same_folder(args.load, args.save)
    if args.load is not None and not (resumes and repaired):
        fresh = resumes and not args.exit_on_missing_checkpoint and args.ckpt_step is None
        with looking_at("megatron.load", args.load):
            if not fresh or (Path(args.load) / _TRACKER).exists():
                _check_checkpoint("megatron.load", args.load, args.ckpt_step)
    # Who mends the run's checkpoints also lets it go on from them.
    replaces = not resumes or args.finetune
    if args.save is not None and replaces and not args.skip_train and not repaired:
        with looking_at("megatron.save", args.save):
            _check_unused(args.save, finetune=args.finetune)
    if args.pretrained_checkpoint is not None:
        where = "megatron.pretrained_checkpoint"
        with looking_at(where, args.pretrained_checkpoint):
            _check_checkpoint(where, args.pretrained_checkpoint, None)


def _check_unused(save: str, *, finetune: bool) -> None:
    """A run that does not go on from the checkpoints in its folder would replace them.

    Args:
        finetune: the run takes weights alone, wherever it loads from, and begins at step 0.
    """
    tracker = Path(save) / _TRACKER
    if not tracker.is_file():
        return
    latest = tracker.read_bytes().decode(errors="replace").strip()[:40]
    go_on = f"--set megatron.load={save}" + " --set megatron.finetune=false" * finetune
    raise UserError(
        f"megatron.save: {save}: holds a run that has come to iteration {latest}, which this one"
        f" would replace: to go on with it, {go_on}; to start anew, give another folder or remove"
        " this one"
    )


def _check_checkpoint(where: str, path: str, step: int | None) -> None:
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{where}: {path}: no such folder: give the folder of a checkpoint")
    tracker = folder / _TRACKER
    if not tracker.is_file():
        raise UserError(
            f"{where}: {path}: holds no checkpoint (no {tracker.name}): give the folder that"
            " `save` named, not one of its iter_… folders"
        )
    latest = tracker.read_bytes().decode(errors="replace").strip()
    if latest != "release" and not _is_iteration(latest):
        raise UserError(
            f"{where}: {path}: {tracker.name} holds {latest[:40]!r}, which is no iteration (was"
            f" it half-written?): {_remedy(folder)}"
        )
    name = str(step) if step is not None else latest
    inside = folder / (name if name == "release" else f"iter_{int(name):07d}")
    if not inside.is_dir():
        found = sorted(p.name for p in folder.glob("iter_*"))
        known = f" (there are {', '.join(found[-5:])})" if found else ""
        advice = _remedy(folder) if step is None else "give another ckpt_step, or restore it"
        raise UserError(f"{where}: {path}: has no {inside.name}{known}: {advice}")
    damage = _damage(inside)
    if damage is not None:
        raise UserError(f"{where}: {inside}: {damage}: {_remedy(folder, but=inside)}")


def _is_iteration(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _remedy(folder: Path, but: Path | None = None) -> str:
    """What to do about a checkpoint that cannot be used."""
    whole = [
        path
        for path in sorted(folder.glob("iter_*"))
        if path != but and path.is_dir() and _damage(path) is None
    ]
    if not whole:
        return "restore it, or give another folder"
    number = whole[-1].name.removeprefix("iter_").lstrip("0") or "0"
    return f"to go on from {whole[-1].name}, write {number} into {folder / _TRACKER}"


def _damage(inside: Path) -> str | None:
    """What is wrong with the files of one checkpoint, as far as names and sizes tell; or None."""
    names = {path.name for path in inside.iterdir()}
    if not names:
        return "the checkpoint is empty"
    marks = {"metadata.json", ".metadata", "common.pt"}
    if not names & marks and not any(name.endswith(".distcp") for name in names):
        return None  # an older format, a file for each rank
    missing = sorted({"metadata.json", ".metadata"} - names)
    if missing:
        return f"the checkpoint lacks {missing[0]}, so it was not written to its end"
    try:
        json.loads((inside / "metadata.json").read_bytes())
    except ValueError:
        return "its metadata.json is damaged"
    if "common.pt" in names and not zipfile.is_zipfile(inside / "common.pt"):
        return "its common.pt is damaged"
    return _damaged_shard(inside)


def _damaged_shard(inside: Path) -> str | None:
    """The first file that is shorter than what `.metadata` says lies in it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        stored = FileSystemReader(str(inside)).read_metadata().storage_data or {}
    except OSError:
        raise
    except Exception:  # a damaged pickle may raise any
        return "its .metadata is damaged"
    ends: dict[str, int] = {}
    for piece in stored.values():
        name = piece.relative_path
        ends[name] = max(ends.get(name, 0), piece.offset + piece.length)
    for name, end in sorted(ends.items()):
        file = inside / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            return f"the checkpoint lacks {name}"
        if size < end:
            return f"its {name} has {size:,} of at least {end:,} bytes"
    return None
