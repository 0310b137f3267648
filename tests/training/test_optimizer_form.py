"""State of optimisers with experts apart and of one for all weights, each in the other's form.

Whole runs from one to the other are in test_runs_reshard.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

from megalatent.errors import UserError
from megalatent.training.optimizer_form import in_own_form


def moment(name: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, torch.zeros(2))


def group(params: Any, step: int | None = None, **options: Any) -> dict[str, Any]:
    found = {"wd_mult": 1.0, "is_expert_parallel": False, "lr": 0.0, "params": params}
    return {**found, **options, **({} if step is None else {"step": step})}


def wanted(*numbers: int, **options: Any) -> dict[str, Any]:
    """What an optimiser in fp32 asks for; the numbers of its weights are its own."""
    return {
        "state": {n: {"exp_avg": moment(f"{n}")} for n in numbers},
        "param_groups": [group(LocalNonpersistentObject(list(numbers)), **options)],
    }


def of(numbers: list[int]) -> dict[int, Any]:
    return {n: {"exp_avg": torch.full((2,), float(n))} for n in numbers}


def test_the_same_form_is_left_alone() -> None:
    loaded = {"state": {"common_step": 3}, "param_groups": []}
    assert in_own_form(wanted(0), loaded) is loaded


def test_experts_get_an_optimizer_of_their_own() -> None:
    own: dict[Any, Any] = {0: wanted(0, 1), 1: wanted(0, is_expert_parallel=True)}
    saved = {"state": {"common_step": 7}, "param_groups": [group([0, 1, 2], lr=0.5, max_lr=1.0)]}
    own[0]["param_groups"][0]["max_lr"] = own[1]["param_groups"][0]["max_lr"] = 1.0
    loaded: dict[Any, Any] = {
        **saved,
        0: {"state": of([0, 1]), "param_groups": [{"params": [0, 1]}]},
        1: {"state": of([0]), "param_groups": [{"params": [0]}]},
    }
    found = in_own_form(own, loaded)
    assert list(found) == [0, 1]
    assert found[0]["state"].pop("common_step") == found[1]["state"].pop("common_step") == 7
    assert torch.equal(found[0]["state"][1]["exp_avg"], torch.ones(2))
    (dense,), (experts,) = found[0]["param_groups"], found[1]["param_groups"]
    assert dense == group([0, 1], lr=0.5, max_lr=1.0)
    assert experts == group([0], lr=0.5, max_lr=1.0, is_expert_parallel=True)


def test_one_optimizer_takes_the_experts_in() -> None:
    """As the distributed optimiser has it: no weights in the groups, and the step in each."""

    def state(step: int | None = None, **options: Any) -> dict[str, Any]:
        entry = group(None, step, **options)
        del entry["params"]
        return {"optimizer": {"param_groups": [entry]}, "sharding": "fully"}

    own = {**state(), "param_state": {0: {"exp_avg": moment("a")}}}
    saved = {0: state(9, lr=0.5), 1: state(9, lr=0.5, is_expert_parallel=True)}
    saved[0]["grad_scaler"] = {"scale": 2.0}
    loaded: dict[Any, Any] = {**saved, "param_state": {0: {"exp_avg": torch.ones(2)}}}
    found = in_own_form(own, loaded)
    assert found.pop("param_state")[0]["exp_avg"].tolist() == [1.0, 1.0]
    assert found == {**state(9, lr=0.5), "grad_scaler": {"scale": 2.0}}


def test_a_group_that_the_checkpoint_has_not() -> None:
    own: dict[Any, Any] = {0: wanted(0), 1: wanted(1, is_expert_parallel=True, wd_mult=0.0)}
    saved: dict[Any, Any] = {"state": {}, "param_groups": [group([0, 1])]}
    with pytest.raises(UserError, match=r"no group of weights with .*wd_mult = 0\.0.*: keep") as e:
        in_own_form(own, {**saved, 0: {}, 1: {}})
    assert "\n" not in str(e.value)


def test_another_learning_rate_is_the_schedulers_question() -> None:
    own: dict[Any, Any] = {0: wanted(0, max_lr=2.0), 1: wanted(1, max_lr=2.0)}
    saved: dict[Any, Any] = {"state": {}, "param_groups": [group([0, 1], max_lr=1.0)]}
    found = in_own_form(own, {**saved, 0: {}, 1: {}})
    assert [part["param_groups"][0]["max_lr"] for part in found.values()] == [1.0, 1.0]
    # of two that differ in nothing else, none is the right one
    saved["param_groups"].append(group([2], max_lr=3.0))
    with pytest.raises(UserError, match=r"no group of weights with max_lr = 2\.0"):
        in_own_form(own, {**saved, 0: {}, 1: {}})
