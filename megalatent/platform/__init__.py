"""Megatron on machines without a GPU, and the faults of Megatron that bite everywhere.

`install()` is the only entry point: call it before anything else imports Megatron. Where CUDA is
present it applies the upstream fixes and nothing else. Every name it replaces is a row of
`patches()`; what it does not replace fails as it always did.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import torch

from megalatent.platform.patching import Patch, PatchError, apply

__all__ = ["Patch", "PatchError", "install", "install_torch", "on_cpu", "patches"]


def on_cpu() -> bool:
    """True where there is no CUDA device: the CPU is then the device and gloo the network."""
    return not torch.cuda.is_available()


def install_torch() -> None:
    """The part of `install()` that needs no Megatron: `torch.cuda` calls land on the CPU."""
    if not on_cpu():
        return
    # Megatron compiles small functions when it is imported; on a CPU that costs seconds and buys
    # nothing. A value the user has set is left alone.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from megalatent.platform.device import TORCH_PATCHES, enter_host_device_mode

    apply(TORCH_PATCHES)
    enter_host_device_mode()


def install() -> None:
    """Make Megatron run on this machine. Imports Megatron (seconds); safe to call again.

    Raises:
        PatchError: the installed torch or megatron-core lacks a name that is patched, or the name
            takes other parameters than it did in the version this was written for.
    """
    install_torch()
    with _quiet_imports(), _without_modelopt():
        apply(patches())
        importlib.import_module("megatron.training.training")


def patches() -> tuple[Patch, ...]:
    """Every row that applies to this machine, in the order of application."""
    from megalatent.platform.upstream import TORCH_OPTIMIZER_FIXES, UPSTREAM_FIXES

    rows: tuple[Patch, ...] = ()
    if on_cpu():
        from megalatent.platform.device import TORCH_PATCHES
        from megalatent.platform.megatron import MEGATRON_PATCHES

        rows += TORCH_PATCHES + MEGATRON_PATCHES
    rows += UPSTREAM_FIXES
    if not _has_fused_adam():
        rows += TORCH_OPTIMIZER_FIXES
    return rows


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without what is said at every import on a machine without GPU: no apex, no CUDA runtime."""
    extensions = logging.getLogger("torch.utils.cpp_extension")
    level = extensions.level
    with warnings.catch_warnings():
        for message in ("Apex is not", "Transformer Engine and Apex are not", "Only transformer-"):
            warnings.filterwarnings("ignore", message=message)
        extensions.setLevel(logging.ERROR)
        try:
            yield
        finally:
            extensions.setLevel(level)


@contextlib.contextmanager
def _without_modelopt() -> Iterator[None]:
    """Without an import of modelopt that Megatron cannot use.

    `megatron.training` imports modelopt wherever it is installed, which takes every rank seven
    seconds, and then drops it where `megatron.post_training` is missing, as in megatron-core's
    wheel. Later imports find modelopt as usual.
    """
    if "modelopt" in sys.modules or importlib.util.find_spec("megatron.post_training") is not None:
        yield
        return
    sys.modules["modelopt"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["modelopt"]


def _has_fused_adam() -> bool:
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return bool(HAVE_APEX_OR_TE)
