"""The layers of the FBT 1B model, small, through whole steps: the oracle, and every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalatent.config import ModelConfig
from tests.distributed.harness import Layout, run_ranks
from tests.distributed.latent import Setup
from tests.distributed.test_against_oracle import GRADIENT, LOSS, _oracle_step, _step
from tests.distributed.test_layouts import SHARDED, _compare

# Gate, norms around branches, depth scaling, a window on all but every third layer; documents
# inside the rows, uneven masks, jitter and prefix mixin.
FBT = Setup(
    passes=(3, 2),
    layers=6,
    hidden=32,
    model=ModelConfig(attention_gate=True, sandwich_norm=True, residual_multiplier=6**-0.5),
    window=((5, 0), 3),
)


@pytest.mark.parametrize(
    "thd", [False, pytest.param(True, marks=pytest.mark.full)], ids=["masks", "packed"]
)
def test_losses_and_every_gradient_equal_the_oracle(thd: bool) -> None:
    setup = replace(FBT, thd=thd)
    losses, gradients, parameters = run_ranks(1, _step, [setup])[0][0]
    expected_losses, expected = _oracle_step(setup, parameters)
    assert losses.keys() == expected_losses.keys()
    for k, loss in expected_losses.items():
        assert abs(losses[k] - loss) < LOSS, k
    assert gradients.keys() == expected.keys()
    added = [name for name in gradients if "linear_gate" in name or "_bda.norm" in name]
    assert len(added) == 3 * FBT.layers
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        error, scale = (gradients[name] - gradient).norm(), gradient.norm()
        assert error <= GRADIENT * scale, (name, float(error / scale))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tp=2, sp=True), marks=pytest.mark.full),
        pytest.param(Layout(tp=2), marks=pytest.mark.full),
        pytest.param(Layout(cp=2), marks=pytest.mark.full),
        pytest.param(Layout(pp=2), marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vp=3), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, sp=True, cp=2), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, sp=True, pp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_layout_equals_one_rank(layout: Layout) -> None:
    setups = (FBT, replace(FBT, passes=(1, 1)), replace(FBT, passes=(2, 1), recompute="extra"))
    _compare(layout, setups, steps=2)


def test_tp_with_sp_equals_one_rank() -> None:
    _compare(Layout(tp=2, sp=True), (FBT,), steps=0)


@pytest.mark.full
def test_data_parallel_equals_one_rank() -> None:
    """Distributed optimiser, overlapped gather and reduction, several buckets."""
    ddp = {**SHARDED, "overlap_param_gather": True}
    _compare(Layout(dp=2), (replace(FBT, masked=False),), steps=2, ddp=ddp)


@pytest.mark.full
def test_bfloat16_trains_as_float32_does() -> None:
    """Types meet nowhere: gates, norms and multiplier keep the activations' type."""
    exact, rough = (
        run_ranks(1, _step, [replace(FBT, dtype=dtype)])[0][0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for k, loss in exact[0].items():
        # 8 bits on losses near 4, and as much again for weights that were rounded.
        assert abs(rough[0][k] - loss) < 0.05, k
