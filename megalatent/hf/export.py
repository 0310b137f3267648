"""Configuration and code of an export, for writers that stream the weights themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration_megalatent import MegalatentConfig

__all__ = ["code_files", "write_config_and_code"]


def code_files() -> list[Path]:
    """The files that an export carries so that it loads with `trust_remote_code=True` alone."""
    return sorted(Path(__file__).parent.glob("*_megalatent.py"))


def write_config_and_code(config: MegalatentConfig, folder: Path) -> list[Path]:
    """Write `config.json` and the model's code into an existing folder.

    The result is what `MegalatentForCausalLM.save_pretrained` writes besides weights and
    `generation_config.json`. Returns the files written.
    """
    from .configuration_megalatent import AUTO_MAP

    config.architectures = ["MegalatentForCausalLM"]
    config.auto_map = dict(AUTO_MAP)
    config.save_pretrained(folder)
    for source in code_files():
        shutil.copyfile(source, folder / source.name)
    return [folder / "config.json", *(folder / source.name for source in code_files())]
