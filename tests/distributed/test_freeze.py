"""Steps of one pass leave the fusion as it is, to the last bit, whatever the optimiser.

Weight decay is on, and the moments are not zero: an untreated optimiser moves the weights by
either. Steps are counted from 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.layout import OPTIMIZER_TENSORS, full_optimizer_tensors, full_parameters
from tests.training.runs import Outcome, configuration, train

State = dict[str, torch.Tensor]

# Steps 1-3 plain, 4 fused, 5-9 plain, 10 fused. Saved after 7, in the middle of the plain ones.
SCHEDULE = [
    {"start": 0, "mixture": {1: 1.0}},
    {"start": 3, "mixture": {2: 1.0}},
    {"start": 4, "mixture": {1: 1.0}},
    {"start": 9, "mixture": {2: 1.0}},
]
PLAIN_STEPS = (1, 2, 3, 5, 6, 7, 8, 9)
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


NORMUON = {"optimizer": "adaptive_muon", "muon_scale_mode": "shape_scaling"}


def _latent(**fusion: Any) -> dict[str, Any]:
    return {"fusion": fusion, "passes": {"schedule": SCHEDULE, "timeout_seconds": 300}}


def _optimizer_state(chunks: list[Any], optimizer: Any, step: int) -> State:
    """Masters and moments of all weights; before the first step the masters are the weights."""
    if step == 0:
        return {f"param {name}": tensor for name, tensor in full_parameters(chunks).items()}
    return {
        f"{key} {name}": tensor
        for key in OPTIMIZER_TENSORS
        for name, tensor in full_optimizer_tensors(chunks, optimizer, key).items()
    }


def _optimizer_and_weights(chunks: list[Any], optimizer: Any, step: int) -> State:
    """Also the model's weights; with an overlapped gather they are old until the next forward."""
    weights = {f"weight {name}": tensor for name, tensor in full_parameters(chunks).items()}
    return weights | _optimizer_state(chunks, optimizer, step)


def _moved(before: State, after: State) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def _of_fusion(names: set[str]) -> set[str]:
    return {name for name in names if " fusion." in name}


@pytest.mark.parametrize(
    ("ranks", "options", "fusion"),
    [
        pytest.param(1, {}, "gated", id="fp32"),
        pytest.param(2, SHARDED, "gated", id="sharded-fp32", marks=pytest.mark.full),
        pytest.param(2, {**SHARDED, "bf16": True}, "concat", id="sharded-bf16"),
        pytest.param(1, {"bf16": True}, "gated", id="bf16", marks=pytest.mark.full),
        pytest.param(
            2, {"tensor_model_parallel_size": 2}, "gated", id="tp2", marks=pytest.mark.full
        ),
        pytest.param(
            2,
            {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
            "gated",
            id="pp2-sharded",
            marks=pytest.mark.full,
        ),
        pytest.param(
            2, {**NORMUON, "use_distributed_optimizer": True}, "gated", id="normuon-layer-wise"
        ),
        pytest.param(
            2,
            {**NORMUON, "bf16": True, "tensor_model_parallel_size": 2},
            "gated",
            id="normuon-bf16-tp2",
            marks=pytest.mark.full,
        ),
        pytest.param(1, NORMUON, "additive", id="normuon", marks=pytest.mark.full),
    ],
)
def test_plain_steps_leave_the_fusion_alone(
    tmp_path: Path, ranks: int, options: dict[str, Any], fusion: str
) -> None:
    look = _optimizer_state if options.get("overlap_param_gather") else _optimizer_and_weights
    save = str(tmp_path / "checkpoints")
    given = configuration(
        tmp_path, _latent(kind=fusion), train_iters=10, save=save, save_interval=7, **options
    )
    outcome = train(given, ranks, each_step=look)[0]
    states = outcome.kept
    assert len(states) == 11
    # A norm's weight of 1 in bf16 moves only when its master has moved by 0.004.
    fused = {name for name in _of_fusion(set(states[1])) if not name.startswith("weight")}
    assert fused
    # The additive matrix starts at zero, and passes no gradient on to the norm before it.
    first = {name for name in fused if not name.endswith("adapter_norm.weight")}
    for step in range(1, 11):
        moved = _moved(states[step - 1], states[step])
        assert len(moved - fused) > 10  # the backbone trains in every step
        if step in PLAIN_STEPS:
            assert not _of_fusion(moved), f"step {step}"
        elif step == 4:
            assert _of_fusion(moved) >= first
    assert _of_fusion(_moved(states[9], states[10])) >= fused
    assert outcome.steps == {10.0}

    given["megatron"] |= {"load": save, "ckpt_step": 7, "save": str(tmp_path / "resumed")}
    resumed = train(given, ranks, each_step=look)[0]
    assert len(resumed.kept) == 4
    for state, expected in zip(resumed.kept, states[7:], strict=True):
        assert not _moved(expected, state)
    _weights_follow_masters(resumed)


def _weights_follow_masters(outcome: Outcome) -> None:
    for name, weight in outcome.weights.items():
        master = outcome.optimizer["param"][name]
        assert torch.equal(weight, master) or torch.equal(weight, master.bfloat16().float()), name


def test_a_norm_of_every_input_trains_in_plain_steps(tmp_path: Path) -> None:
    latent = _latent(input_norm="all")
    states = train(configuration(tmp_path, latent, train_iters=3), each_step=_optimizer_state)[0]
    for before, after in zip(states.kept, states.kept[1:], strict=False):
        assert _of_fusion(_moved(before, after)) >= {"param fusion.fused_norm.weight"}
        assert all("fused_norm" in name for name in _of_fusion(_moved(before, after)))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one", marks=pytest.mark.full),
        pytest.param(2, SHARDED, id="sharded"),  # the first rank holds no part of the fusion
    ],
)
def test_fresh_fusion_warms_up(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    """The n-th update counts n / warmup of its full size, also after a restart between updates."""
    latent = {"passes": {"schedule": [*SCHEDULE[:2]], "timeout_seconds": 300}}
    given = configuration(tmp_path, latent, train_iters=7, **options)
    given["megatron"] |= {"save": str(tmp_path / "full"), "save_interval": 5}
    full = train(given, ranks, each_step=_optimizer_state)[0].kept
    given["latent"]["fusion"] = {"warmup_iters": 3}
    given["megatron"] |= {"save": str(tmp_path / "warm")}
    warm = train(given, ranks, each_step=_optimizer_state)[0].kept
    names = {n for n in full[0] if n.startswith("param fusion.")}
    for name in names:
        # Both start the fused steps from the same state.
        assert torch.equal(warm[3][name], full[3][name])
        whole, part = full[4][name] - full[3][name], warm[4][name] - warm[3][name]
        assert (part - whole / 3).norm() < 1e-4 * whole.norm(), name
    # Moments are those of the full update.
    assert not {n for n in _of_fusion(_moved(full[4], warm[4])) if n.startswith("exp")}

    # Two updates are done: without their count the third would be scaled by a third again.
    given["megatron"] |= {"load": str(tmp_path / "warm"), "ckpt_step": 5}
    given["megatron"] |= {"save": str(tmp_path / "resumed")}
    resumed = train(given, ranks, each_step=_optimizer_state)[0].kept
    for state, expected in zip(resumed, warm[5:], strict=True):
        assert not _moved(expected, state)
