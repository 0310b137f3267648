"""Memory of a rank at the ends of actions, and what a forward visit keeps for its backward."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["KeptTensors", "MemoryMeter", "make_meter"]


class MemoryMeter(Protocol):
    """Reads the memory of this process or device; neither waits for the device.

    Attributes:
        kind: "allocated" or "resident", as in `Recording.memory_kind`.
    """

    kind: str

    def read(self) -> tuple[int, int]:
        """Bytes now, and the most since the last call."""


class _Allocated:
    """What torch has allocated on a GPU. Resets the allocator's peak at every reading."""

    kind = "allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> tuple[int, int]:
        # The flat form of the same numbers takes ten times as long to make.
        found = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return found["current"], found["peak"]


class _Resident:
    """Resident memory of the process. There is no peak between two readings to be had."""

    kind = "resident"

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> tuple[int, int]:
        resident = int(os.pread(self._file, 128, 0).split()[1]) * self._page
        return resident, resident


def make_meter(device: torch.device) -> MemoryMeter | None:
    """What measures memory for `device`; None where nothing does."""
    if device.type == "cuda":
        return _Allocated(device)
    try:
        return _Resident()
    except (OSError, ValueError):
        return None


class KeptTensors:
    """Counts the bytes that autograd keeps of what runs `around` it: activations, not weights.

    Each storage counts once. It is for a step of its own: looking at every saved tensor takes time.

    Args:
        weights: tensors that do not count: they are there anyway.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {w.untyped_storage().data_ptr() for w in weights}
        self._seen: dict[int, int] = {}

    def around(self) -> AbstractContextManager:
        """Context whose saved tensors count from zero."""
        self._seen = {}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor


def _unpack(tensor: Any) -> Any:
    return tensor
