"""How a name of torch or Megatron is replaced: one row per name, applied once, undone never."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Patch", "PatchError", "apply", "original", "resolve"]


class PatchError(RuntimeError):
    """A name to be patched is missing or has changed: the installed version is not known."""


@dataclass(frozen=True)
class Patch:
    """One replaced name.

    `make` takes the original and returns the replacement. `parameters` are the names of the
    original's parameters, in order; None where torch documents no Python signature.
    """

    module: str
    attribute: str
    reason: str
    make: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


_ORIGINALS: dict[str, Any] = {}


def resolve(patch: Patch) -> tuple[Any, str]:
    """The object that holds the patched name, and the last part of the name.

    Raises:
        PatchError: the module or the name does not exist.
    """
    try:
        holder: Any = importlib.import_module(patch.module)
    except ImportError as error:
        raise PatchError(f"{patch.name}: cannot import {patch.module}: {error}") from error
    *path, last = patch.attribute.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    if holder is None or not hasattr(holder, last):
        raise PatchError(
            f"{patch.name} does not exist in the installed version; it is patched because: "
            f"{patch.reason}"
        )
    return holder, last


def original(patch: Patch) -> Any:
    """What the name meant before it was patched (what it means now, if it is not patched)."""
    if patch.name in _ORIGINALS:
        return _ORIGINALS[patch.name]
    holder, last = resolve(patch)
    return getattr(holder, last)


def apply(patches: Iterable[Patch]) -> None:
    """Replace each name that is not yet replaced.

    Raises:
        PatchError: a name is missing, or its parameters are not those the patch was written for.
    """
    for patch in patches:
        if patch.name in _ORIGINALS:
            continue
        holder, last = resolve(patch)
        before = getattr(holder, last)
        if patch.parameters is not None:
            found = tuple(inspect.signature(before).parameters)
            if found != patch.parameters:
                raise PatchError(
                    f"{patch.name} takes {found}, expected {patch.parameters}: "
                    "the installed version is not the one this patch was written for"
                )
        setattr(holder, last, patch.make(before))
        _ORIGINALS[patch.name] = before
