"""The generator that stands for the GPU's on a machine without one.

torch has one CPU generator, and `dropout` always draws from it. Megatron keeps the GPU generator
and the host generator apart: data loading draws from the host's, dropout from the GPU's. Here the
"GPU" generator is a saved state that is swapped in only while something draws from it, so the
number of host draws (a new DataLoader draws one) cannot change dropout, and resume is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["DEVICE_RNG", "DeviceGenerator"]


class DeviceGenerator:
    """State of the generator of the missing device; `drawing()` makes it torch's current one.

    `in_use` turns true when something seeds or sets it as a device generator, as Megatron does.
    Until then dropout draws from the host generator, as it does without this module.
    """

    def __init__(self, seed: int = 0) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._swapped = False
        self.in_use = False

    def get_state(self) -> torch.Tensor:
        return torch.get_rng_state() if self._swapped else self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        if self._swapped:
            torch.set_rng_state(state)
        else:
            self._state = state.clone()

    def manual_seed(self, seed: int) -> None:
        self.set_state(torch.Generator().manual_seed(int(seed)).get_state())

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draws inside come from this generator; the host generator is as before afterwards."""
        if self._swapped:
            yield
            return
        host = torch.get_rng_state()
        torch.set_rng_state(self._state)
        self._swapped = True
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            self._swapped = False
            torch.set_rng_state(host)


DEVICE_RNG = DeviceGenerator()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Stands for `torch.cuda.get_rng_state`."""
    return DEVICE_RNG.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Stands for `torch.cuda.set_rng_state`."""
    DEVICE_RNG.in_use = True
    DEVICE_RNG.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Stands for `torch.cuda.manual_seed`."""
    DEVICE_RNG.in_use = True
    DEVICE_RNG.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Stands for `torch.cuda.manual_seed_all`, which `torch.manual_seed` calls."""
    DEVICE_RNG.manual_seed(seed)
