"""The job template of the profiler: what it runs, with a stand-in for srun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TEMPLATE = Path(__file__).parents[2] / "slurm" / "profile.sbatch"


def run(folder: Path, *arguments: str, cluster: str = "") -> subprocess.CompletedProcess[str]:
    srun = folder / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    (folder / "slurm").mkdir(exist_ok=True)
    (folder / "slurm" / "cluster.env").write_text(cluster)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MEGALATENT"))}
    kept |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)}
    return subprocess.run(
        ["bash", TEMPLATE, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=kept | {"SLURM_GPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4"},
    )


def test_one_task_per_gpu_profiles_into_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    done = run(tmp_path, "run.yaml", "my out", "--passes", "1,2", cluster="MEGALATENT_PYTHON=py\n")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    out = tmp_path / "my out"
    assert out.is_dir()
    assert words[words.index("py") + 1 :] == [
        *("-m", "megalatent.launch.slurm_rank", "profile", f"{tmp_path}/run.yaml"),
        *("--json", f"{out}/profile.json", "--html", f"{out}/profile.html"),
        *("--trace", f"{out}/profile.trace.json", "--costs", f"{out}/costs.json"),
        *("--passes", "1,2"),
    ]
    assert {"--cpus-per-task=4", "--cpu-bind=none", "--kill-on-bad-exit=1"} <= set(words)


def test_without_an_output_folder_it_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    done = run(tmp_path, "run.yaml")
    assert done.returncode != 0
    assert "give OUT, a folder for the files" in done.stderr
