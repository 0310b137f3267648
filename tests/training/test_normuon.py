"""NorMuon with Adam against a plain reference, through Megatron's factory, and on shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalatent import platform

platform.install()

import megatron.core.optimizer as megatron_optimizer  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

from megalatent.config import NorMuonConfig  # noqa: E402
from megalatent.training import optimizer as ours  # noqa: E402
from megalatent.training.normuon import Layout as Spread  # noqa: E402
from megalatent.training.normuon import NorMuon  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402
from tests.distributed.latent import VOCAB, Rig, Setup  # noqa: E402
from tests.distributed.layout import full_gradients, full_parameters  # noqa: E402

Tensors = dict[str, torch.Tensor]

STEPS = 20
LR, DECAY, MOMENTUM, BETA2 = 1e-2, 0.1, 0.9, 0.95
ADAM_LR, ADAM_DECAY, BETAS = 1e-3, 0.02, (0.9, 0.95)
# The five steps of Megatron's default coefficients ("quintic").
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass
class Reference:
    """NorMuon on one matrix in plain PyTorch."""

    matrix: torch.Tensor
    nesterov: bool = False
    state: Tensors = field(default_factory=dict)

    def step(self, gradient: torch.Tensor) -> None:
        w, tall = self.matrix, self.matrix.shape[0] >= self.matrix.shape[1]
        m = MOMENTUM * self.state.get("m", 0.0 * w) + (1 - MOMENTUM) * gradient
        x = MOMENTUM * m + (1 - MOMENTUM) * gradient if self.nesterov else m
        x = x / x.norm() if x.any() else x
        for a, b, c in COEFFICIENTS:
            if tall:  # the smaller product of the two that are the same
                gram = x.T @ x
                x = a * x + x @ (b * gram + c * gram @ gram)
            else:
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
        neuron = 1 if tall else 0
        square = x.square().mean(neuron, keepdim=True)
        v = BETA2 * self.state.get("v", 0.0 * square) + (1 - BETA2) * square
        update = x / v.clamp(min=1e-8).sqrt()
        update = update * (x.norm() / update.norm()) if x.any() else update
        scale = max(1.0, w.shape[0] / w.shape[1]) ** 0.5  # "shape_scaling"
        self.matrix = w - LR * DECAY * w - LR * scale * update
        self.state = {"m": m, "v": v}


class ReferenceModel:
    """All weights of a latent model by name: whole matrices under NorMuon, the rest under Adam."""

    def __init__(self, weights: Tensors, setup: Setup) -> None:
        self.head_dim, self.per_group = setup.hidden // 4, 2
        self.adam: dict[str, torch.optim.Optimizer] = {}
        self.rest: Tensors = {}
        self.matrices: dict[str, list[Reference]] = {}
        for name, weight in weights.items():
            if weight.dim() == 2 and "embedding" not in name:
                self.matrices[name] = [Reference(m) for m in self.cut(name, weight)]
            else:
                self.rest[name] = weight.clone()
                decay = ADAM_DECAY if weight.dim() == 2 else 0.0
                settings = {"lr": ADAM_LR, "betas": BETAS, "weight_decay": decay}
                self.adam[name] = torch.optim.AdamW([self.rest[name]], **settings)  # type: ignore[arg-type]

    def cut(self, name: str, weight: torch.Tensor) -> list[torch.Tensor]:
        """Q, K and V of all groups; gate and up projection; or the weight itself."""
        if name.endswith("linear_fc1.weight"):
            return list(weight.chunk(2))
        if not name.endswith("linear_qkv.weight"):
            return [weight]
        heads = weight.split(self.head_dim)
        size = self.per_group + 2
        kinds = [[h for i, h in enumerate(heads) if i % size in which] for which in self.kinds()]
        return [torch.cat(kind) for kind in kinds]

    def kinds(self) -> list[range]:
        n = self.per_group
        return [range(n), range(n, n + 1), range(n + 1, n + 2)]

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if not name.endswith("linear_qkv.weight"):
            return torch.cat(parts)
        d, n = self.head_dim, self.per_group
        q, k, v = parts[0].split(n * d), parts[1].split(d), parts[2].split(d)
        return torch.cat([x for group in zip(q, k, v, strict=True) for x in group])

    def step(self, gradients: Tensors) -> None:
        for name, references in self.matrices.items():
            for part, gradient in zip(references, self.cut(name, gradients[name]), strict=True):
                part.step(gradient)
        for name, adam in self.adam.items():
            self.rest[name].grad = gradients[name]
            adam.step()

    def weights(self) -> Tensors:
        found = {n: self.join(n, [r.matrix for r in rs]) for n, rs in self.matrices.items()}
        return found | self.rest


def build(rig: Rig, **settings: Any) -> Any:
    """Megatron's optimiser for the rig's model, as our hooks make Megatron build it."""
    config = NorMuonConfig(adam_lr=ADAM_LR, adam_weight_decay=ADAM_DECAY, beta2=BETA2)
    args = SimpleNamespace()
    ours._register(args, config)
    options = OptimizerConfig(
        optimizer=ours.NORMUON,
        lr=LR,
        min_lr=0.0,
        weight_decay=DECAY,
        clip_grad=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        muon_momentum=MOMENTUM,
        muon_scale_mode="shape_scaling",
        muon_fp32_matmul_prec="highest",
        **{"muon_tp_mode": "duplicated", **vars(args), **settings},
    )
    standard = megatron_optimizer.get_standard_config_overrides

    def megatrons(_: Any) -> Any:
        return options, standard(options)

    _, overrides = ours._with_adam_settings(megatrons, config)(None)
    optimizer = get_megatron_optimizer(options, rig.chunks, overrides)
    for group in optimizer.param_groups:  # what the scheduler does at a constant rate
        group["lr"] = group["max_lr"]
        group["weight_decay"] = group.get("start_wd", DECAY) * group["wd_mult"]
    return optimizer


def _train(
    rank: int, layout: Layout, setup: Setup, settings: dict[str, Any], steps: int
) -> tuple[list[Tensors], list[Tensors]]:
    """Full weights before the first step and after the last, and the gradients of every step."""
    init(layout)
    rig = Rig(setup, layout)
    optimizer = build(rig, **settings)
    weights, gradients = [full_parameters(rig.chunks, vocab_size=VOCAB)], []
    for _ in range(steps):
        rig.run()
        gradients.append(full_gradients(rig.chunks, vocab_size=VOCAB))
        optimizer.step()
        optimizer.zero_grad()
        rig.next_step()
    weights.append(full_parameters(rig.chunks, vocab_size=VOCAB))
    return weights, gradients


def _differences(found: Tensors, wanted: Tensors, start: Tensors) -> dict[str, float]:
    """Difference of each weight's movement from what it should be, over that movement."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name] - wanted[name]).norm() / (wanted[name] - start[name]).norm())
        for name in wanted
    }


