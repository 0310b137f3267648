"""The configuration of a run: one YAML file, `latent:` for ours and `megatron:` for Megatron's.

    config = Config.load("run.yaml", ["megatron.lr=1e-3"])
    config.check(world_size=4)
    config.latent.passes.schedule, config.megatron["hidden_size"], config.megatron_argv()

Every error is a `UserError` of one line: the key, what was given, what is wrong, what to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalatent.config_latent import (
    FusionConfig,
    LatentConfig,
    ModelConfig,
    PassesConfig,
    SftConfig,
)
from megalatent.config_optimizer import DecayPhaseConfig, NorMuonConfig
from megalatent.config_schedule import PhaseConfig
from megalatent.config_values import nearest, write_dataclass
from megalatent.config_yaml import apply_overrides, read_yaml
from megalatent.errors import UserError

__all__ = [
    "Config",
    "DecayPhaseConfig",
    "FusionConfig",
    "LatentConfig",
    "ModelConfig",
    "NorMuonConfig",
    "PassesConfig",
    "PhaseConfig",
    "SftConfig",
]

# `launch:` holds settings of `submit`, which are checked there.
_SECTIONS = ("latent", "megatron", "launch")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration, typed and with every default that another option decides filled in.

    Attributes:
        latent: our part; what the file leaves null has the value that null stands for.
        megatron: Megatron's options under their own names with underscores, as given, and the
            ones filled in.
        filled_in: the options that were not given and were filled in, with the reason.
    """

    latent: LatentConfig
    megatron: dict[str, Any]
    filled_in: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Config:
        """Read a file, apply `section.key=value` overrides, check every key and type.

        Raises:
            UserError: one line that begins with the path.
        """
        given = apply_overrides(read_yaml(path), overrides)
        try:
            return cls.from_mapping(given)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Config:
        """From the mapping that a file holds.

        Raises:
            UserError: unknown key, wrong type, or a value out of range.
        """
        for key in given:
            if key not in _SECTIONS:
                close = nearest(str(key), _SECTIONS)
                hint = f"did you mean {close!r}? " if close else ""
                raise UserError(
                    f"{key}: unknown section: {hint}(a config has {', '.join(_SECTIONS)})"
                )
        # Reading our own section takes no time; Megatron's parser takes seconds to import.
        LatentConfig.read(given.get("latent"))
        from megalatent.config_megatron import read_options
        from megalatent.config_platform import fill_in

        megatron = read_options(given.get("megatron"))
        filled_in = fill_in(megatron)
        return cls(
            latent=LatentConfig.read(given.get("latent"), megatron),
            megatron={**megatron, **{name: value for name, (value, _) in filled_in.items()}},
            filled_in={name: reason for name, (_, reason) in filled_in.items()},
        )

    def check(
        self,
        world_size: int,
        *,
        checkpoints_repaired: bool = False,
        missing: list[str] | None = None,
    ) -> None:
        """Find contradictions and missing files, for a run on `world_size` processes.

        Starts no process and writes nothing.

        Args:
            checkpoints_repaired: whether something else mends the run's own checkpoints before it
                starts.
            missing: takes what is wrong with files, which is then no error.

        Raises:
            UserError: the first contradiction found.
        """
        from megalatent.config_checks import check

        check(self, world_size, checkpoints_repaired=checkpoints_repaired, missing=missing)

    def megatron_argv(self) -> list[str]:
        """Megatron's command line, without a program name."""
        from megalatent.config_megatron import to_argv

        return to_argv(self.megatron)

    def resolved(self) -> dict[str, Any]:
        """The mapping that reads back to an equal config: for display and for checkpoints."""
        return {"latent": write_dataclass(self.latent), "megatron": dict(self.megatron)}
