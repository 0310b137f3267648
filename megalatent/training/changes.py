"""What differs between a checkpoint's options and the run's: resuming then changes the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalatent.config import PhaseConfig
from megalatent.config_passes import phase_starts

__all__ = ["changes"]


def changes(checkpoint_args: Any, args: Any, phases: Sequence[PhaseConfig]) -> list[str]:
    """Lines for the log.

    Args:
        checkpoint_args: Megatron's arguments in the checkpoint.
        args: those of the run; both have ours as ``latent_config``.
        phases: of the run.
    """
    before = getattr(checkpoint_args, "latent_config", None)
    if before is None:
        return []
    old, new = _flat(before), _flat(args.latent_config)
    # An option that the checkpoint's version did not have changes nothing by its default.
    changed = [
        f"latent.{key}: {old[key]!r} -> {value!r}"
        for key, value in new.items()
        if key in old and old[key] != value
    ]
    lines = []
    if changed:
        lines.append(f" latent options changed since the checkpoint: {'; '.join(changed)}")
    was = getattr(checkpoint_args, "train_iters", None)
    if was and args.train_iters and was != args.train_iters:
        starts = [phase_starts(phases, iterations) for iterations in (was, args.train_iters)]
        if starts[0] != starts[1]:
            lines.append(
                f" train_iters changed since the checkpoint: {was} -> {args.train_iters}; phases"
                f" that start at a fraction of it begin at iterations {_listed(starts[1])} instead"
                f" of {_listed(starts[0])}"
            )
    return lines


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`passes.draw` -> value: sections are taken apart, mappings from K are values."""
    result: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _listed(starts: Sequence[int]) -> str:
    return ", ".join(map(str, starts))
