"""Runs of one pass are plain Megatron's runs, with and without a fusion that waits for its turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import Outcome, configuration, last_stage, train

ONE_PASS = {"passes": {"schedule": 1, "timeout_seconds": 300}}
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


def _both(folder: Path, ranks: int, latent: Any, **megatron: Any) -> tuple[Outcome, Outcome]:
    given = configuration(folder, latent, train_iters=10, **megatron)
    ours = last_stage(train(given, ranks))
    plain = last_stage(train(given, ranks, plain_megatron=True))
    assert set(plain.log) == set(range(1, 11))
    assert ours.log.keys() == plain.log.keys()
    return ours, plain


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_one_rank_bit_for_bit(tmp_path: Path, micro_batches: int) -> None:
    ours, plain = _both(tmp_path, 1, ONE_PASS, global_batch_size=2 * micro_batches)
    assert ours.log == plain.log
    assert plain.log[10]["loss"] < plain.log[1]["loss"]
    backbone = {n for n in ours.weights if not n.startswith("fusion.")}
    assert backbone == plain.weights.keys()
    assert backbone != ours.weights.keys()
    for name, weight in plain.weights.items():
        assert torch.equal(ours.weights[name], weight), name


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="tp2"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param(2, SHARDED, id="dp2", marks=pytest.mark.full),
        pytest.param(
            4,
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            id="tp2-pp2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_other_layouts(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    """Against Megatron's own schedule on the same layout: 1e-6, rounding of a few sums."""
    ours, plain = _both(tmp_path, ranks, ONE_PASS, **options)
    for step, seen in plain.log.items():
        assert ours.log[step]["loss"] == pytest.approx(seen["loss"], rel=1e-6), step
        assert ours.log[step]["grad_norm"] == pytest.approx(seen["grad_norm"], rel=1e-5), step
    for name, weight in plain.weights.items():
        assert (ours.weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
