"""What a run was started with: the versions of everything that can change a result."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["versions"]


def versions() -> str:
    """Versions of everything that can change a result; no variables, so no secrets."""
    packages = sorted(
        {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    )
    lines = [
        f"python {platform.python_version()} {sys.executable}",
        f"system {platform.platform()}",
    ]
    for command in (["sbatch", "--version"], ["nvidia-smi", "--version"]):
        lines += _said_by(command)[:1]
    commit = _said_by(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])
    if commit:
        lines.append(f"commit {commit[0]}")
    return "\n".join([*lines, "", *packages]) + "\n"


def _said_by(command: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
