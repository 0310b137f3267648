"""`train` between the command line and the ranks: where ranks come from and what they are given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalatent.cli import main
from megalatent.config import Config
from megalatent.config_megatron import parse
from megalatent.launch import train_command
from megalatent.launch.local import RankFailure
from megalatent.launch.rank import LAST_WORDS
from tests.waiting import HANG

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 4,
    "eval_iters": 1,
    "log_interval": 1,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "num_workers": 0,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"megatron": MODEL}))
    return file


def recorded(folder: Path) -> Any:
    """A stand-in for training that writes down what a rank was given."""

    def train(config: Config) -> None:
        rank = os.environ["RANK"]
        found = [rank, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]]
        found += [str(torch.get_num_threads()), str(config.megatron["hidden_size"])]
        (folder / f"rank{rank}").write_text(" ".join(found))

    return train


def test_ranks_are_forked_with_the_config(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_command, "_train", recorded(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["train", str(path), "--nproc", "2", "--set", "megatron.hidden_size=64"]) == 0
    assert (tmp_path / "rank0").read_text() == "0 2 1 1 64"
    assert (tmp_path / "rank1").read_text() == "1 2 1 1 64"


def test_without_a_gpu_the_layout_decides_how_many(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_command, "_train", recorded(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", str(path), "--set", "megatron.tensor_model_parallel_size=2"]) == 0
    assert sorted(p.name for p in tmp_path.glob("rank*")) == ["rank0", "rank1"]


@pytest.mark.parametrize(
    ("chosen", "nproc", "expected"), [("3", 2, 3), ("", 1, None), ("0", 4, None)]
)
def test_threads(chosen: str, nproc: int, expected: int | None) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = train_command._threads_per_rank({"OMP_NUM_THREADS": chosen}, nproc)
    assert threads == (expected or max(1, cores // nproc))


def test_a_rank_of_torchrun_joins(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_command, "_train", recorded(tmp_path))
    assert main(["train", str(path)]) == 0
    assert [p.name for p in tmp_path.glob("rank*")] == ["rank1"]


def test_a_task_of_srun_joins(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that the fixture takes away what the command sets
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_command, "_train", recorded(tmp_path))
    assert main(["train", str(path), "--set", "megatron.global_batch_size=4"]) == 0
    assert (tmp_path / "rank3").read_text().split()[:2] == ["3", "4"]
    assert os.environ["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_a_node_tells_of_a_mistake(
    path: Path,
    local_rank: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = {"RANK": "5", "LOCAL_RANK": local_rank, "WORLD_SIZE": "8"}
    for name, value in {**given, "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(path), "--set", "megatron.hiden_size=1"]) == 2
    assert capfd.readouterr().err.count("\n") == lines


def test_megatron_finds_its_options_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "megalatent.training.pretrain.run", lambda config, profiler: seen.append(sys.argv)
    )
    monkeypatch.setattr(sys, "argv", ["before"])
    config = Config.from_mapping({"megatron": MODEL})
    train_command._train(config)
    assert parse(seen[0][1:]).hidden_size == 32


def test_signals_go_on_as_megatrons_exit_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "megalatent.launch.local.run_local", lambda *args, **options: calls.append(options)
    )
    plain = Config.from_mapping({"megatron": MODEL})
    train_command.start(plain, 1)
    assert calls[0]["forward_as"] == signal.SIGTERM
    own = {**MODEL, "exit_signal_handler": True, "exit_signal": "SIGUSR1"}
    train_command.start(Config.from_mapping({"megatron": own}), 1)
    assert calls[1]["forward_as"] == signal.SIGUSR1
    assert signal.SIGUSR1 in calls[1]["signals"]


def test_one_hardware_queue_where_megatron_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    plain = Config.from_mapping({"megatron": MODEL})
    assert train_command._connections(plain) == {}
    tensor = Config.from_mapping({"megatron": {**MODEL, "tensor_model_parallel_size": 2}})
    assert train_command._connections(tensor) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert train_command._connections(tensor) == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


# A fresh rank that fails as one does whose config is right and whose training is not.
FRESH = """
import os, sys
from megalatent.errors import UserError
from megalatent.launch.rank import LAST_WORDS, work
def fail():
    if os.environ["RANK"] == "1":
        raise UserError("the checkpoint lacks x")
    import time
    time.sleep(600)
work(fail, int(os.environ[LAST_WORDS]))
"""


def test_a_fresh_rank_can_say_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    config = Config.from_mapping({"megatron": MODEL})
    with pytest.raises(RankFailure) as caught:
        train_command.start(config, 2, again=[sys.executable, "-c", FRESH], method="fresh")
    assert (caught.value.rank, caught.value.summary) == (1, "the checkpoint lacks x")
    assert caught.value.is_user_error
    assert LAST_WORDS not in os.environ


def run_whole(command: list[str], path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [*command, "-m", "megalatent.cli", "train", str(path), *options],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=environment,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ([sys.executable], ["--nproc", "2", "--start-method", "fork"]),
        ([sys.executable], ["--nproc", "2", "--start-method", "fresh"]),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], []),
    ],
    ids=["fork", "fresh", "torchrun"],
)
def test_the_same_losses_however_it_is_started(
    launcher: list[str], options: list[str], path: Path
) -> None:
    reference = run_whole([sys.executable], path, "--nproc", "2")
    assert reference.returncode == 0, reference.stderr
    done = run_whole(launcher, path, *options)
    assert done.returncode == 0, done.stderr
    losses = [
        [part for line in out.splitlines() for part in line.split("|") if "lm loss:" in part]
        for out in (reference.stdout, done.stdout)
    ]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
