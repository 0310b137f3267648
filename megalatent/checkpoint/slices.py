"""Moving tensors between files and memory block by block.

A tensor may be gigabytes: what is held besides it stays at a few blocks of 16 MiB.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, cast

import torch
from torch import Tensor

__all__ = ["BLOCK", "Window", "blocks", "contiguous_start", "read_box", "same_bits", "same_blocks"]

BLOCK = 1 << 24  # bytes


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor in order, as contiguous one-dimensional pieces of a block at most.

    Rows of a tensor that is not contiguous are made so one at a time.
    """
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, BLOCK // tensor.element_size()))
    elif tensor.dim() == 1:
        for piece in tensor.split(max(1, BLOCK // tensor.element_size())):
            yield piece.contiguous()
    else:
        for row in tensor:
            yield from blocks(row)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def same_blocks(tensor: Tensor, other: Callable[[int, int], Tensor]) -> bool:
    """Whether a tensor equals another one to the last bit.

    Args:
        other: (first element, number of elements) -> those of the other one, one-dimensional.
    """
    first = 0
    for block in blocks(tensor):
        if not same_bits(block, other(first, block.numel())):
            return False
        first += block.numel()
    return True


def read_box(
    stream: BinaryIO,
    offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    starts: Sequence[int],
    target: Tensor,
) -> None:
    """Copy a part of a contiguous array in a file into a tensor, which may have another dtype.

    Args:
        offset: bytes before the array.
        shape: of the array.
        starts: where the part begins; its size is that of `target`, which may be a view.

    Raises:
        EOFError: the file ends too early.
    """
    if not shape:
        shape, starts, target = (1,), (0,), target.view(1)
    row = dtype.itemsize * torch.Size(shape[1:]).numel()
    step = BLOCK // row if row else target.shape[0]
    if step == 0 and len(shape) > 1:  # a row is larger than a block
        for i, part in enumerate(target, starts[0]):
            read_box(stream, offset + i * row, dtype, shape[1:], starts[1:], part)
        return
    for first in range(0, target.shape[0], max(step, 1)):
        part = target[first : first + max(step, 1)]
        data = bytearray(len(part) * row)
        stream.seek(offset + (starts[0] + first) * row)
        if stream.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise EOFError
        if not data:
            continue
        source = torch.frombuffer(data, dtype=dtype).view(len(part), *shape[1:])
        for axis in range(1, len(shape)):
            source = source.narrow(axis, starts[axis], part.shape[axis])
        part.copy_(source)


class Window(io.RawIOBase):
    """A part of a file as a file of its own, to read."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length = stream, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self._length - self._at))
        self._stream.seek(self._start + self._at)
        data = self._stream.read(count)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def contiguous_start(window: Window, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """Where the elements of a tensor saved by `torch.save` begin in its file, checksums checked.

    Returns:
        Bytes before the first element; None if they do not stand there row by row.

    Raises:
        Exception: of any kind, if it is not such a file of such a tensor, or is damaged.
    """
    with zipfile.ZipFile(window) as archive:
        if (bad := archive.testzip()) is not None:  # torch does not compare its checksums
            raise zipfile.BadZipFile(bad)
        records = [info for info in archive.infolist() if "/data/" in info.filename]
    window.seek(0)
    with torch.serialization.skip_data():  # pages that nobody writes to take no memory
        tensor = torch.load(cast(BinaryIO, window), map_location="cpu", weights_only=True)
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError("another tensor")
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        return None
    if not tensor.is_contiguous() or records[0].file_size < tensor.numel() * dtype.itemsize:
        return None
    window.seek(records[0].header_offset + 26)
    lengths = bytearray(4)
    window.readinto(lengths)
    name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    skipped = tensor.storage_offset() * dtype.itemsize
    return records[0].header_offset + 30 + name + extra + skipped