SETUP = Setup(passes=(2, 2), layers=2, masked=False)
TP2 = {"tensor_model_parallel_size": 2}
LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("layout", "settings", "tolerance"),
    [
        # Rounding alone: the reference sums its products in another order.
        pytest.param(Layout(), {}, 1e-4, id="one"),
        pytest.param(Layout(tp=2, sp=True), {}, 1e-3, id="tp2-duplicated"),
        pytest.param(
            Layout(tp=2),
            {"muon_tp_mode": "distributed"},
            1e-3,
            id="tp2-distributed",
            marks=pytest.mark.full,
        ),
        pytest.param(Layout(tp=4), {}, 1e-3, id="tp4-two-groups", marks=pytest.mark.full),
        pytest.param(Layout(dp=2), LAYER_WISE, 1e-4, id="dp2-layer-wise", marks=pytest.mark.full),
        pytest.param(Layout(pp=2), {}, 1e-4, id="pp2", marks=pytest.mark.full),
    ],
)
def test_twenty_steps_equal_the_reference(
    layout: Layout, settings: dict[str, Any], tolerance: float
) -> None:
    """The reference gets the gradients of the very run, so that only the optimiser is compared."""
    first, *_ = run_ranks(layout.world_size, _train, layout, SETUP, settings, STEPS)
    (start, end), gradients = first
    reference = ReferenceModel(start, SETUP)
    for gradient in gradients:
        reference.step(gradient)
    worst = max(_differences(end, reference.weights(), start).items(), key=lambda item: item[1])
    assert worst[1] < tolerance, worst
    assert {"fusion.state_proj.weight", "fusion.gate_proj.weight"} <= reference.matrices.keys()
    assert "fusion.gate_norm.weight" in reference.rest


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="replicated", marks=pytest.mark.full),
        pytest.param(LAYER_WISE, id="layer-wise"),
    ],
)
def test_two_data_parallel_ranks_train_as_one(settings: dict[str, Any]) -> None:
    setup = replace(SETUP, passes=(2,))
    (start, one), _ = run_ranks(1, _train, Layout(), replace(setup, passes=(2, 2)), {}, 5)[0]
    for (_, two), _ in run_ranks(2, _train, Layout(dp=2), setup, settings, 5):
        assert max(_differences(two, one, start).values()) < 1e-3


