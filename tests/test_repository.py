"""What a fresh machine relies on: the lock file and the set-up script."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(requirement: str) -> str:
    found = NAME.match(requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def test_the_lock_file_holds_names_versions_and_hashes_only() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    lines = [line for line in lock.splitlines() if line.strip()]
    # The names of two packages begin like an address.
    assert "://" not in lock
    requirement = re.compile(r"^[a-z0-9][a-z0-9.-]*==[^ ]+( ; .+)? \\$")
    one_hash = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
    assert all(requirement.match(line) or one_hash.match(line) for line in lines)


def test_the_lock_file_has_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    wanted += [r for extra in ("hf", "optim", "profile", "dev") for r in extras[extra]]
    lock = (ROOT / "requirements.lock").read_text()
    locked = {canonical(line) for line in lock.splitlines() if "==" in line}
    assert {canonical(requirement) for requirement in wanted} <= locked


def setup(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "VENV": str(tmp_path / "venv")}
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "setup.sh")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_interpreter_that_does_not_run_is_refused(tmp_path: Path) -> None:
    """As the shim of a version manager whose version is not selected."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'not selected' >&2\nexit 127\n")
    shim.chmod(0o755)
    done = setup(tmp_path, str(shim))
    assert done.returncode == 1
    assert f"PYTHON={shim} does not run" in done.stderr
    assert not (tmp_path / "venv").exists()
