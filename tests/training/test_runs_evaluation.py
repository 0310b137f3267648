"""Validation by pass: losses and state changes of k = 1 … eval_passes, printed and written."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import (
    configuration,
    last_stage,
    losses,
    metrics,
    train,
    write_data,
)

PASSES = 12  # training goes to 2
EVALUATED = {
    "eval_interval": 2,
    "eval_iters": 2,
    "split": "70,20,10",
    "train_iters": 3,
}


def _latent(kind: str = "gated", schedule: Any = 2, passes: int = PASSES) -> dict[str, Any]:
    return {
        "fusion": {"kind": kind},
        "passes": {"schedule": schedule, "eval_passes": passes, "timeout_seconds": 300},
    }


def _evaluations(folder: Path, ranks: int, latent: Any, **options: Any) -> Any:
    given = configuration(folder, latent, save=str(folder / f"run{ranks}"), **EVALUATED, **options)
    outcomes = train(given, ranks)
    return outcomes, metrics(folder / f"run{ranks}", "evaluation")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("evaluation")
    outcomes, records = _evaluations(folder, 1, _latent())
    return folder, outcomes, records


def _one_more_step(folder: Path, save: Path, ranks: int, options: dict[str, Any]) -> Any:
    """From the weights that one rank saved, which are the same on every layout."""
    given = configuration(
        folder,
        _latent(),
        **{**EVALUATED, **options, "train_iters": 4},
        load=str(folder / "run1"),
        save=str(save),
        no_load_optim=True,
    )
    train(given, ranks)
    return metrics(save, "evaluation")


@pytest.fixture(scope="module")
def reference(one_rank: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _one_more_step(one_rank[0], tmp_path_factory.mktemp("reference"), 1, {})


def test_the_test_set_is_told_from_validation(one_rank: Any) -> None:
    """Both are evaluated after the last step."""
    folder, outcomes, records = one_rank
    tested = metrics(folder / "run1", "evaluation", "test")
    assert list(tested) == [3]
    assert list(tested[3]["loss_per_pass"]) == list(records[3]["loss_per_pass"])
    assert tested[3]["loss_per_pass"] != records[3]["loss_per_pass"]  # other documents
    printed = outcomes[0].printed
    assert printed.count(" latent test by pass |") == 1
    assert printed.count(" latent validation by pass |") >= 2


def test_every_pass_is_printed_and_written(one_rank: Any) -> None:
    _, outcomes, records = one_rank
    # Every second step, and at the end.
    assert list(records) == [2, 3]
    for record in records.values():
        assert list(record["loss_per_pass"]) == [str(k) for k in range(1, PASSES + 1)]
        assert list(record["state_change"]) == [str(k) for k in range(2, PASSES + 1)]
        assert all(math.isfinite(x) for x in record["loss_per_pass"].values())
        changes = record["state_change"]
        assert 0 < changes["12"] < changes["2"]  # a small model's passes settle
    printed = outcomes[0].printed
    table = re.findall(r"\| +(\d+) \| +([\d.]+) \| +([\d.]*)", printed.replace("\n", "|\n"))
    shown = {(k, loss) for k, loss, _ in table}
    for record in records.values():
        for k, loss in record["loss_per_pass"].items():
            assert (k, f"{loss:.5f}") in shown
    # Megatron's own line has the loss of pass 1 under its usual name.
    found = re.search(r"validation loss at iteration 2 \| lm loss value: (\S+)", printed)
    assert found is not None
    assert float(found.group(1)) == pytest.approx(records[2]["loss_per_pass"]["1"], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="tp2-sp"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2", marks=pytest.mark.full),
        pytest.param(2, {}, id="dp2", marks=pytest.mark.full),
        pytest.param(2, {"context_parallel_size": 2}, id="cp2", marks=pytest.mark.full),
        pytest.param(
            4,
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "context_parallel_size": 2,
            },
            id="tp2-sp-cp2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_other_layouts_evaluate_alike(
    one_rank: Any, reference: Any, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    found = _one_more_step(one_rank[0], tmp_path, ranks, options)
    assert list(found) == list(reference) == [4]
    for kind, tolerance in (("loss_per_pass", 1e-5), ("state_change", 1e-4)):
        assert found[4][kind] == pytest.approx(reference[4][kind], rel=tolerance), kind


def test_additive_starts_as_the_plain_model(tmp_path: Path) -> None:
    """Its matrix is zero until the first update of a step with two passes."""
    schedule = [{"start": 0, "mixture": {1: 1.0}}, {"start": 2, "mixture": {2: 1.0}}]
    latent = _latent("additive", schedule, 4)
    outcomes, records = _evaluations(tmp_path, 1, latent)
    assert last_stage(outcomes).steps == {3.0}
    before, after = records[2], records[3]
    assert len(set(before["loss_per_pass"].values())) == 1
    assert set(before["state_change"].values()) == {0.0}
    assert len(set(after["loss_per_pass"].values())) == 4
    assert min(after["state_change"].values()) > 0
    # In training as well: the third step is the first with two passes.
    third = losses(tmp_path / "run1")[3]
    assert third["1"] == third["2"]


@pytest.mark.full
def test_several_validation_sets_and_a_test_set(tmp_path: Path) -> None:
    """Each has records of its own; the same documents give the same losses."""
    for name, documents in (("data", 120), ("short", 30), ("copy", 30)):
        write_data(tmp_path / name, documents=documents)
    sets = {
        "train": [str(tmp_path / "data")],
        "valid": [str(tmp_path / name) for name in ("short", "copy", "data")],
        "test": [str(tmp_path / "data")],
    }
    (tmp_path / "sets.json").write_text(json.dumps(sets))
    read = {"data_path": None, "split": None, "full_validation": True, "eval_micro_batch_size": 1}
    options = {**EVALUATED, **read, "eval_global_batch_size": 2, "multiple_validation_sets": True}
    given = configuration(
        tmp_path,
        _latent(passes=3),
        per_split_data_args_path=str(tmp_path / "sets.json"),
        validation_set_names=["one", "two", "three"],
        save=str(tmp_path / "run"),
        **options,
    )
    train(given, 2)
    names = [f"validation-{name}" for name in ("one", "two", "three")]
    one, two, three = (metrics(tmp_path / "run", "evaluation", name) for name in names)
    tested = metrics(tmp_path / "run", "evaluation", "test")
    assert (list(one), list(two), list(three), list(tested)) == ([2, 3], [2, 3], [2, 3], [3])
    for step in (2, 3):
        assert one[step]["loss_per_pass"] == pytest.approx(two[step]["loss_per_pass"], rel=1e-6)
        assert one[step]["loss_per_pass"] != three[step]["loss_per_pass"]
        assert list(three[step]["state_change"]) == ["2", "3"]


@pytest.mark.full
def test_a_run_counted_in_samples_is_evaluated_alone(tmp_path: Path) -> None:
    """Nothing is trained, so that nobody counts the iterations that phases are fractions of."""
    schedule = [{"start": 0, "mixture": {1: 1.0}}, {"start": 0.5, "mixture": {2: 1.0}}]
    samples = {**EVALUATED, "train_iters": None, "train_samples": 17, "lr_decay_iters": None}
    latent, save = _latent("gated", schedule, 2), str(tmp_path / "run")
    train(configuration(tmp_path, latent, save=save, **samples))
    assert [len(passes) for passes in losses(tmp_path / "run").values()] == [1, 1, 2, 2]
    alone = {"load": save, "skip_train": True, "no_load_optim": True, "no_load_rng": True}
    latent = _latent("gated", schedule, 4)
    printed = train(configuration(tmp_path, latent, **samples, **alone))[0].printed
    assert re.search(r" latent validation by pass \|.*(\n.*){4}\|    4 \|", printed)


def test_evaluation_changes_nothing(one_rank: Any, tmp_path: Path) -> None:
    """Training after an evaluation goes on as without one."""
    folder, _, _ = one_rank
    options = {**EVALUATED, "eval_iters": 0}
    train(configuration(folder, _latent(), save=str(tmp_path / "run"), **options))
    assert losses(tmp_path / "run") == losses(folder / "run1")
