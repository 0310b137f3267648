"""The contraction study: its table and plot, and the whole of it on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.contraction.report import Training, draw, markdown, read_training
from tests.training.runs import MODEL, VOCAB, write_data
from tests.waiting import HANG

REPOSITORY = Path(__file__).resolve().parents[2]


def _step(iteration: int, loss: float, total: int = 20) -> dict[str, Any]:
    return {
        "kind": "train",
        "iteration": iteration,
        "iterations": total,
        "loss_per_pass": {"1": loss, "2": loss + 1},
        "pass_counts": {"1": iteration - 1, "2": 1},
    }


def _evaluation(*losses: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "iteration": 20,
        "loss_per_pass": {str(k): loss for k, loss in enumerate(losses, 1)},
        "state_change": {str(k): 10.0**-k for k in range(2, len(losses) + 1)},
    }


def _write(folder: Path, *records: dict[str, Any], rest: str = "") -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + rest)
    return folder


def test_an_interrupted_training_counts_each_step_once(tmp_path: Path) -> None:
    """Stopped after step 15, while it wrote; gone on from the checkpoint at 10."""
    assert read_training(tmp_path / "none", "a") == Training("a")
    steps = [_step(5, 6.0), _step(10, 5.0), _step(15, 9.0)]
    half = _write(tmp_path / "half", *steps, rest='{"kind": "trai')
    assert not read_training(half, "a").finished
    (half / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    early = _write(tmp_path / "early", *steps, _evaluation(4.0), _step(15, 4.5))
    assert not read_training(early, "a").finished
    steps += [_step(15, 4.0), _step(20, 3.0)]
    unmeasured = _write(tmp_path / "unmeasured", *steps)
    assert not read_training(unmeasured, "a").finished
    whole = read_training(_write(tmp_path / "whole", *steps, _evaluation(3.5, 3.25)), "a")
    assert whole.finished
    assert whole.curve == [(5, 6.0), (10, 5.0), (15, 4.0), (20, 3.0)]
    assert whole.losses == {1: 3.5, 2: 3.25}
    assert whole.changes == {2: 0.01}
    assert whole.counts == {1: 19, 2: 1}


def test_table_and_plot(tmp_path: Path) -> None:
    steps = [_step(10, 5.0), _step(20, 4.0)]
    two = read_training(_write(tmp_path / "two", *steps, _evaluation(3.5, 3.25)), "K to 2")
    one = read_training(_write(tmp_path / "one", *steps, _evaluation(3.75)), "K = 1")
    assert markdown([two, one]) == (
        "| k | loss, K to 2 | change, K to 2 | loss, K = 1 |\n"
        "| ---: | ---: | ---: | ---: |\n"
        "| 1 | 3.5000 | - | 3.7500 |\n"
        "| 2 | 3.2500 | 1.00e-02 | - |\n"
    )
    draw([two, one, Training("not begun")], tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


@pytest.mark.full
def test_the_study_stops_and_goes_on(tmp_path: Path) -> None:
    """Half of each training, then the other half; a third call trains nothing."""
    write_data(tmp_path / "data")
    tiny: dict[str, Any] = {
        **{name: MODEL[name] for name in ("hidden_size", "ffn_hidden_size", "seq_length")},
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": "null",
        "vocab_size": VOCAB,
        "train_iters": 4,
        "lr_warmup_iters": 1,
        "lr_wsd_decay_iters": 2,
        "log_interval": 1,
        "eval_iters": 1,
        "split": "'80,20,0'",
    }

    def study(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "examples/contraction/run.py", "--output", str(tmp_path)]
        given = [f"megatron.{name}={value}" for name, value in tiny.items()]
        for override in [*given, "latent.passes.eval_passes=5", *overrides]:
            command += ["--set", override]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG)

    def records() -> dict[str, list[tuple[str, int]]]:
        return {
            name: [
                (record["kind"], record["iteration"])
                for record in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
            ]
            for name in ("one", "two", "three")
        }

    # Each stops in order after two steps: nothing failed, and nothing is finished.
    half = study("megatron.exit_interval=2")
    assert half.returncode == 1
    assert "failed" not in half.stderr
    assert set(map(tuple, records().values())) == {(("train", 1), ("train", 2))}
    whole = study()
    assert whole.returncode == 0, whole.stderr
    steps = (*(("train", i) for i in range(1, 5)), ("evaluation", 4))
    assert set(map(tuple, records().values())) == {steps}
    table = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["1", "2", "3", "4", "5"]
    assert table[3].rstrip(" |").endswith("-")  # an untrained fusion is not shown
    assert (tmp_path / "contraction.svg").exists()
    assert study().returncode == 0
    assert set(map(tuple, records().values())) == {steps}
