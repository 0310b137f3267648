"""The pass schedule of a config: phases, each with a mixture over the number of passes K."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from megalatent.config_values import choose, describe, require
from megalatent.errors import UserError

__all__ = ["PhaseConfig", "check_passes", "read_mixture", "read_schedule"]


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """From `start` on, K is drawn from `mixture`.

    Attributes:
        start: an iteration (int), or a fraction of `train_iters` in [0, 1) (float).
        mixture: share of each number of passes K >= 1; the shares sum to 1.
    """

    start: int | float
    mixture: Mapping[int, float]


def read_mixture(value: object, where: str) -> dict[int, float]:
    if not isinstance(value, Mapping) or not value:
        raise UserError(
            f"{where}: {describe(value)} is not a mixture of passes:"
            " write passes and shares, for example {1: 0.75, 2: 0.25}"
        )
    mixture: dict[int, float] = {}
    for passes, share in value.items():
        if isinstance(passes, str) and share is None and ":" in passes:
            raise UserError(
                f"{where}: {passes!r} lacks the space after its colon:"
                f" write {passes.replace(':', ': ')}"
            )
        check_passes(passes, where)
        ok = isinstance(share, (int, float)) and not isinstance(share, bool)
        require(
            ok and 0 <= share <= 1,
            f"{where}.{passes}",
            share,
            "is not a share",
            "give a number from 0 to 1",
        )
        mixture[passes] = float(share)
    total = math.fsum(mixture.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise UserError(f"{where}: the shares {dict(mixture)} sum to {total:g}: they must sum to 1")
    return dict(sorted(mixture.items()))


def check_passes(value: object, where: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(ok, where, value, "is no number of passes", "give a whole number K >= 1")


def read_schedule(value: object, where: str) -> tuple[PhaseConfig, ...]:
    """A list of phases, or one mixture for the whole run, or one K for the whole run."""
    if isinstance(value, Mapping) and not {"start", "mixture"} & set(value):
        return (PhaseConfig(start=0, mixture=read_mixture(value, where)),)
    if not isinstance(value, list):
        check_passes(value, where)
        assert isinstance(value, int)
        return (PhaseConfig(start=0, mixture={value: 1.0}),)
    require(bool(value), where, value, "is empty", "give at least one phase")
    phases = tuple(_read_phase(phase, f"{where}.{i}") for i, phase in enumerate(value))
    if phases[0].start != 0:
        raise UserError(
            f"{where}.0.start: the first phase starts at {phases[0].start}: it must start at 0"
        )
    for i, (before, after) in enumerate(itertools.pairwise(phases), 1):
        # A fraction and an iteration can be compared only when the length of the run is known.
        comparable = type(before.start) is type(after.start) or before.start == 0
        if comparable and after.start <= before.start:
            raise UserError(
                f"{where}.{i}.start: {after.start} does not come after {before.start}:"
                " order the phases by their start"
            )
    return phases


def _read_phase(value: object, where: str) -> PhaseConfig:
    if not isinstance(value, Mapping) or "mixture" not in value or "start" not in value:
        raise UserError(
            f"{where}: {describe(value)} is no phase:"
            " write {start: 0, mixture: {1: 0.75, 2: 0.25}}"
        )
    for key in value:
        choose(key, ["start", "mixture"], where, "key of a phase")
    start = value["start"]
    if isinstance(start, float):
        require(
            0 <= start < 1,
            f"{where}.start",
            start,
            "is no fraction of the run",
            "give a fraction from 0 up to 1 (not 1 itself), or a whole number for an iteration",
        )
    else:
        ok = isinstance(start, int) and not isinstance(start, bool) and start >= 0
        require(
            ok,
            f"{where}.start",
            start,
            "is no start of a phase",
            "give an iteration (whole number) or a fraction of the run (0.5)",
        )
    return PhaseConfig(start=start, mixture=read_mixture(value["mixture"], f"{where}.mixture"))
