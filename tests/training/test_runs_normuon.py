"""Runs with NorMuon: on other layouts, resumed, resumed on other layouts; and plain steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.layout import OPTIMIZER_TENSORS
from tests.training.runs import (
    CHANGING,
    Outcome,
    Sources,
    configuration,
    last_stage,
    losses,
    same_state,
    train,
)

# Steps 1-2 are saved, 3-5 follow; K is 2, 1, 3, 1, 2. The learning rate decays from step 4 on.
LATENT = {
    "passes": CHANGING,
    "optimizer": {"adam_lr": 1e-3, "adam_weight_decay": 0.01},
    "decay_phase": {"weight_decay_follows_lr": True, "z_loss": 1e-3},
}
SAVED, STEPS = 2, 5
RECIPE = {
    "optimizer": "adaptive_muon",
    "muon_scale_mode": "shape_scaling",
    "lr": 1e-2,
    "lr_decay_iters": STEPS,
    "lr_warmup_iters": 1,
    "lr_decay_style": "WSD",
    "lr_wsd_decay_style": "linear",
    "lr_wsd_decay_iters": 2,
}
LAYER_WISE = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
BF16 = {"bf16": True}
full = pytest.mark.full


def _train(folder: Path, name: str, ranks: int, options: dict[str, Any], **more: Any) -> Outcome:
    options = {**RECIPE, **options, **more}
    given = configuration(
        folder, LATENT, train_iters=STEPS, save=str(folder / name), save_interval=SAVED, **options
    )
    return last_stage(train(given, ranks))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"), _train)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="one", marks=full),
        pytest.param(2, LAYER_WISE, id="layer-wise"),
        pytest.param(2, {**LAYER_WISE, **BF16}, id="layer-wise-bf16", marks=full),
        pytest.param(2, {**TP2, **BF16}, id="tp2-bf16", marks=full),
        pytest.param(2, PP2, id="pp2", marks=full),
    ],
)
def test_resuming_changes_nothing(sources: Sources, ranks: int, options: dict[str, Any]) -> None:
    source, expected = sources.get(ranks, options)
    load: dict[str, Any] = {"load": str(sources.folder / source), "ckpt_step": SAVED}
    name = f"resumed-{source}"
    resumed = _train(sources.folder, name, ranks, options, **load)
    whole, rest = losses(sources.folder / source), losses(sources.folder / name)
    assert list(rest) == list(range(SAVED + 1, STEPS + 1))
    assert rest == {step: whole[step] for step in rest}
    assert all(expected.optimizer[key] for key in OPTIMIZER_TENSORS)
    same_state(resumed, expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1, LAYER_WISE), (2, {**TP2, **LAYER_WISE}), id="tp1-tp2"),
        pytest.param((2, LAYER_WISE), (1, LAYER_WISE), id="dp2-dp1", marks=full),
        pytest.param((1, LAYER_WISE), (2, {**PP2, **LAYER_WISE}), id="pp1-pp2", marks=full),
        pytest.param((2, TP2), (1, {}), id="tp2-tp1-replicated", marks=full),
        pytest.param((2, PP2), (2, TP2), id="pp2-tp2-replicated", marks=full),
        pytest.param(
            (2, {**TP2, **LAYER_WISE}),
            (4, {**TP2, "sequence_parallel": True, **LAYER_WISE}),
            id="tp2-dp2",
            marks=full,
        ),
    ],
)
def test_another_layout_goes_on(
    sources: Sources, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]]
) -> None:
    source, expected = sources.get(*before)
    name = f"resharded-{len(list(sources.folder.iterdir()))}"
    load: dict[str, Any] = {"load": str(sources.folder / source), "ckpt_step": SAVED}
    resumed = _train(sources.folder, name, *after, **load)
    whole, rest = losses(sources.folder / source), losses(sources.folder / name)
    assert list(rest) == list(range(SAVED + 1, STEPS + 1))
    for step, found in rest.items():
        assert found == pytest.approx(whole[step], rel=1e-4), step
    assert resumed.steps == expected.steps == {float(STEPS)}
    for key in OPTIMIZER_TENSORS:
        assert resumed.optimizer[key].keys() == expected.optimizer[key].keys()
        for weight, tensor in expected.optimizer[key].items():
            difference = (resumed.optimizer[key][weight] - tensor).norm()
            # Adam divides by the root of gradients that may be rounding noise.
            assert difference <= 2e-3 * tensor.norm(), f"{key} of {weight}"


def test_matrices_are_sorted_as_said(sources: Sources) -> None:
    """NorMuon has the matrices, the fusion's too; Adam the embedding and the vectors."""
    _, outcome = sources.get(1, LAYER_WISE)
    matrices = {n for n, w in outcome.weights.items() if w.dim() == 2 and "embedding" not in n}
    assert outcome.optimizer["momentum_buffer"].keys() == matrices
    assert outcome.optimizer["exp_avg"].keys() == outcome.weights.keys() - matrices
    assert {"fusion.state_proj.weight", "fusion.gate_proj.weight"} <= matrices
    for name in matrices:
        moment = outcome.optimizer["moment2_buffer"][name]
        assert moment.shape == outcome.weights[name].shape
        assert torch.isfinite(moment).all()
