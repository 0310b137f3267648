"""Recomputing activations in some passes only.

Extra passes multiply the activations in flight. Recomputing only those keeps ordinary K = 1
steps at full speed, while the rare deep batches do not set the memory of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

__all__ = ["RecomputeSwitch"]

Mode = Literal["never", "extra", "all"]


class RecomputeSwitch:
    """Sets Megatron's full recomputation on or off for each forward.

    Megatron reads ``recompute_granularity`` in the forward only, so the backward needs no care.
    The model must have been built with full, uniform recomputation for the switch to have its
    method and layer count.

    Args:
        mode: for every K, or a mapping from K to a mode (K that are not in it: ``"never"``).
            ``"extra"`` recomputes passes 2..K, ``"all"`` every pass.
        config: the model's ``TransformerConfig``; untouched if the mode is ``"never"``.
    """

    def __init__(self, mode: Mode | Mapping[int, Mode], config: Any) -> None:
        self.mode = mode
        self.config = config

    @property
    def active(self) -> bool:
        modes = [self.mode] if isinstance(self.mode, str) else self.mode.values()
        return any(mode != "never" for mode in modes)

    def recomputed(self, k: int, passes: int) -> bool:
        """Whether pass ``k`` of ``passes`` is recomputed."""
        mode = self.mode if isinstance(self.mode, str) else self.mode.get(passes, "never")
        return mode == "all" or (mode == "extra" and k > 1)

    @contextmanager
    def visit(self, k: int, passes: int) -> Iterator[None]:
        """Around the forward of one chunk visit."""
        if not self.active:
            yield
            return
        self.config.recompute_granularity = "full" if self.recomputed(k, passes) else None
        try:
            yield
        finally:
            self.config.recompute_granularity = None
