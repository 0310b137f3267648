"""Writing converted models: safetensors shards and torch_dist checkpoints, tensor by tensor.

Everything is written into a folder beside the final one and renamed when it is complete, so that a
half-written model never stands under the name that was asked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megalatent import __version__
from megalatent.checkpoint.reader import DTYPES, MANIFEST
from megalatent.checkpoint.slices import BLOCK, blocks
from megalatent.errors import UserError

__all__ = ["Staging", "StackedTensor", "hash_file", "write_checkpoint", "write_safetensors"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Staging:
    """The folder in which an output grows until it is complete.

    Args:
        final: where the output is to appear.
        made_from: what decides the result; work found from an earlier, interrupted run is kept
            only if it was made from the same.
        overwrite: an earlier conversion at `final` is replaced, at the very end.

    Raises:
        UserError: there is something at `final` that must not be replaced, or another process
            converts to the same place.
    """

    def __init__(self, final: Path, made_from: Mapping[str, Any], overwrite: bool) -> None:
        # Where links lead: the link itself must stay, and its target may be on another disk.
        self.final = Path(os.path.realpath(final))
        self.folder = self.final.parent / f".{self.final.name}.converting"
        self._made_from = json.loads(json.dumps(made_from))
        self._overwrite = overwrite
        _check_replaceable(self.final, overwrite)
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another process is converting to {final}: wait for it, or choose another folder"
            ) from None
        self.done: dict[str, dict[str, Any]] = {}
        self._resume()

    def _resume(self) -> None:
        try:
            state = json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            state = {}
        if state.get("made_from") == self._made_from:
            for name, entry in state["done"].items():
                file = self.folder / name
                if file.is_file() and hash_file(file) == entry:
                    self.done[name] = entry
        for path in self.folder.iterdir():
            if path.name != "lock" and path.name not in self.done:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._save_state()

    def _save_state(self) -> None:
        state = {"made_from": self._made_from, "done": self.done}
        temporary = self.folder / "state.tmp"
        temporary.write_text(json.dumps(state))
        temporary.replace(self.folder / "state.json")

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Note that a file is complete, so that it need not be written again."""
        self.done[name] = entry
        self._save_state()

    def require_space(self, size: int) -> None:
        """Raise UserError unless `size` bytes, less what is there already, fit on the disk."""
        have = sum(entry["bytes"] for entry in self.done.values())
        free = shutil.disk_usage(self.folder).free
        needed = size - have + (16 << 20)  # configuration, code and tokenizer
        if free < needed:
            raise UserError(
                f"{self.final.parent} has {free / 1e9:.2f} GB free and the conversion needs"
                f" {needed / 1e9:.2f} GB: free some space or choose another folder"
            )

    def finish(self, details: Mapping[str, Any]) -> None:
        """Write the manifest and give the output its final name.

        Raises:
            UserError: meanwhile something appeared there that must not be replaced.
        """
        _check_replaceable(self.final, self._overwrite)
        (self.folder / "state.json").unlink()
        files = {
            str(path.relative_to(self.folder)): self.done.get(path.name) or hash_file(path)
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.name != "lock"
        }
        manifest = {"megalatent": __version__, **details, "files": files}
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        old = self.final.parent / f".{self.final.name}.replaced"
        if self.final.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.final.rename(old)
        self.folder.rename(self.final)
        # Not before: whoever finds the folder under its first name must find it locked.
        (self.final / "lock").unlink()
        self._lock.close()
        shutil.rmtree(old, ignore_errors=True)
        if old.exists():
            print(
                f"megalatent: note: {old}, the conversion that stood there before, cannot be"
                " deleted: remove it",
                file=sys.stderr,
            )

    def close(self) -> None:
        """Let go of an unfinished folder; it stays for the next attempt."""
        self._lock.close()


def _check_replaceable(final: Path, overwrite: bool) -> None:
    if final.is_symlink():
        raise UserError(f"{final}: its links lead back to themselves: choose another folder")
    if final.is_mount():
        raise UserError(
            f"{final} is where a disk is mounted, and cannot be replaced by a finished folder:"
            " choose a folder inside it"
        )
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{final} exists: choose another folder, or give --overwrite")
    if not (final / MANIFEST).exists():
        raise UserError(
            f"{final} exists and is no earlier conversion (it has no {MANIFEST}): --overwrite"
            " replaces nothing else; choose another folder"
        )


