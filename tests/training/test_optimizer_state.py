"""A checkpoint whose optimiser's state a run cannot read is refused before it is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalatent.errors import UserError
from megalatent.training.optimizer_state import check_optimizer_state
from tests.distributed.harness import RankError
from tests.training.runs import configuration, train


def _args(**changed: Any) -> SimpleNamespace:
    plain = {
        "optimizer": "adam",
        "use_distributed_optimizer": False,
        "use_layer_wise_distributed_optimizer": False,
        "num_experts": None,
        "expert_model_parallel_size": 1,
        "bf16": True,
        "dist_ckpt_optim_fully_reshardable": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "finetune": False,
        "no_load_optim": None,
        "no_save_optim": None,
        "skip_train": False,
    }
    return SimpleNamespace(**{**plain, **changed})


SHARDED = {"use_distributed_optimizer": True}
# What Megatron makes of `use_distributed_optimizer` with NorMuon.
NORMUON = {"optimizer": "adaptive_muon"}
LAYER_WISE = {**NORMUON, "use_layer_wise_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, NORMUON, "megatron.optimizer: adaptive_muon cannot read.*trained with adam: keep"),
        ({}, SHARDED, "use_distributed_optimizer: true cannot.*trained with false"),
        (SHARDED, {}, "use_distributed_optimizer: false cannot.*trained with true"),
        (NORMUON, LAYER_WISE, "use_distributed_optimizer: true cannot.*trained with false"),
        (
            {"num_experts": 4, **NORMUON},
            {"num_experts": 4, **NORMUON, "expert_model_parallel_size": 2},
            "expert_model_parallel_size: more than 1 cannot.*trained with 1",
        ),
        (
            {"num_experts": 4, **SHARDED},
            {"num_experts": 4, **SHARDED, "expert_model_parallel_size": 2},
            "expert_model_parallel_size: 2 cannot.*saved at 1 without.*fully_reshardable",
        ),
        ({"num_experts": 4}, {"num_experts": 4, "expert_model_parallel_size": 2}, None),
        ({"bf16": False}, {}, "bf16: true cannot.*trained with false"),
        (
            SHARDED,
            {**SHARDED, "pipeline_model_parallel_size": 2},
            "pipeline_model_parallel_size: 2 cannot.*saved at 1 without.*fully_reshardable",
        ),
        ({}, {"tensor_model_parallel_size": 2}, None),
        (
            {**SHARDED, "dist_ckpt_optim_fully_reshardable": True},
            {**SHARDED, "tensor_model_parallel_size": 2},
            None,
        ),
        # One form: both have fp32 masters; experts are spread in both.
        ({**SHARDED, "bf16": False}, SHARDED, None),
        (
            {"num_experts": 4, "expert_model_parallel_size": 2},
            {"num_experts": 4, "expert_model_parallel_size": 4},
            None,
        ),
        ({"expert_model_parallel_size": 2}, {}, None),
        (LAYER_WISE, LAYER_WISE, None),
        # The state is not read.
        ({}, {**NORMUON, "finetune": True}, None),
        ({}, {**NORMUON, "no_load_optim": True}, None),
        ({"no_save_optim": True}, NORMUON, None),
        ({"optimizer": None}, NORMUON, None),
    ],
)
def test_forms(before: dict[str, Any], now: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_optimizer_state(_args(**before), _args(**now))
        return
    with pytest.raises(UserError, match=message) as error:
        check_optimizer_state(_args(**before), _args(**now))
    assert "\n" not in str(error.value)


def test_a_run_says_so(tmp_path: Path) -> None:
    save = str(tmp_path / "run")
    train(configuration(tmp_path, train_iters=1, save=save))
    given = configuration(tmp_path, train_iters=2, load=save, use_distributed_optimizer=True)
    with pytest.raises(RankError, match=r"UserError: megatron\.use_distributed_optimizer: true"):
        train(given)
