"""The local Slurm's tool, as far as it can do harm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "local_slurm.sh"


@pytest.mark.parametrize("action", ["down", "up"])
def test_a_folder_of_somebody_else_stays(tmp_path: Path, action: str) -> None:
    (tmp_path / "thesis.tex").touch()
    done = subprocess.run(
        [str(TOOL), action],
        env={**os.environ, "LOCAL_SLURM_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"{tmp_path} holds other files" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_down_without_up(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCAL_SLURM_DIR": str(tmp_path / "lab")}
    assert subprocess.run([str(TOOL), "down"], env=environment).returncode == 0
    for action in ("kill-node", "start-node"):
        done = subprocess.run([str(TOOL), action, "x"], env=environment, capture_output=True)
        assert done.returncode == 2
