"""Runs with experts and multi-token prediction on several layouts, from one checkpoint.

Not with context parallelism: Megatron divides the prediction's loss by each rank's own tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import MIXED, configuration, last_stage, losses, train

LATENT = {"passes": MIXED}
BOTH = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "mtp_num_layers": 1,
    "train_iters": 4,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    options = {**BOTH, "train_iters": 1}
    train(configuration(folder, LATENT, save=str(folder / "start"), **options))
    return folder


@pytest.fixture(scope="module")
def one_rank(start: Path) -> Any:
    return _run(start, start / "one", 1, {})


def _run(start: Path, save: Path, ranks: int, options: dict[str, Any]) -> Any:
    load = {"load": str(start / "start"), "finetune": True, "save": str(save)}
    outcome = last_stage(train(configuration(start, LATENT, **BOTH, **load, **options), ranks))
    return outcome.log, losses(save)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="tp2-sp"),
        pytest.param({"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param(
            {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
            id="ep2-sharded",
            marks=pytest.mark.full,
        ),
    ],
)
def test_other_layouts_train_alike(
    start: Path, one_rank: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    log, expected = one_rank
    found_log, found = _run(start, tmp_path / "run", 2, options)
    assert list(found) == list(expected) == [1, 2, 3, 4]
    assert {len(passes) for passes in expected.values()} > {1}
    for step in expected:
        # Adam turns rounding into updates: 1e-4 over four steps. Routing is discrete: no more.
        assert found[step] == pytest.approx(expected[step], rel=1e-4), step
        norm = log[step]["grad_norm"]
        assert found_log[step]["grad_norm"] == pytest.approx(norm, rel=1e-3), step
