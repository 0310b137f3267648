"""The job templates, as used by hand: what they run, with a stand-in for srun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "slurm"
TEMPLATES = sorted(SLURM.glob("*.sbatch"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_template_is_valid_bash(template: Path) -> None:
    done = subprocess.run(["bash", "-n", template], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def submit(
    folder: Path, template: str, arguments: Sequence[str], cluster: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a template where `srun` prints what it is given, one word a line."""
    srun = folder / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    (folder / "slurm").mkdir(exist_ok=True)
    (folder / "slurm" / "cluster.env").write_text(cluster)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MEGALATENT"))}
    return subprocess.run(
        ["bash", SLURM / template, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=kept
        | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)}
        | environment,
    )


def test_evaluation_reads_the_checkpoint_and_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    (tmp_path / "run.yaml").touch()
    done = submit(
        tmp_path,
        "evaluate.sbatch",
        ["run.yaml", "my run", "--set", "latent.passes.eval_passes=32"],
        "MEGALATENT_PYTHON=py\n",
        SLURM_GPUS_PER_NODE="8",
        SLURM_CPUS_PER_TASK="4",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    command = words[words.index("py") :]
    assert command[:5] == [
        "py",
        "-m",
        "megalatent.launch.slurm_rank",
        "train",
        f"{tmp_path}/run.yaml",
    ]
    assert command[5:] == [
        *("--set", "latent.passes.eval_passes=32"),
        *("--set", f"megatron.load='{tmp_path}/my run'"),
        *("--set", "megatron.skip_train=true"),
        *("--set", "megatron.no_load_optim=true"),
        *("--set", "megatron.no_load_rng=true"),
    ]
    options = words[: words.index("py")]
    assert "--cpus-per-task=4" in options
    assert "--cpu-bind=none" in options
    assert not [word for word in options if word.startswith("--container")]


def test_evaluation_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run.yaml").touch()
    done = submit(
        tmp_path,
        "evaluate.sbatch",
        ["run.yaml", "run"],
        "MEGALATENT_CONTAINER=image.sqsh\nMEGALATENT_MOUNTS=/data:/data\n",
    )
    assert done.returncode == 0, done.stderr
    assert "--container-image=image.sqsh" in done.stdout.splitlines()
    mounts = f"{tmp_path}/run:{tmp_path}/run,{tmp_path}:{tmp_path},/data:/data"
    assert f"--container-mounts={mounts}" in done.stdout.splitlines()


def test_a_profile_is_one_task_per_gpu_that_writes_into_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    done = submit(
        tmp_path,
        "profile.sbatch",
        ["run.yaml", "my out", "--passes", "1,2"],
        "MEGALATENT_PYTHON=py\n",
        SLURM_GPUS_PER_NODE="8",
        SLURM_CPUS_PER_TASK="4",
    )
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


def test_a_profile_without_an_output_folder_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    environment = {"SLURM_GPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}
    done = submit(tmp_path, "profile.sbatch", ["run.yaml"], **environment)
    assert done.returncode != 0
    assert "give OUT, a folder for the files" in done.stderr


@pytest.mark.parametrize(
    ("template", "given"), [("evaluate", []), ("evaluate", ["a"]), ("convert", [])]
)
def test_missing_arguments_are_said(template: str, given: list[str], tmp_path: Path) -> None:
    done = submit(tmp_path, f"{template}.sbatch", given)
    assert done.returncode != 0
    assert f"slurm/{template}.sbatch" in done.stderr
    assert done.stdout == ""


def test_conversion_hands_its_arguments_on(tmp_path: Path) -> None:
    done = submit(tmp_path, "convert.sbatch", ["to-hf", "a b", "out"], "MEGALATENT_PYTHON=py\n")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    command = ["py", "-m", "megalatent.cli", "convert", "to-hf", "a b", "out"]
    assert words[words.index("py") :] == command


def test_torchrun_gets_the_cores_of_all_ranks_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    python = tmp_path / "py"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = submit(
        tmp_path,
        "pretrain.sbatch",
        ["run.yaml", "my run #1"],
        f"MEGALATENT_PYTHON={python}\nMEGALATENT_LAUNCHER=torchrun\nRUN=/elsewhere\n",
        SLURM_CPUS_PER_TASK="12",
        SLURM_NTASKS_PER_NODE="8",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="7",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    cores = [word for word in words if "cpus-per-task" in word]
    assert cores == [
        "--srun=--cpus-per-task=12",
        "--srun=--cpus-per-task=96",
    ]  # the last one counts
    # a variable of the site does not send the run elsewhere, and YAML sees no comment
    assert f"--run={tmp_path}/my run #1" in words
    assert f"megatron.save='{tmp_path}/my run #1'" in words
