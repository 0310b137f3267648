"""Losses of experts and of multi-token prediction carry the weight of their pass, on every layout.

The reference is one autograd graph over all passes of a step: Megatron's model from end to end for
each pass, the gated fusion as a formula, and the auxiliary losses as ordinary terms of the sum. In
training they enter in the backward instead, by a scale that is common to the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megalatent.model.layers import mtp_spec
from tests.distributed import latent
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import VOCAB, Rig, Setup
from tests.distributed.layout import full_gradients

# fp32 sums in another order differ by about 1e-6; the wrong pass's weight by 1e-1.
LOSS, GRADIENT = 1e-5, 1e-4

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.05,
    "moe_token_dispatcher_type": "alltoall",
}
PREDICTION = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}

EXPERT = Setup(passes=(2, 3), config=EXPERTS, jitter=0.0, prefix_mixin=False)
PREDICTING = replace(EXPERT, passes=(3, 1), config=PREDICTION)
BOTH = replace(
    EXPERT, passes=(1, 3), config={**EXPERTS, **PREDICTION}, weighting="sum", lambda_=1.0
)

Tensors = dict[str, torch.Tensor]


class _Predicting(GPTModel):
    """With the layers of multi-token prediction that its configuration asks for."""

    def __init__(self, config: Any, *args: Any, vp_stage: int | None, **kwargs: Any) -> None:
        prediction = mtp_spec(config, vp_stage=vp_stage)
        super().__init__(config, *args, mtp_block_spec=prediction, vp_stage=vp_stage, **kwargs)


def _rig(setup: Setup, layout: Layout) -> Rig:
    """In a rank."""
    init(layout)
    vars(latent)["GPTModel"] = _Predicting
    return Rig(setup, layout)


@contextmanager
def _collected(losses: list[torch.Tensor]) -> Iterator[None]:
    """Inside, auxiliary losses go into the list and nowhere else."""

    def collect(output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        losses.append(loss.sum())
        return output

    scalers: tuple[Any, ...] = (MoEAuxLossAutoScaler, MTPLossAutoScaler)
    for scaler in scalers:
        scaler.apply = staticmethod(collect)
    try:
        yield
    finally:
        for scaler in scalers:
            del scaler.apply


def _fused(fusion: Any, embedding: torch.Tensor, state: torch.Tensor, eps: float) -> torch.Tensor:
    """FBT eq. 4 on whole sequences `[s, b, h]`."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    gate = norm(embedding, fusion.gate_norm.weight) @ fusion.gate_proj.weight.T
    value = state.roll(1, 0) @ fusion.state_proj.weight.T
    return norm(value * gate.sigmoid(), fusion.fused_norm.weight)


def _one_graph(rank: int, setup: Setup) -> tuple[dict[int, float], Tensors]:
    rig = _rig(setup, Layout())
    (model,) = rig.models
    backbone, states = model.backbone, list[torch.Tensor]()
    backbone.decoder.register_forward_hook(lambda module, given, output: states.append(output))
    objective = torch.zeros(())
    sums: dict[int, list[float]] = {}
    auxiliary: list[torch.Tensor] = []
    for i, passes in enumerate(setup.passes):
        samples = rig.samples(i)
        raw = setup.micro_batch(samples)
        is_start = setup.starts(samples).T[..., None]
        embedding = backbone.embedding(input_ids=raw["tokens"], position_ids=raw["position_ids"])
        for k in range(1, passes + 1):
            inputs = embedding
            if k > 1:
                fused = _fused(model.fusion, embedding, states[-1], rig.config.layernorm_epsilon)
                inputs = torch.where(is_start, embedding, fused)
            auxiliary.clear()
            with _collected(auxiliary):
                losses = backbone(
                    raw["tokens"],
                    raw["position_ids"],
                    raw["attention_mask"],
                    decoder_input=inputs,
                    labels=raw["labels"],
                    loss_mask=raw["loss_mask"],
                )
            assert auxiliary
            mask = raw["loss_mask"]
            total = (losses * mask).sum()
            weight = 1.0 if k == 1 or setup.weighting == "sum" else setup.lambda_ / (passes - 1)
            terms = total / mask.sum() + torch.stack(auxiliary).sum()
            objective = objective + weight * terms / len(setup.passes)
            have = sums.setdefault(k, [0.0, 0.0])
            have[0] += float(total)
            have[1] += float(mask.sum())
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(objective, list(parameters.values()), materialize_grads=True)
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.main_grad.copy_(gradient)
    losses_by_pass = {k: loss / tokens for k, (loss, tokens) in sorted(sums.items())}
    return losses_by_pass, full_gradients(rig.chunks, vocab_size=VOCAB)


def _step(rank: int, layout: Layout, setup: Setup) -> tuple[dict[int, float], Tensors]:
    rig = _rig(setup, layout)
    # A first step leaves its scales behind: they must not show in the second.
    rig.run()
    rig.run()
    return rig.losses(), full_gradients(rig.chunks, vocab_size=VOCAB)


_REFERENCES: dict[str, tuple[dict[int, float], Tensors]] = {}


def _reference(setup: Setup) -> tuple[dict[int, float], Tensors]:
    key = repr(setup)
    if key not in _REFERENCES:
        _REFERENCES[key] = run_ranks(1, _one_graph, setup)[0]
    return _REFERENCES[key]


full = pytest.mark.full


@pytest.mark.parametrize(
    ("setup", "layout"),
    [
        pytest.param(BOTH, Layout(), id="both-single"),
        pytest.param(BOTH, Layout(pp=2), id="both-pp2"),
        pytest.param(EXPERT, Layout(ep=2, dp=2), id="experts-ep2"),
        pytest.param(EXPERT, Layout(), id="experts-single", marks=full),
        pytest.param(EXPERT, Layout(pp=2, vp=2), id="experts-pp2-vp2", marks=full),
        pytest.param(EXPERT, Layout(tp=2, sp=True), id="experts-tp2-sp", marks=full),
        pytest.param(EXPERT, Layout(cp=2), id="experts-cp2", marks=full),
        pytest.param(EXPERT, Layout(pp=2, ep=2, dp=2), id="experts-pp2-ep2", marks=full),
        pytest.param(PREDICTING, Layout(), id="prediction-single", marks=full),
        pytest.param(PREDICTING, Layout(pp=2), id="prediction-pp2", marks=full),
        pytest.param(PREDICTING, Layout(tp=2, sp=True), id="prediction-tp2-sp", marks=full),
    ],
)
def test_every_gradient_equals_one_graph(setup: Setup, layout: Layout) -> None:
    given = setup
    if layout.dp > 1:
        # Ranks with micro-batches of K each are one rank with those micro-batches.
        setup = replace(setup, passes=(2,) * layout.dp * 2, batch=4 * layout.dp)
        given = replace(setup, passes=(2, 2))
    losses, gradients = _reference(setup)
    found, got = run_ranks(layout.world_size, _step, layout, given)[0]
    assert found == pytest.approx(losses, abs=LOSS)
    assert got.keys() == gradients.keys()
    named = "router" if setup.config.get("num_moe_experts") else "mtp."
    assert any(named in name and tensor.norm() > 0 for name, tensor in gradients.items())
    for name, expected in gradients.items():
        error = (got[name] - expected).norm()
        assert error <= GRADIENT * expected.norm() + 1e-9, f"{name}: {error / expected.norm()}"
