"""The section `latent.profile:` of a config: steps of a training run to be profiled."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from megalatent.config_paths import check_writable, read_path
from megalatent.config_values import describe, require
from megalatent.errors import UserError

__all__ = ["ProfileConfig", "check_profile"]


def _read_steps(value: object, where: str) -> str | None:
    if value is None:
        return None
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            f"{where}: {describe(value)} is no range of steps: write one as Megatron logs it, or"
            " the first and the last, for example 100-109"
        )
    return f"{first}-{last}"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps of a training run to be profiled; see docs/profiling.md.

    Attributes:
        steps: "FIRST-LAST", counted from 1 as Megatron logs them; None: none.
        output: beginning of the names of the files; None: `profile` in `megatron.save`, or in the
            working folder where nothing is saved.
        replicas: data-parallel replicas to record.
    """

    steps: str | None = field(default=None, metadata={"read": _read_steps})
    output: str | None = field(default=None, metadata={"read": read_path})
    replicas: int = 1

    def __post_init__(self) -> None:
        require(
            self.replicas >= 1,
            "latent.profile.replicas",
            self.replicas,
            "records nothing",
            "give 1 or more",
        )

    @property
    def iterations(self) -> range:
        """The steps, counted from 0."""
        if self.steps is None:
            return range(0)
        first, _, last = self.steps.partition("-")
        return range(int(first) - 1, int(last))


def check_profile(profile: ProfileConfig, args: argparse.Namespace) -> None:
    """Raise a `UserError` if the run ends before the steps do, or if no file can be written."""
    if args.train_iters is not None and profile.iterations.stop > args.train_iters:
        raise UserError(
            f"latent.profile.steps: {profile.steps} goes beyond megatron.train_iters:"
            f" {args.train_iters}: choose earlier steps"
        )
    if profile.steps is not None and profile.output is not None:
        where = "latent.profile.output"
        if profile.output.endswith("/") or Path(profile.output).is_dir():
            raise UserError(
                f"{where}: {profile.output} is a folder: give the beginning of the files' names,"
                f" for example {Path(profile.output) / 'profile'}"
            )
        check_writable(where, str(Path(profile.output).parent))
