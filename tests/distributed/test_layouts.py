"""Every layout gives the losses and the gradients of one rank, and still does after training.

The reference is the same model on one rank, which `test_against_oracle.py` compares with plain
PyTorch. Losses agree to 1e-5 and each gradient to 1e-4 (norm of the difference over norm): fp32
sums in another order differ by about 1e-6, a missing or doubled term by 1e-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import VOCAB, Rig, Setup
from tests.distributed.layout import full_gradients

LOSS, GRADIENT = 1e-5, 1e-4

# Uneven masks and several documents in a row, jitter and prefix mixin on; lambda is not 1.
SETUPS = (
    Setup(passes=(1, 1)),
    Setup(passes=(2, 2)),
    Setup(passes=(3, 1)),
    Setup(fusion="additive", passes=(2, 3)),
    Setup(fusion="concat", passes=(3, 2), weighting="sum", lambda_=1.0),
    Setup(passes=(2, 1), per_token=True),
)
# One data-parallel rank with large micro-batches has other means than two with small ones, unless
# every token counts.
EVEN = tuple(replace(s, masked=s.per_token) for s in SETUPS)
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 3000}


@dataclass(frozen=True)
class Result:
    losses: list[dict[int, float]]
    gradients: list[dict[str, torch.Tensor]]


def _train(rank: int, layout: Layout, setups: Sequence[Setup], steps: int) -> list[Result]:
    """Losses of every step and the gradients of the first and the last one."""
    init(layout)
    results = []
    for setup in setups:
        rig = Rig(setup, layout)
        distributed = bool(setup.ddp.get("use_distributed_optimizer"))
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                weight_decay=0.1,
                clip_grad=1.0,
                use_distributed_optimizer=distributed,
                # Elements whose gradient is rounding noise would otherwise take full steps.
                adam_eps=1e-5,
            ),
            rig.chunks,
        )
        losses, gradients = [], []
        for step in range(steps + 1):
            rig.run()
            losses.append(rig.losses())
            if step in (0, steps):
                gradients.append(full_gradients(rig.chunks, vocab_size=VOCAB))
            if step < steps:
                optimizer.step()
                optimizer.zero_grad()
                rig.next_step()
        results.append(Result(losses, gradients))
    return results


_REFERENCES: dict[str, list[Result]] = {}


def _reference(setups: tuple[Setup, ...], steps: int) -> list[Result]:
    plain = tuple(replace(s, ddp={}) for s in setups)
    key = repr((plain, steps))
    if key not in _REFERENCES:
        _REFERENCES[key] = run_ranks(1, _train, Layout(), plain, steps)[0]
    return _REFERENCES[key]


def _compare(layout: Layout, setups: tuple[Setup, ...], steps: int, ddp: Any = None) -> None:
    given = tuple(replace(s, ddp=ddp or {}) for s in setups)
    results = run_ranks(layout.world_size, _train, layout, given, steps)
    for setup, expected, *got in zip(setups, _reference(setups, steps), *results, strict=True):
        for result in got[:1]:  # reassembled on every rank alike
            what = f"{layout}, {setup.fusion}, K = {setup.passes}"
            for step, (a, b) in enumerate(zip(result.losses, expected.losses, strict=True)):
                assert a.keys() == b.keys(), what
                for k in b:
                    assert abs(a[k] - b[k]) < LOSS, f"{what}, step {step}, pass {k}"
            for a, b in zip(result.gradients, expected.gradients, strict=True):
                assert a.keys() == b.keys(), what
                for name in b:
                    error = (a[name] - b[name]).norm()
                    scale = b[name].norm()
                    assert error <= GRADIENT * scale + 1e-12, f"{what}: {name}: {error / scale}"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=2, sp=True),
        Layout(cp=2),
        Layout(pp=2),
        Layout(pp=2, vp=2),
        Layout(tp=2, sp=True, pp=2),
        pytest.param(Layout(pp=4), marks=pytest.mark.full),
        pytest.param(Layout(pp=2, cp=2), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, sp=True, cp=2), marks=pytest.mark.full),
        pytest.param(Layout(tp=4, sp=True), marks=pytest.mark.full),
        pytest.param(Layout(tp=4), marks=pytest.mark.full),
        pytest.param(Layout(cp=4), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, pp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_layout_equals_one_rank(layout: Layout) -> None:
    _compare(layout, SETUPS, steps=5)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        Layout(dp=2, pp=2),
        pytest.param(Layout(tp=2, dp=2), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, sp=True, dp=2), marks=pytest.mark.full),
        pytest.param(Layout(cp=2, dp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_data_parallel_equals_one_rank(layout: Layout) -> None:
    """Distributed optimiser, overlapped reduction and several buckets, with K changing."""
    _compare(layout, EVEN, steps=5, ddp=SHARDED)


@pytest.mark.parametrize(
    ("layout", "count"),
    [(Layout(pp=4), 3), (Layout(pp=4), 6), (Layout(pp=2, vp=2), 5), (Layout(pp=2), 1)],
    ids=lambda value: str(value),
)
def test_micro_batches_that_fit_no_grid(layout: Layout, count: int) -> None:
    """Fewer micro-batches than stages, and numbers that the stages do not divide."""
    passes = tuple(1 + (2 * i) % 3 for i in range(count))
    _compare(layout, (Setup(passes=passes, batch=count),), steps=0)


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(cp=2), Layout(pp=2)], ids=str)
def test_norm_of_all_inputs_and_recomputation(layout: Layout) -> None:
    setups = (
        Setup(passes=(2, 1), input_norm="all"),
        Setup(passes=(3, 2), recompute="extra"),
        Setup(passes=(2, 1), recompute="all"),
    )
    _compare(layout, setups, steps=1)


def test_packed_sequences_in_thd_layout() -> None:
    """Documents given by their boundaries equal documents given by masks."""
    masked = Setup(passes=(3, 2))
    expected = _reference((masked,), 0)[0]
    for layout in (Layout(), Layout(tp=2, sp=True), Layout(pp=2)):
        result = run_ranks(layout.world_size, _train, layout, (replace(masked, thd=True),), 0)[0][0]
        for k, loss in expected.losses[0].items():
            assert abs(result.losses[0][k] - loss) < LOSS, f"{layout}, pass {k}"
        for name, gradient in expected.gradients[0].items():
            error = (result.gradients[0][name] - gradient).norm()
            assert error <= GRADIENT * gradient.norm(), f"{layout}: {name}"


def _uneven(rank: int, layout: Layout, setup: Setup) -> tuple[int, list[Result]]:
    results = _train(rank, layout, (setup,), 1)
    return len(Rig(setup, layout).models[0].decoder.layers), results


@pytest.mark.parametrize("split", ["E|ttttL", "Etttt|L", "Et|tttL"])
def test_uneven_stages(split: str) -> None:
    """Layers as `megalatent plan --suggest-split` may divide them: also a stage without any."""
    setup = Setup(passes=(3, 2), config={"pipeline_model_parallel_layout": split})
    even = replace(setup, config={})
    results = run_ranks(2, _uneven, Layout(pp=2), setup)
    assert [layers for layers, _ in results] == [part.count("t") for part in split.split("|")]
    expected = _reference((even,), 1)[0]
    result = results[0][1][0]
    for losses, one in zip(result.losses, expected.losses, strict=True):
        assert all(abs(losses[k] - one[k]) < LOSS for k in one)
    for a, b in zip(result.gradients, expected.gradients, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            assert (a[name] - b[name]).norm() <= GRADIENT * b[name].norm() + 1e-12, name
