"""What the sections `latent.optimizer` and `latent.decay_phase`, and FP8, refuse and fill in."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_a_decay_right_after_the_warmup_and_through_the_whole_run() -> None:
    config(None, **{**WSD, "lr_wsd_decay_iters": 7}, lr_warmup_iters=3).check(1)
    config(None, **{**WSD, "lr_wsd_decay_iters": 10}).check(1)


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
            None,
            {**WSD, "lr_wsd_decay_iters": 8, "lr_warmup_iters": 3},
            "lr_wsd_decay_iters: 8 reaches into the warm-up.*give at most 7",
        ),
        (
            None,
            {**WSD, "lr_wsd_decay_iters": 8, "lr_warmup_fraction": 0.25},
            "the first 2.5 of 10 iters: give at most 7.5",
        ),
        (
            None,
            {"lr_wsd_decay_iters": 2},
            "lr_wsd_decay_iters: 2 has no effect with lr_decay_style: linear.*WSD",
        ),
        (None, {"lr_warmup_fraction": 1.0}, "lr_warmup_fraction: 1.0 leaves nothing of the 10"),
        (
            None,
            {"train_iters": None, "train_samples": 40, "lr_warmup_samples": 40},
            "lr_warmup_samples: 40 leaves nothing of the 40 samples",
        ),
        (
            None,
            {
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
                "weight_decay_incr_style": "linear",
            },
            "end_weight_decay: 0.1 is below start_weight_decay: 0.2",
        ),
        (
            None,
            {"optimizer": "sgd", "use_distributed_optimizer": True},
            "'sgd' has a state that Megatron 0.19 can neither",
        ),
        (None, {"optimizer": "soap", "save": "x", "save_interval": 1}, "'soap' has a state"),
        (
            None,
            {"global_batch_size": None, "step_batch_size_schedule": "0:4 64:8"},
            "step_batch_size_schedule: '0:4 64:8'.*train_samples instead of train_iters",
        ),
        (
            None,
            {
                "global_batch_size": None,
                "train_iters": None,
                "train_samples": 40,
                "step_batch_size_schedule": "0:4 0:8",
            },
            "strictly increasing.*as 0:256 10B:512",
        ),
        (None, {"lr_warmup_init": 0.1}, "lr_warmup_init: 0.1 is above lr: 0.001"),
        (
            None,
            {
                **NORMUON,
                "muon_tp_mode": "distributed",
                "tensor_model_parallel_size": 4,
                "group_query_attention": True,
                "num_query_groups": 2,
            },
            "'distributed' needs whole query groups.*2 groups.*tensor_model_parallel_size: 4",
        ),
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


def test_another_machine_may_have_what_this_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs and submissions check what is asked for; here are no GPU and no FP8."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpus: dict[str, Any] = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    exchanged: dict[str, Any] = {"context_parallel_size": 2, "attention_dropout": 0.1}
    experts: dict[str, Any] = {
        "num_experts": 4,
        "moe_grouped_gemm": True,
        "disable_bias_linear": True,
    }
    for options in ({**gpus, **exchanged}, {**experts, "swiglu": True}):
        config(None, **options).check(2, missing=[])
        config(None, **options).check(2, checkpoints_repaired=True)
    for lacking, latent, options in (
        ("fp8_format", None, gpus),
        ("attention_dropout", None, exchanged),
        ("moe_grouped_gemm", None, experts),
        ("kernel", {"fusion": {"kernel": "triton"}}, {"bf16": True}),
    ):
        run = config(latent, **options)
        run.check(2, missing=[])
        with pytest.raises(UserError, match=lacking):
            run.check(2)
    # What no machine has is a mistake everywhere.
    with pytest.raises(UserError, match="p2p has no sliding window"):
        config(None, **exchanged, window_size=[15, 0]).check(2, missing=[])


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
        (
            None,
            {"bf16": True, "kv_channels": 20, "num_attention_heads": 2},
            "kv_channels: 20 x 2 heads are no multiple of 16",
        ),
        (
            None,
            {
                "bf16": True,
                "kv_channels": 8,
                "group_query_attention": True,
                "num_query_groups": 1,
                "tensor_model_parallel_size": 2,
            },
            "8 x 6 heads, with their keys and values, are no multiple of 32",
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
    latent: Any, megatron: dict[str, Any], message: str | None
) -> None:
    """Our checks alone: Megatron's would ask Transformer Engine."""
    from megalatent.config_fp8 import check_fp8
    from megalatent.config_megatron import parse

    options = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid", **megatron}
    given = config(latent, **options)
    args = parse(given.megatron_argv())
    if message is None:
        check_fp8(given, args)
        return
    with pytest.raises(UserError, match=message) as error:
        check_fp8(given, args)
    assert "\n" not in str(error.value)
