"""Kernels of the fusion: what stands between the matrix products, in one trip to memory.

`select` chooses the implementation (compiled op, Triton or plain PyTorch) and says so once. The
names load on first use, so that `megalatent.kernels.philox_scalar` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalatent.kernels.backend import Backend, KernelSetting
    from megalatent.kernels.choice import select

__all__ = ["Backend", "KernelSetting", "select"]

_HOMES = {
    "Backend": "megalatent.kernels.backend",
    "KernelSetting": "megalatent.kernels.backend",
    "select": "megalatent.kernels.choice",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