def hash_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as they stand in the manifest."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_safetensors(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    progress: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Write one shard, holding one tensor at a time.

    Args:
        entries: name, dtype and shape of each tensor, in the order of `tensors`, which may be
            views of another shape.

    Returns:
        Size and SHA-256.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        size = dtype.itemsize * torch.Size(shape).numel()
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    digest = hashlib.sha256()
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        for block in (len(text).to_bytes(8, "little"), text):
            stream.write(block)
            digest.update(block)
        for (name, dtype, shape), tensor in zip(entries, tensors, strict=True):
            assert tensor.dtype == dtype, name
            assert tensor.numel() == torch.Size(shape).numel(), name
            for part in blocks(tensor):
                data = memoryview(part.view(torch.uint8).numpy())
                stream.write(data)
                digest.update(data)
                progress(len(data))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


@dataclass(frozen=True, kw_only=True)
class StackedTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: with its leading axes.
        stacked: number of leading axes (layer, expert) along which it is made piece by piece.
        make: leading indices -> the piece, leading axes left out; a tensor of its own, whose
            memory is freed when the next one is asked for.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stacked: int
    make: Callable[[tuple[int, ...]], Tensor]


class _Planner(DefaultSavePlanner):
    """Asks for each piece when it is written, not before."""

    def __init__(
        self, tensors: Mapping[str, StackedTensor], progress: Callable[[int], None]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._progress = progress
        self._written: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        objects = super().create_local_plan()
        items = list(objects.items)
        for key, tensor in self._tensors.items():
            rest = tensor.shape[tensor.stacked :]
            for index in itertools.product(*(range(n) for n in tensor.shape[: tensor.stacked])):
                offsets = torch.Size([*index, *([0] * len(rest))])
                chunk = ChunkStorageMetadata(offsets, torch.Size([*([1] * len(index)), *rest]))
                data = TensorWriteData(
                    chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
                )
                items.append(
                    WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = SavePlan(items, planner_data=objects.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        tensor, offsets = self._tensors[write_item.index.fqn], write_item.index.offset
        assert offsets is not None
        assert write_item.tensor_data is not None
        if self._written is not None:
            # torch's writer holds on to a tensor of every key until the file is complete.
            self._written.untyped_storage().resize_(0)
        piece = self._written = tensor.make(tuple(offsets[: tensor.stacked]))
        self._progress(piece.numel() * piece.element_size())
        return piece.reshape(write_item.tensor_data.chunk.sizes)


def write_checkpoint(
    root: Path,
    tensors: Mapping[str, StackedTensor],
    common: Mapping[str, Any],
    empty_objects: Iterable[str],
    progress: Callable[[int], None] = lambda n: None,
) -> Path:
    """Write a release checkpoint in torch_dist format; Megatron loads it in any layout.

    Args:
        root: the checkpoint's folder, with the tracker file.
        common: what is the same on all ranks, `args` included.
        empty_objects: keys that Megatron asks for and that hold nothing (`_extra_state`).

    Returns:
        The folder inside that holds the tensors.
    """
    folder = root / "release"
    folder.mkdir(parents=True)
    # Megatron keeps an object in a list of one.
    objects = {"common_state/shard_0_1": [dict(common)]} | {key: [None] for key in empty_objects}
    try:
        _save(folder, objects, _Planner(tensors, progress))
    except CheckpointException as error:  # no Exception, and it hides a disk that is full
        raise _cause(error) from None
    format_ = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(format_))
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def _save(folder: Path, objects: dict[str, Any], planner: _Planner) -> None:
    save(
        objects,
        storage_writer=FileSystemWriter(
            str(folder),
            single_file_per_rank=True,
            thread_count=1,
            sync_files=True,
            per_thread_copy_ahead=0,  # a piece is written before the next one is asked for
        ),
        planner=planner,
        no_dist=True,
    )


def _cause(error: CheckpointException) -> BaseException:
    """What torch's writer failed of: its own error comes after the one that stopped it."""
    last = next(iter(error.failures.values()))[0]
    cause: BaseException | None = last
    while cause is not None:
        if isinstance(cause, (OSError, UserError, KeyboardInterrupt)):
            return cause
        cause = cause.__cause__ or cause.__context__
    return last
