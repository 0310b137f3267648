"""`megalatent submit`: the scripts it writes, what it refuses, what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent import cli
from megalatent.launch import render
from megalatent.launch.runfolder import RunFolder, State
from tests.launch.fake_slurm import FakeSlurm, fake_slurm  # noqa: F401
from tests.launch.lab import ROOT, tiny_config

GOLDEN = Path(__file__).with_name("golden")

LARGE: dict[str, Any] = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "swiglu": True,
    "num_attention_heads": 16,
    "seq_length": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 512,
    "train_iters": 100_000,
    "lr": 3e-4,
    "bf16": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100_352,
    "mock_data": True,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "save_interval": 500,
    "save_retain_interval": 50_000,
    "log_interval": 10,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, as the login node's shell is in."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MEGALATENT_CLUSTER_ENV", raising=False)
    return folder


def config(folder: Path, name: str = "fbt-1b", **options: Any) -> str:
    path = folder / f"{name}.yaml"
    launch = options.pop("launch", None)
    content = {"latent": {}, "megatron": {**LARGE, **options}}
    path.write_text(yaml.safe_dump({**content, **({"launch": launch} if launch else {})}))
    return str(path)


def plain(script: str, here: Path) -> str:
    """A script without what differs between machines."""
    script = script.replace(str(here), "/shared/work").replace(sys.executable, "/venv/bin/python")
    return re.sub(r"export PYTHONPATH=\S+\n", "", script)


def compare_with_golden(name: str, script: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(script)
    assert script == path.read_text(), "set UPDATE_GOLDEN=1 to accept the new script"


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "16-gpus": (
        ["--nodes=2", "--time=24:00:00", "--partition=gpu", "--account=lab", "--cpus-per-task=12"],
        {},
    ),
    "512-gpus": (
        [
            *("--nodes=64", "--time=2-00:00:00", "--partition=gpu", "--account=lab", "--qos=high"),
            *("--reservation=week 48".replace(" ", "-"), "--constraint=ib", "--exclude=node[7,9]"),
            *("--container=nvcr.io#nvidia/pytorch:26.06-py3", "--mounts=/usr:/usr"),
            *("--env", "NCCL_DEBUG=WARN", "--env", "NOTE=two words", "--mail=me@example.org"),
            *("--chain=3", "--max-requeues=5", "--signal-lead=600", "--min-bandwidth=100"),
            *("--name=big", "--sbatch-options=--exclusive --switches=1"),
        ],
        {
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 8,
            "global_batch_size": 2048,
        },
    ),
    "array-on-cpus": (
        [
            *("--gpus-per-node=0", "--ranks-per-node=4", "--array=0-3%2", "--time=30"),
            *("--set", "megatron.seed={task}", "--set", "megatron.lr=1e-{task}"),
            *("--launcher=torchrun", "--entry=train.py", "--dependency=afterok:12"),
        ],
        {"bf16": False},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_as_they_were(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, options = CASES[name]
    (here / "train.py").touch()
    line = ["submit", config(here, **options), "--dry-run", f"--shared-paths={here}", *flags]
    assert cli.main(line) == 0
    script = capsys.readouterr().out
    compare_with_golden(name, plain(script, here))
    # a dry run leaves nothing behind
    assert not (here / "runs").exists()
    # and what it prints is a script that bash understands
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("name", ["pretrain", "convert"])
def test_templates_are_sound_by_hand(name: str) -> None:
    text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    assert render.template(name) == text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    # every variable is explained where a site sets it, or set by submit
    example = (ROOT / "slurm" / "cluster.env.example").read_text()
    by_submit = {"GPUS_TO_CHECK", "TARGET_ITERATIONS", "TARGET_SAMPLES", "CHAIN", "ENTRY", "BIND"}
    by_submit |= {"CLUSTER_ENV", "PYTHON", "BACK_OFF_SECONDS"}
    by_submit |= {"NODE_CHECK_SECONDS"}
    used = set(re.findall(r"MEGALATENT_(\w+)", text))
    assert used - by_submit <= set(re.findall(r"#MEGALATENT_(\w+)=", example))


def test_the_cluster_example_reads_back(here: Path) -> None:
    """With every line switched on, each name is a setting and each value makes sense."""
    from megalatent.launch.cluster_file import read_cluster_file
    from megalatent.launch.settings import Settings

    text = (ROOT / "slurm" / "cluster.env.example").read_text()
    path = here / "cluster.env"
    path.write_text(re.sub(r"(?m)^#(?=[A-Z_]+=)", "", text))
    cluster = read_cluster_file(path)
    settings = Settings.resolve({}, cluster.settings, {})
    assert settings.partition == "gpu"
    assert settings.min_bandwidth == 100
    assert cluster.environment["NCCL_SOCKET_IFNAME"] == "ib0"
    assert len(cluster.settings) > 20


def test_flags_win_over_the_cluster_file_over_the_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "cluster.env").write_text(
        "MEGALATENT_PARTITION=from_cluster\nMEGALATENT_ACCOUNT=from_cluster\n"
        "export MEGALATENT_QOS=${MEGALATENT_ACCOUNT}_too\nNCCL_DEBUG=INFO\n"
    )
    path = config(here, launch={"partition": "from_config", "time": "12:00:00", "nodes": 2})
    line = ["submit", path, "--dry-run", "--account=from_flag", f"--shared-paths={here}"]
    assert cli.main(line) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --account=from_flag\n" in script
    assert "#SBATCH --partition=from_cluster\n" in script
    assert "#SBATCH --qos=from_cluster_too\n" in script
    assert "#SBATCH --time=12:00:00\n" in script
    assert "#SBATCH --nodes=2\n" in script
    assert "export NCCL_DEBUG=INFO\n" in script


def test_what_submit_leaves_and_says(
    here: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    line = ["submit", config(here), "--nodes=2", f"--shared-paths={here}", "--chain=3"]
    line += ["--env=WANDB_API_KEY", "--set", "megatron.lr=1e-5"]
    assert cli.main(line) == 0
    said = capsys.readouterr().out
    run = RunFolder(here / "runs" / "fbt-1b")
    assert run.read_submission().jobs == ["101", "102", "103"]
    assert [" ".join(call.split()[1:-1]) for call in fake_slurm.submitted()] == [
        "",
        "--dependency=afterany:101",
        "--dependency=afterany:102",
    ]
    assert "jobs 101, 102, 103" in said
    assert f"{run.path}/logs/rank0.log" in said
    assert "scancel 101 102 103" in said
    assert run.script.read_text() == (fake_slurm.folder / "tested.sbatch").read_text()
    kept = yaml.safe_load(run.config.read_text())
    assert kept["megatron"]["lr"] == 1e-5
    assert kept["megatron"]["save"] == str(run.path)
    assert "megatron-core==" in run.environment.read_text()
    for path in run.path.rglob("*"):
        assert path.is_dir() or b"very-secret-value" not in path.read_bytes(), path


def test_a_failed_run_may_be_submitted_again(
    here: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
) -> None:
    run = RunFolder(here / "run")
    run.logs.mkdir(parents=True)
    run.write_state(State(status="failed", reason="x", failures=11, excluded={"node1": "bad"}))
    line = ["submit", config(here, save=str(run.path)), f"--shared-paths={here}", "--nodes=2"]
    assert cli.main(line) == 0
    state = run.read_state()
    assert (state.status, state.failures, state.excluded) == ("submitted", 0, {})


# --- mistakes ---

Wrong = namedtuple("Wrong", "flags says options", defaults=({},))
MISTAKES = {
    "nodes is a word": Wrong(["--nodes=two"], "--nodes: 'two' is not a whole number"),
    "no nodes": Wrong(["--nodes=0"], "--nodes: '0' is not a whole number of 1 or more"),
    "unknown flag": Wrong(["--partitoin=gpu"], "--partitoin"),
    "ranks do not hold the model": Wrong(
        ["--nodes=1", "--gpus-per-node=6"],
        "1 nodes x 6 ranks = 6 ranks cannot hold whole copies of a model on 4 = tensor 2 x",
    ),
    "experts do not divide": Wrong(
        ["--nodes=3"],
        "3 nodes x 8 ranks = 24 ranks cannot hold the experts",
        {"num_experts": 32, "expert_model_parallel_size": 8, "moe_ffn_hidden_size": 512},
    ),
    "micro-batches do not fit": Wrong(
        ["--nodes=2"], "global_batch_size: 513 is not a multiple of 4", {"global_batch_size": 513}
    ),
    "unknown option of Megatron": Wrong([], "hiden_size", {"hiden_size": 5}),
    "unknown setting in the config": Wrong(
        [], "launch.partitoin: no such setting: did you mean partition?",
        {"launch": {"partitoin": "x"}},
    ),
    "no such config": Wrong(["CONFIG=missing.yaml"], "missing.yaml"),
    "no such cluster file": Wrong(["--cluster=missing.env"], "missing.env: no such cluster file"),
    "unknown variable": Wrong(
        ["CLUSTER=MEGALATENT_PARTITOIN=x"], "did you mean MEGALATENT_PARTITION?"
    ),
    "secret in the cluster file": Wrong(
        ["CLUSTER=WANDB_API_KEY=abc"], "WANDB_API_KEY would be written into job scripts"
    ),
    "cluster file is no shell": Wrong(["CLUSTER=if"], "bash cannot read it"),
    "secret in a flag": Wrong(["--env=HF_TOKEN=abc"], "a secret would stand in the job script"),
    "variable is not set": Wrong(["--env=NOT_SET_ANYWHERE"], "not set in your shell"),
    "variable has a strange name": Wrong(["--env=A B=1"], "'A B' is no variable"),
    "time is a word": Wrong(["--time=tomorrow"], "--time: 'tomorrow' is no time"),
    "signal before the start": Wrong(
        ["--time=5", "--signal-lead=300"], "300 s before the end is before the start of a job"
    ),
    "array is a word": Wrong(["--array=all"], "--array: 'all' is no list of array tasks"),
    "dependency is a number": Wrong(["--dependency=12"], "--dependency: '12' is no dependency"),
    "chain of arrays": Wrong(["--chain=2", "--array=0-3"], "exclude each other"),
    "task without array": Wrong(["--set=megatron.seed={task}"], "add --array"),
    "no such data": Wrong(
        [], "nowhere/text", {"mock_data": False, "data_path": ["nowhere/text"]}
    ),
    "no such checkpoint": Wrong([], "no such folder", {"load": "nowhere/base"}),
    "folder of one node": Wrong(
        ["--nodes=2", "--shared-paths=/nothing"], "of which each of the 2 nodes has its own"
    ),
    "more processes than GPUs": Wrong(
        ["--ranks-per-node=16"], "16 processes need a GPU each, and a node has 8"
    ),
    "no processes": Wrong(["--gpus-per-node=0"], "add --ranks-per-node"),
    "mounts without container": Wrong(["--mounts=/usr:/usr"], "add --container"),
    "no such container": Wrong(["--container=./image.sqsh"], "image.sqsh: no such file"),
    "no such environment": Wrong(["--venv=./venv"], "venv/bin/activate: no such file or folder"),
    "no such secrets": Wrong(["--secrets=missing.env"], "missing.env: no such file or folder"),
    "no such script": Wrong(["--entry=missing.py"], "missing.py: no such file or folder"),
    "unknown launcher": Wrong(["--launcher=mpirun"], "is none of srun, torchrun, ft"),
    "name with a slash": Wrong(["--name=a/b"], "'a/b' is no name"),
    "name of a folder above": Wrong(["--name=.."], "'..' is no name"),
    "name without an end": Wrong(["--name=" + "x" * 101], "is no name: use up to 100 letters"),
    "array that counts down": Wrong(["--array=3-0"], "counts down from 3 to 0"),
    "array in steps of nothing": Wrong(["--array=0-3:0"], "counts in steps of 0"),
    "array of the number of samples": Wrong(["--array=0-9999999999"], "the highest that can be"),
    "open quote": Wrong(["--sbatch-options=--comment='x"], "cannot be taken apart: no closing"),
    "no option": Wrong(["--sbatch-options=exclusive"], "begins with 'exclusive'"),
    "option that is a setting": Wrong(["--sbatch-options=-N 4"], "give it as --nodes, which"),
    "never silent": Wrong(["--node-check-seconds=0"], "'0' is not a number above 0"),
    "password in a URL": Wrong(
        ["--env=HTTPS_PROXY=http://me:pw@proxy:3128"], "a secret would stand in the job script"
    ),
    "variable of the script": Wrong(["--env=RUN=7"], "job scripts use this name"),
    "variable of the script in the cluster file": Wrong(
        ["CLUSTER=CONFIG=debug"], "cluster.env: CONFIG: job scripts use this name"
    ),
    "variable that is no text": Wrong(["--env=A=\udcff"], "A: its value is not UTF-8 text"),
    "variable that bash does not know": Wrong(["--env=größe=1"], "'größe' is no variable"),
    "cluster file of Windows": Wrong(["CLUSTER=NCCL_DEBUG=INFO\r"], "the line ends of Windows"),
    "cluster file that exits": Wrong(["CLUSTER=exit 0"], "ends the shell that reads it"),
    "section that is none": Wrong([], "launch: [1] is no section", {"launch": [1]}),
    "folder that is a number": Wrong([], "megatron.save: 5 is no path", {"save": 5}),
    "folder of two lines": Wrong([], "has a line break", {"save": "a\nb"}),
    "folder that a container cannot have": Wrong(
        ["--container=x"], "cannot mount a path with : or ,", {"save": "a:b"}
    ),
    "secrets for everybody": Wrong(["--secrets=./open.env"], "has mode 644"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_submits_nothing(
    mistake: str,
    here: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = MISTAKES[mistake]
    (here / "open.env").write_text("A=1\n")
    (here / "open.env").chmod(0o644)
    path, flags = config(here, **dict(wrong.options)), list(wrong.flags)
    for flag in wrong.flags:
        if flag.startswith("CONFIG="):
            path = flag.removeprefix("CONFIG=")
            flags.remove(flag)
        if flag.startswith("CLUSTER="):
            (here / "cluster.env").write_text(flag.removeprefix("CLUSTER=") + "\n")
            flags.remove(flag)
    if not any(flag.startswith("--shared-paths") for flag in flags):
        flags.append(f"--shared-paths={here}")
    before = sorted(here.rglob("*"))
    assert cli.main(["submit", path, *flags]) == 2
    refused(capsys, wrong.says)
    assert fake_slurm.calls("sbatch") == []
    assert sorted(here.rglob("*")) == before


def refused(capsys: pytest.CaptureFixture[str], says: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("megalatent: note: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("megalatent: error: ")
    assert says in lines[0]


def test_too_little_room_for_checkpoints(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**10))
    assert cli.main(["submit", config(here), "--dry-run"]) == 2
    refused(capsys, "two checkpoints of 14.4 GB need 28.8 GB, but")


def test_slurm_refuses(
    here: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_slurm.answer(
        "sbatch", 1, "allocation failure: Requested node configuration is not available"
    )
    assert cli.main(["submit", config(here)]) == 2
    refused(capsys, "sbatch: allocation failure: Requested node configuration is not available")
    assert not (here / "runs").exists()


def test_no_slurm_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["submit", config(here), "--python=python"]) == 2
    refused(capsys, "was not found: run this where Slurm's commands are on PATH")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_run_folder_in_use(
    state: str,
    here: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["submit", config(here)]) == 0
    capsys.readouterr()
    fake_slurm.job("101", state)
    script = RunFolder(here / "runs" / "fbt-1b").script
    before = script.stat().st_mtime_ns
    assert cli.main(["submit", config(here), "--nodes=1"]) == 2
    refused(capsys, f"is in use by job 101 ({state.lower()})")
    assert len(fake_slurm.submitted()) == 1
    assert script.stat().st_mtime_ns == before


def test_a_finished_run(
    here: Path,
    fake_slurm: FakeSlurm,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunFolder(here / "runs" / "fbt-1b")
    run.path.mkdir(parents=True)
    run.mark_finished(100_000)
    assert cli.main(["submit", config(here)]) == 2
    refused(capsys, "the run is finished at iteration 100000")
    # training longer is a new run from where it ended
    assert cli.main(["submit", config(here, train_iters=120_000)]) == 0
    assert run.finished() is None


def test_checkpoint_size_is_what_megatron_writes() -> None:
    """Adam's state and master weights of a model whose parameters are counted one by one."""
    from megalatent.config import Config
    from megalatent.config_megatron import parse
    from megalatent.launch.checks import checkpoint_bytes

    args = parse(Config.from_mapping({"megatron": {**LARGE, "save": "x"}}).megatron_argv())
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632 + 2 * 2048
    counted = 100_352 * 2048 + 16 * layer + 2048
    assert checkpoint_bytes(args) == pytest.approx(14 * counted, rel=0.001)


def test_tiny_config_is_accepted(here: Path, fake_slurm: FakeSlurm) -> None:  # noqa: F811
    line = ["submit", str(tiny_config(here)), "--gpus-per-node=0", "--ranks-per-node=2"]
    assert cli.main([*line, "--test-only"]) == 0
    assert fake_slurm.submitted() == []
