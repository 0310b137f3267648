"""Reading tensors one at a time: from torch_dist checkpoints and from safetensors folders.

Both readers know every tensor's shape before they read any, read only what they are asked for,
and name the file and what is wrong with it. Neither needs a process group.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megalatent.checkpoint.slices import BLOCK, Window, contiguous_start, read_box
from megalatent.errors import UserError

__all__ = ["DTYPES", "MANIFEST", "CheckpointReader", "SafetensorsReader", "check_manifest"]

MANIFEST = "conversion.json"
DTYPES = {  # as safetensors calls them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# State of the trainer, in whose place a converted model has nothing.
_NOT_MODEL = re.compile(r"^(chained_\d+\.)?optimizer\.|^(rng_state|rerun_state_machine)")


def check_manifest(
    folder: Path, part: str = "", progress: Callable[[int], None] = lambda n: None
) -> bool:
    """Compare a converted folder's files with the sizes and hashes written when it was made.

    Args:
        part: folder inside whose files alone are looked at; all, if it is empty.

    Returns:
        Whether there is a manifest.

    Raises:
        UserError: a file is missing, or is not what was written.
    """
    path = folder / MANIFEST
    if not path.exists():
        return False
    try:
        files = {
            str(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in json.loads(path.read_text())["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged: copy the folder again") from None
    remedy = f"copy the folder again, or delete {MANIFEST} if the change is yours"
    for name, (size, sha256) in files.items():
        if part and Path(name).parts[:1] != (part,):
            continue
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing, and {MANIFEST} lists it: {remedy}")
        if file.stat().st_size != size:
            raise UserError(
                f"{file} has {file.stat().st_size} bytes and had {size} when it was written:"
                f" {remedy}"
            )
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                progress(len(block))
        if digest.hexdigest() != sha256:
            raise UserError(
                f"{file} has another SHA-256 than {MANIFEST} says, it was changed or damaged:"
                f" {remedy}"
            )
    return True


class CheckpointReader:
    """A Megatron checkpoint of any layout, in torch_dist format.

    Args:
        folder: an iteration's folder, or the folder of all iterations, of which the last counts.

    Raises:
        UserError: it is no such checkpoint, or is not complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _iteration_folder(folder)
        try:
            self._metadata = FileSystemReader(str(self.folder)).read_metadata()
        except PermissionError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.folder}/.metadata cannot be read ({type(error).__name__}: {error}): the"
                " checkpoint is damaged or half-written"
            ) from None
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not _NOT_MODEL.match(key)
        }
        self._by_first: dict[str, dict[int, list[ChunkStorageMetadata]]] = {}
        # Where the elements of chunks begin, once their checksums are checked; None: see there.
        self._starts: dict[MetadataIndex, int | None] = {}
        self._check_files()

    def _check_files(self) -> None:
        """Raise UserError for a file that is missing or too short, before anything is read."""
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), end)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"{path} is missing: the checkpoint is not complete")
            path.open("rb").close()  # may it be read?
            if path.stat().st_size < end:
                raise UserError(
                    f"{path} is truncated or damaged: it has {path.stat().st_size} bytes and should"
                    f" have {end}"
                )

    def args(self) -> Any:
        """Megatron's arguments. Imports Megatron."""
        from megatron.core.dist_checkpointing import load_common_state_dict
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            common = load_common_state_dict(str(self.folder))
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise UserError(
                f"{self.folder}: its common state cannot be read ({type(error).__name__}): the"
                " checkpoint is damaged or half-written"
            ) from None
        if "args" not in common:
            raise UserError(
                f"{self.folder} does not carry Megatron's arguments, which say how the model is"
                " built: save it again with them"
            )
        return common["args"]

    def locate(self, template: str, layer: int | None, expert: int | None) -> tuple[str, list[int]]:
        """Key of a tensor and its index along the key's leading axes (layer, expert).

        Layers are stacked in one tensor, or have keys of their own where they differ.
        """
        index = [] if expert is None else [expert]
        if layer is None:
            return template, index
        own = template.replace("{layer}", str(layer))
        if own in self.tensors:
            return own, index
        return template.replace("{layer}.", ""), [layer, *index]

    def read(
        self,
        key: str,
        index: list[int],
        rows: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """One layer's (and expert's) part of a tensor; nothing else is held in memory.

        Args:
            rows: the first row and the number of rows; None for all.
            dtype: to convert to on the way.

        Raises:
            UserError: a file is missing or damaged.
        """
        entry = self.tensors[key]
        first = [*index, *([0] * (len(entry.size) - len(index)))]
        size = [*([1] * len(index)), *entry.size[len(index) :]]
        if rows is not None:
            first[len(index)], size[len(index)] = rows
        out = torch.empty(size, dtype=dtype or entry.properties.dtype)
        filled = 0
        for chunk in self._chunks(key, index):
            starts = [max(a, b) for a, b in zip(first, chunk.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(first, size, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            target = out
            for axis, (start, end) in enumerate(zip(starts, ends, strict=True)):
                target = target.narrow(axis, start - first[axis], end - start)
            inside = [start - b for start, b in zip(starts, chunk.offsets, strict=True)]
            self._copy(MetadataIndex(key, chunk.offsets), tuple(chunk.sizes), inside, target)
            filled += target.numel()
        if filled != out.numel():
            raise UserError(
                f"{self.folder}: {filled} of {out.numel()} elements of {key} {index} are in the"
                " checkpoint: it is half-written"
            )
        return out.view(size[len(index) :])

    def _chunks(self, key: str, index: list[int]) -> Sequence[ChunkStorageMetadata]:
        """Those of a tensor's chunks that hold the index of its first axis, if there is one."""
        chunks = self.tensors[key].chunks
        if not index:
            return chunks
        if key not in self._by_first:  # a model with experts has thousands of chunks a tensor
            by_first = self._by_first[key] = defaultdict(list)
            for chunk in chunks:
                for i in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    by_first[i].append(chunk)
        return self._by_first[key][index[0]]

    def _copy(
        self, index: MetadataIndex, shape: tuple[int, ...], starts: list[int], target: Tensor
    ) -> None:
        """Copy a part of a chunk into a tensor, from where it stands in a file."""
        stored = self._metadata.storage_data.get(index)
        if stored is None:
            raise UserError(f"{self.folder}/.metadata has no place for {index.fqn}: it is damaged")
        if getattr(stored, "transform_descriptors", None):
            raise UserError(
                f"{self.folder}: {index.fqn} is stored with {stored.transform_descriptors}, which"
                " cannot be read here: save the checkpoint without"
            )
        path = self.folder / stored.relative_path
        with path.open("rb") as stream:
            try:
                window = Window(stream, stored.offset, stored.length)
                dtype = self.tensors[index.fqn].properties.dtype
                if index not in self._starts:
                    self._starts[index] = contiguous_start(window, dtype, shape)
                start = self._starts[index]
                if start is None:
                    window.seek(0)
                    source = torch.load(
                        cast(BinaryIO, window), map_location="cpu", weights_only=True
                    )
                    for axis, first in enumerate(starts):
                        source = source.narrow(axis, first, target.shape[axis])
                    target.copy_(source)
                else:
                    read_box(stream, stored.offset + start, dtype, shape, starts, target)
            except MemoryError:
                raise
            except Exception as error:
                raise UserError(
                    f"{path} is truncated or damaged: {stored.length} bytes at {stored.offset}, of"
                    f" {index.fqn}, are not what was written ({type(error).__name__})"
                ) from None


def _iteration_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give a Megatron checkpoint")
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not (folder / ".metadata").exists() and tracker.exists():
        text = tracker.read_text("ascii", "backslashreplace").strip()
        if text != "release" and not text.isdigit():
            raise UserError(f"{tracker} holds {text!r}, no iteration: give one iteration's folder")
        folder = folder / (text if text == "release" else f"iter_{int(text):07d}")
    for name in (".metadata", "metadata.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it is not a complete torch_dist checkpoint")
    return folder


class SafetensorsReader:
    """The weights of a Hugging Face model, in one file or in shards with an index.

    Where there are both, the file counts, as for transformers.

    Raises:
        UserError: there are none, or a file is missing, truncated or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[Path, int, int]] = {}
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").is_file():
            self._read_header(folder / "model.safetensors")
        elif index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                listed = {str(tensor): str(file) for tensor, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{index} is damaged: download the model again") from None
            for name in sorted(set(listed.values())):
                self._read_header(folder / name)
            for tensor, file in listed.items():
                if tensor not in self._places or self._places[tensor][0].name != file:
                    raise UserError(f"{tensor} is not in {folder / file}, where {index.name} says")
        else:
            raise UserError(
                f"{folder} has no model.safetensors and no model.safetensors.index.json: give a"
                " folder with a model in safetensors format"
            )

    def read(self, name: str) -> Tensor:
        dtype, shape = self.tensors[name]
        out = torch.empty(shape, dtype=dtype)
        self.fill(name, out)
        return out

    def fill(self, name: str, target: Tensor) -> None:
        """Read a tensor into a view of any shape, with the same elements in the same order."""
        self._read_into(name, 0, target)

    def elements(self, name: str, first: int, count: int) -> Tensor:
        """A run of a tensor's elements, one-dimensional."""
        out = torch.empty(count, dtype=self.tensors[name][0])
        self._read_into(name, first, out)
        return out

    def _read_into(self, name: str, first: int, target: Tensor) -> None:
        dtype, _ = self.tensors[name]
        path, start, _ = self._places[name]
        offset, zeros = start + first * dtype.itemsize, [0] * target.dim()
        with path.open("rb") as stream:
            try:
                read_box(stream, offset, dtype, target.shape, zeros, target)
            except EOFError:
                raise UserError(f"{path} is truncated: {name} is not all there") from None

    def _read_header(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path} is missing: the model is not complete")
        total = path.stat().st_size
        try:
            with path.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size)) if 0 < size <= total - 8 else None
            if not isinstance(header, dict):
                raise ValueError
            header.pop("__metadata__", None)
            entries = {name: _header_entry(entry) for name, entry in header.items()}
            end = 0
            for first, last in sorted(entry[2:] for entry in entries.values()):
                if first != end:
                    raise ValueError
                end = last
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is truncated or damaged: its header cannot be read") from None
        if total != 8 + size + end:
            raise UserError(
                f"{path} has {total} bytes and should have {8 + size + end}: it is truncated or"
                " damaged"
            )
        for name, (dtype, shape, first, last) in entries.items():
            if name in self.tensors:
                raise UserError(
                    f"{name} stands in {self._places[name][0].name} and in {path}: download the"
                    " model again"
                )
            if dtype not in DTYPES:
                raise UserError(
                    f"{path}: {name} has dtype {dtype}, which does not convert (only "
                    f"{', '.join(DTYPES)})"
                )
            self.tensors[name] = (DTYPES[dtype], shape)
            self._places[name] = (path, 8 + size + first, last - first)


def _header_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, first byte and the one after the last of a tensor in a safetensors header.

    Raises:
        ValueError, KeyError, TypeError: they are not there, or do not fit each other.
    """
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError
    if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError
    return dtype, shape, first, last
