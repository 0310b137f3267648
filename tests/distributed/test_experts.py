"""Mixtures of experts over several passes: what routers count, and experts spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import VOCAB, Rig, Setup
from tests.distributed.layout import full_gradients

full = pytest.mark.full

# fp32 sums in another order differ by about 1e-6; a missing pass by 1e-1.
LOSS, GRADIENT = 1e-5, 1e-4

TOPK, EXPERTS, LAYERS = 2, 8, 2
RATE = 1e-3
BIASED = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
}
SETUP = Setup(passes=(2, 2), layers=LAYERS, config=BIASED, masked=False)


@dataclass(frozen=True)
class Seen:
    """One step on one rank.

    Attributes:
        counted: what each router had counted when the gradients were final, `[layers, experts]`.
        routed: pass -> tokens sent to each expert as the router's result says, likewise.
        bias: of the experts after the step, likewise.
    """

    losses: dict[int, float]
    gradients: dict[str, torch.Tensor]
    counted: torch.Tensor
    routed: dict[int, torch.Tensor]
    bias: torch.Tensor


def _step(rank: int, layout: Layout, setup: Setup) -> Seen:
    from megalatent.training.program import MegatronProgram

    init(layout)
    rig = Rig(setup, layout)
    routers = [m for model in rig.models for m in model.modules() if isinstance(m, TopKRouter)]
    current = [0]
    routed: dict[int, torch.Tensor] = {}
    forward, finalize = MegatronProgram.forward, rig.config.finalize_model_grads_func
    counted: list[torch.Tensor] = []

    def passes(self: Any, action: Any, *args: Any) -> Any:
        current[0] = action[2]
        return forward(self, action, *args)

    def keep(layer: int) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            if current[0]:
                have = routed.setdefault(current[0], torch.zeros(len(routers), EXPERTS))
                have[layer] += output[1].sum(0)

        return hook

    def finalized(*args: Any, **kwargs: Any) -> Any:
        counted.append(torch.stack([r.local_tokens_per_expert.clone() for r in routers]))
        return finalize(*args, **kwargs)

    MegatronProgram.forward = passes  # type: ignore[method-assign, assignment]
    for layer, router in enumerate(routers):
        router.register_forward_hook(keep(layer))
    rig.config.finalize_model_grads_func = finalized
    rig.run()
    gradients = full_gradients(rig.chunks, vocab_size=VOCAB)
    bias = torch.stack([router.expert_bias.clone() for router in routers])
    return Seen(rig.losses(), gradients, counted[0], routed, bias)


_ONE: dict[str, Seen] = {}


def _one_rank(setup: Setup) -> Seen:
    key = repr(setup)
    if key not in _ONE:
        _ONE[key] = run_ranks(1, _step, Layout(), setup)[0]
    return _ONE[key]


def _with(setup: Setup, **config: Any) -> Setup:
    return replace(setup, config={**setup.config, **config})


def test_routers_count_every_pass() -> None:
    seen = _one_rank(SETUP)
    tokens = SETUP.batch * SETUP.seq_length
    assert list(seen.routed) == [1, 2]
    for counts in seen.routed.values():
        assert torch.equal(counts.sum(-1), torch.full((LAYERS,), float(tokens * TOPK)))
    # The passes differ, or their sum would show little.
    assert not torch.equal(seen.routed[1], seen.routed[2])
    assert torch.equal(seen.counted, seen.routed[1] + seen.routed[2])
    # The first pass alone is what a plain step counts.
    plain = _one_rank(replace(SETUP, passes=(1, 1)))
    assert torch.equal(plain.counted, seen.routed[1])


def test_bias_follows_the_counts_of_all_passes() -> None:
    """Up by the rate where an expert had less than the mean, down where it had more."""
    seen = _one_rank(SETUP)
    mean = seen.counted.mean(-1, keepdim=True)
    assert torch.allclose(seen.bias, RATE * (mean - seen.counted).sign(), atol=1e-9)
    first = seen.routed[1]
    alone = RATE * (first.mean(-1, keepdim=True) - first).sign()
    assert not torch.allclose(seen.bias, alone)


@pytest.mark.parametrize("recompute", ["extra", "all"])
def test_recomputation_counts_nothing_twice(recompute: str) -> None:
    expected = _one_rank(SETUP)
    seen = run_ranks(1, _step, Layout(), replace(SETUP, recompute=recompute))[0]
    assert torch.equal(seen.counted, expected.counted)
    assert torch.equal(seen.bias, expected.bias)


@pytest.mark.parametrize(
    ("dispatcher", "layout"),
    [
        pytest.param("allgather", Layout(ep=2, dp=2), id="allgather-ep2"),
        pytest.param("alltoall", Layout(ep=2, dp=2), id="alltoall-ep2"),
        pytest.param("allgather", Layout(ep=2, dp=2, pp=2), id="allgather-ep2-pp2", marks=full),
        pytest.param("alltoall", Layout(ep=2, dp=2, pp=2), id="alltoall-ep2-pp2", marks=full),
        pytest.param("alltoall", Layout(ep=2, dp=4), id="alltoall-ep2-dp4", marks=full),
        pytest.param(
            "alltoall", Layout(ep=2, tp=2, sp=True, etp=1), id="alltoall-ep2-tp2", marks=full
        ),
    ],
)
def test_experts_on_several_ranks_equal_one(dispatcher: str, layout: Layout) -> None:
    # Ranks with two micro-batches each are one rank with all of them.
    setup = _with(replace(SETUP, batch=4 * layout.dp), moe_token_dispatcher_type=dispatcher)
    expected = _one_rank(replace(setup, passes=(2, 2) * layout.dp))
    ranks = run_ranks(layout.world_size, _step, layout, setup)
    for found in ranks[:1]:
        assert found.losses == pytest.approx(expected.losses, abs=LOSS)
        assert found.gradients.keys() == expected.gradients.keys()
        assert any("experts" in name for name in found.gradients)
        for name, gradient in expected.gradients.items():
            error = (found.gradients[name] - gradient).norm()
            assert error <= GRADIENT * gradient.norm() + 1e-9, f"{name}: {error}"
    # Layers are spread over stages, tokens over the other ranks; their sum is one rank's count.
    counts = torch.zeros(LAYERS, EXPERTS)
    each = LAYERS // layout.pp
    for rank, found in enumerate(ranks):
        stage = rank // (layout.world_size // layout.pp)
        counts[stage * each : (stage + 1) * each] += found.counted
        bias = expected.bias[stage * each : (stage + 1) * each]
        assert torch.equal(found.bias, bias), rank
    assert torch.equal(counts, expected.counted)
