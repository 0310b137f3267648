"""What the sections `latent.optimizer` and `latent.decay_phase`, and FP8, refuse and fill in."""

from __future__ import annotations

from typing import Any

import pytest

from megalatent import platform
from megalatent.config import Config, DecayPhaseConfig, NorMuonConfig
from megalatent.errors import UserError
from tests.test_config import config

NORMUON = {"optimizer": "adaptive_muon"}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 2}
RECIPE = {
    "optimizer": {"adam_lr": 5e-4, "adam_weight_decay": 0.0},
    "decay_phase": {"weight_decay_follows_lr": True, "z_loss": 1e-5},
}


def test_the_recipe_passes() -> None:
    given = config(RECIPE, **NORMUON, **WSD, use_distributed_optimizer=True, bf16=True)
    given.check(2)
    assert given.latent.optimizer == NorMuonConfig(adam_lr=5e-4, adam_weight_decay=0.0, beta2=0.95)
    assert given.latent.decay_phase == DecayPhaseConfig(weight_decay_follows_lr=True, z_loss=1e-5)
    assert Config.from_mapping(given.resolved()) == Config(
        latent=given.latent, megatron=given.megatron, filled_in={}
    )


def test_whole_matrices_are_orthogonalised_unless_another_mode_is_asked_for() -> None:
    given = config(None, **NORMUON)
    assert given.megatron["muon_tp_mode"] == "duplicated"
    assert given.megatron["muon_fp32_matmul_prec"] == "high"  # there is no GPU
    chosen = config(None, **NORMUON, muon_tp_mode="blockwise", muon_fp32_matmul_prec="medium")
    assert chosen.megatron["muon_tp_mode"] == "blockwise"
    assert chosen.megatron["muon_fp32_matmul_prec"] == "medium"
    assert "muon_tp_mode" not in config().megatron


def _latent(section: str, **values: Any) -> dict[str, Any]:
    return {section: values}


@pytest.mark.parametrize(
    ("latent", "megatron", "message"),
    [
        (_latent("optimizer", adam_lr=-1.0), NORMUON, "adam_lr: -1.0 is negative"),
        (_latent("optimizer", beta2=1.0), NORMUON, "beta2: 1.0 is no decay"),
        (_latent("decay_phase", z_loss=-1e-5), {}, "z_loss: -1e-05 is negative"),
        (_latent("optimizer", adam_lr=1e-4), {}, "adam_lr: 0.0001 has no effect.*adaptive_muon"),
        (_latent("optimizer", beta2=0.9), {"optimizer": "sgd"}, "no effect.*optimizer: sgd"),
        (
            _latent("optimizer", adam_lr=1e-4),
            {**NORMUON, "decoupled_lr": 1e-3},
            "decoupled_lr: 0.001 is given besides",
        ),
        (None, {**NORMUON, "fp16": True}, "fp16: true does not work.*write bf16: true"),
        (
            None,
            {
                **NORMUON,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            "overlap_param_gather: true does not work.*leave it out",
        ),
        (None, {**NORMUON, "muon_scalar_optimizer": "lion"}, "'lion' is not supported"),
        (None, {**NORMUON, "muon_num_ns_steps": 0}, "muon_num_ns_steps: 0"),
        (
            None,
            {**NORMUON, "muon_coefficient_type": "cubic"},
            "'cubic' is no set.*one of simple, quintic",
        ),
        (None, {"lr_decay_style": "WSD"}, "lr_wsd_decay_iters: missing.*for example 2 of 10"),
        (None, {**WSD, "lr_wsd_decay_iters": 11}, "11 is not between 1 and the 10 iters"),
        (
            _latent("decay_phase", z_loss=1e-5),
            {"lr_decay_style": "constant"},
            "z_loss: 1e-05 has no effect.*no decay phase",
        ),
        (
            _latent("decay_phase", weight_decay_follows_lr=True),
            {"lr_decay_style": "constant"},
            "weight_decay_follows_lr: true has no effect",
        ),
        (_latent("fusion", fp8=True), {}, "fusion.fp8: true has no effect without"),
        (
            _latent("fusion", fp8=True, kind="concat"),
            {"fp8_format": "hybrid", "bf16": True},
            "fusion 'concat', whose matrix is applied one half at a time",
        ),
        (None, {"fp8_format": "hybrid"}, "fp8_format: 'hybrid' needs a GPU with FP8"),
    ],
)
def test_contradictions_are_named(latent: Any, megatron: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        config(latent, **megatron).check(1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("latent", "megatron", "message"),
    [
        (None, {"transformer_impl": "local", "bf16": True}, "needs transformer_impl: transformer_"),
        (None, {}, "computes on bf16 weights: add bf16: true"),
        (None, {"bf16": True, "hidden_size": 72}, "hidden_size: 72 is not a multiple of 16"),
        (
            None,
            {"bf16": True, "ffn_hidden_size": 208, "tensor_model_parallel_size": 2},
            "208 is not a multiple of 32 = 16 x tensor_model_parallel_size 2",
        ),
        (None, {"bf16": True, "seq_length": 36}, "36 x micro_batch_size 1 is not a multiple of 8"),
        (
            _latent("fusion", fp8=True),
            {"bf16": True, "seq_length": 40, "tensor_model_parallel_size": 2},
            "40 x micro_batch_size 1 is not a multiple of 16",
        ),
        (None, {"bf16": True}, None),
        (_latent("fusion", fp8=True), {"bf16": True, "tensor_model_parallel_size": 2}, None),
    ],
)
def test_fp8_where_there_is_a_gpu(
    latent: Any, megatron: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our checks alone: Megatron's would ask Transformer Engine."""
    from megalatent.config_fp8 import check_fp8
    from megalatent.config_megatron import parse

    options = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid", **megatron}
    given = config(latent, **options)
    monkeypatch.setattr(platform, "on_cpu", lambda: False)
    args = parse(given.megatron_argv())
    if message is None:
        check_fp8(given, args)
        return
    with pytest.raises(UserError, match=message) as error:
        check_fp8(given, args)
    assert "\n" not in str(error.value)
