"""The script that sees to a browser for the tests of pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "browser.sh"


def run(tmp_path: Path, tools: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The script where only these tools exist: name -> body of a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "dirname", "id", "cat", "env"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name, body in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": str(folder), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["chromium", "google-chrome"])
def test_a_browser_that_is_there_is_taken(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, {name: "exit 0", "apt-get": "exit 3"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_that_does_not_start_is_none(tmp_path: Path) -> None:
    """The system's package is asked for, and the next one where the first does not exist."""
    install = f'echo "$*" >>{tmp_path}/asked; case "$*" in *headless-shell*) exit 100;; esac'
    tools = {"chromium": "exit 1", "apt-get": install, "sudo": 'shift; exec "$@"'}
    done = run(tmp_path, tools)
    assert done.returncode == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["update", "install", "install"]
    assert " chromium " in asked[-1]


def test_without_any_the_script_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, {})
    assert done.returncode == 1
    assert "no Chromium could be installed" in done.stderr