# -- shards alone ---------------------------------------------------------------------------------

# Two query groups of two heads of four: four ranks cut them. Gate and up projection of 12 rows.
QKV, FC1 = (8, 4, 4), (12, 12)


def _on_shards(
    rank: int, mode: Any, shape: tuple[int, int], split: tuple[int, ...], dim: int, nesterov: bool
) -> torch.Tensor:
    group = dist.group.WORLD
    assert group is not None
    size = group.size()
    if split == FC1:
        split = (FC1[0] // size, FC1[1] // size)

    def take(full: torch.Tensor) -> torch.Tensor:
        if split and split != QKV:  # each rank: its gate above its up
            return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
        return full.chunk(size, dim)[rank].clone()

    weight = torch.nn.Parameter(take(_random(shape, 0)))
    spread = Spread(split=split, dim=dim, group=group, mode=mode)
    optimizer = NorMuon(
        [weight],
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        beta2=BETA2,
        layout_of=lambda _: spread,
        nesterov=nesterov,
        scale_mode="shape_scaling",
        matmul_precision="highest",
    )
    for step in range(1, STEPS + 1):
        weight.grad = take(_random(shape, step))
        optimizer.step()
    shards = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(shards, weight.detach())
    if split and split != QKV:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(shards, dim)


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _whole(
    shape: tuple[int, int], cut: Callable[[torch.Tensor], list[torch.Tensor]], nesterov: bool
) -> list[torch.Tensor]:
    references = [Reference(m, nesterov) for m in cut(_random(shape, 0))]
    for step in range(1, STEPS + 1):
        for reference, gradient in zip(references, cut(_random(shape, step)), strict=True):
            reference.step(gradient)
    return [reference.matrix for reference in references]


def _cut(split: tuple[int, ...]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    def cut(x: torch.Tensor) -> list[torch.Tensor]:
        if not split:
            return [x]
        rows: list[list[torch.Tensor]] = [[] for _ in split]
        for repetition in x.split(sum(split)):
            for kind, part in zip(rows, repetition.split(split), strict=True):
                kind.append(part)
        return [torch.cat(kind) for kind in rows]

    return cut


@pytest.mark.parametrize(
    ("ranks", "mode", "shape", "split", "dim"),
    [
        pytest.param(1, "duplicated", (24, 16), (), 0, id="one-tall"),
        pytest.param(1, "duplicated", (16, 24), (), 0, id="one-wide"),
        pytest.param(2, "duplicated", (24, 16), (), 1, id="columns-of-tall"),
        pytest.param(2, "duplicated", (16, 24), (), 0, id="rows-of-wide"),
        pytest.param(2, "distributed", (24, 16), (), 1, id="distributed-columns-of-tall"),
        pytest.param(2, "distributed", (16, 24), (), 0, id="distributed-rows-of-wide"),
        pytest.param(2, "duplicated", (32, 16), QKV, 0, id="a-group-a-rank"),
        pytest.param(4, "duplicated", (32, 16), QKV, 0, id="half-a-group-a-rank"),
        pytest.param(2, "duplicated", (24, 16), FC1, 0, id="gate-and-up"),
        pytest.param(2, "distributed", (24, 16), FC1, 0, id="distributed-gate-and-up"),
    ],
)
@pytest.mark.parametrize(
    "nesterov",
    [
        pytest.param(True, id="nesterov"),
        pytest.param(False, id="plain", marks=pytest.mark.full),
    ],
)
def test_shards_train_as_whole_matrices(
    ranks: int,
    mode: str,
    shape: tuple[int, int],
    split: tuple[int, ...],
    dim: int,
    nesterov: bool,
) -> None:
    cut = _cut(split)
    for found in run_ranks(ranks, _on_shards, mode, shape, split, dim, nesterov):
        for part, wanted in zip(cut(found), _whole(shape, cut, nesterov), strict=True):
            assert (part - wanted).norm() < 1e-4 * wanted.norm()


def test_blocks_train_each_for_itself() -> None:
    """The blockwise mode differs by design: every shard is a matrix of its own."""
    shape = (24, 16)
    found = run_ranks(2, _on_shards, "blockwise", shape, (), 0, False)[0]
    wanted = _whole(shape, lambda x: list(x.chunk(2)), False)
    assert (found - torch.cat(wanted)).norm() < 1e-4 * found.norm()
    (together,) = _whole(shape, lambda x: [x], False)
    moved = together - _random(shape, 0)
    assert (found - together).norm() > 0.05 * moved.norm()
