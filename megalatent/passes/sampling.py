"""How many passes each micro-batch gets.

A schedule is a list of phases, each with a start and a mixture over K. K is drawn from
(seed, iteration, micro-batch index) alone: every rank draws the same list without talking, and a
restarted run draws what the uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megalatent.kernels.philox_scalar import philox4x32_scalar

__all__ = ["PassSampler", "Phase", "pass_weight"]

_PASSES_DOMAIN = 0x70617373  # "pass"


@dataclass(frozen=True)
class Phase:
    """From iteration ``start`` on, K is drawn from ``mixture`` (K -> share, summing to 1)."""

    start: int
    mixture: Mapping[int, float]


def _phases(
    schedule: Sequence[tuple[int | float, Mapping[int, float]]], train_iters: int
) -> list[Phase]:
    """Resolve fractional starts; they count in ``train_iters``."""
    return [
        Phase(round(start * train_iters) if isinstance(start, float) else start, dict(mixture))
        for start, mixture in schedule
    ]


class PassSampler:
    """Draws the passes of a step.

    Args:
        schedule: ``(start, mixture)`` pairs in ascending order of start; an int start is an
            iteration, a float one a fraction of ``train_iters``.
        train_iters: iterations of the whole run.
        seed: seed of the run.
        draw: ``"batch"`` gives every micro-batch of a step the same K, ``"micro_batch"`` draws
            for each.
    """

    def __init__(
        self,
        schedule: Sequence[tuple[int | float, Mapping[int, float]]],
        *,
        train_iters: int,
        seed: int,
        draw: Literal["batch", "micro_batch"] = "batch",
    ) -> None:
        self.phases = _phases(schedule, train_iters)
        self.seed = seed
        self.draw = draw

    def phase(self, iteration: int) -> Phase:
        """The phase that ``iteration`` (0-based) falls in."""
        return [phase for phase in self.phases if phase.start <= iteration][-1]

    def passes(self, iteration: int, micro_batches: int) -> tuple[int, ...]:
        """K of each micro-batch of a step."""
        mixture = self.phase(iteration).mixture
        if self.draw == "batch":
            return (self._draw(mixture, iteration, 0),) * micro_batches
        return tuple(self._draw(mixture, iteration, index) for index in range(micro_batches))

    def _draw(self, mixture: Mapping[int, float], iteration: int, index: int) -> int:
        key = (self.seed & 0xFFFFFFFF, ((self.seed >> 32) & 0xFFFFFFFF) ^ _PASSES_DOMAIN)
        word = philox4x32_scalar(*key, index, 0, iteration & 0xFFFFFFFF, iteration >> 32)[0]
        uniform = word / 2**32
        cumulative = 0.0
        passes = [k for k, share in sorted(mixture.items()) if share > 0]
        for k in passes:
            cumulative += mixture[k]
            if uniform < cumulative:
                return k
        return passes[-1]  # the shares sum to 1 only up to rounding


def pass_weight(k: int, passes: int, *, weighting: Literal["mean", "sum"], lambda_: float) -> float:
    """Weight ``w_k`` of everything that belongs to pass ``k`` of ``passes``.

    ``mean``: FBT eq. 12, ``w_1 = 1`` and ``lambda / (K - 1)`` for each further pass.
    ``sum``: Recycler eq. 4, every pass weighs 1.
    """
    if k == 1 or weighting == "sum":
        return 1.0
    return lambda_ / (passes - 1)
