"""The cluster file: what a site sets, as shell that bash reads."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megalatent.errors import UserError
from megalatent.launch.failure import holds_secret
from megalatent.launch.settings import PREFIX

__all__ = ["ClusterFile", "check_secrets_file", "is_variable", "read_cluster_file"]

_SECONDS = 60.0
_OF_BASH = ("PWD", "OLDPWD", "SHLVL", "_")


@dataclass(frozen=True)
class ClusterFile:
    """What a site sets: our settings as text by variable, and the environment of the job."""

    path: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def read_cluster_file(path: Path | None) -> ClusterFile:
    """Read a cluster file: what it sets, seen by bash.

    Raises:
        UserError: missing, not shell, or with a secret in it.
    """
    if path is None:
        return ClusterFile()
    if not path.is_file():
        raise UserError(f"{path}: no such cluster file: copy slurm/cluster.env.example")
    _refuse_windows(path)
    settings: dict[str, str] = {}
    environment: dict[str, str] = {}
    for name, value in _variables(path).items():
        if holds_secret(name, value):
            raise UserError(
                f"{path}: {name} would be written into job scripts: move it into a file that only"
                f" you can read, and name that file in {PREFIX}SECRETS"
            )
        (settings if name.startswith(PREFIX) else environment)[name] = value
    return ClusterFile(path, settings, environment)


def check_secrets_file(path: Path) -> None:
    """Whether a job can read it. What bash says of a wrong line is that line: nobody may see it.

    Raises:
        UserError: others can read it, or bash cannot.
    """
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise UserError(f"{path} has mode {mode:o}, others can read it: run 'chmod 600 {path}'")
    _refuse_windows(path)
    try:
        _variables(path)
    except UserError:
        raise UserError(
            f"{path}: bash cannot read it: write lines NAME='VALUE', without a space at the ="
        ) from None


def _refuse_windows(path: Path) -> None:
    if b"\r\n" in path.read_bytes():
        raise UserError(
            f"{path}: has the line ends of Windows, which bash takes for a part of the values: run"
            f" \"sed -i 's/\\r$//' {path}\""
        )


def is_variable(name: str) -> bool:
    """Whether bash takes it for the name of a variable."""
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


def _variables(path: Path) -> dict[str, str]:
    """The variables that the file sets; what it prints is none of them, and functions are not."""
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "USER") if name in os.environ}
    try:
        done = subprocess.run(
            ["bash", "--norc", "-c", 'set -eua; . "$1" >&2; env -0', "bash", str(path.absolute())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=bare,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{path}: bash was not done with it after {_SECONDS:.0f} s: leave only what sets"
            " variables in it"
        ) from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{path}: bash cannot read it: {said[-1] if said else 'no reason given'}")
    if not done.stdout:
        raise UserError(f"{path}: ends the shell that reads it: take out `exit` or `exec`")
    pairs = (pair.partition("=") for pair in os.fsdecode(done.stdout).split("\0"))
    return {
        name: value
        for name, _, value in pairs
        if is_variable(name) and name not in _OF_BASH and bare.get(name) != value
    }
