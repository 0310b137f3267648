"""A checkpoint of one layout goes on on another: the steps that follow are those of the first.

The steps after loading compare masters, moments and the common step count: with any of them wrong
or missing, Adam's next updates differ by far more than rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import CHANGING, Outcome, Sources, configuration, last_stage, losses, train

# Steps 1-2 are saved, 3-5 follow; K is 2, 1, 3, 1, 2.
SAVED, STEPS = 2, 5

ONE: dict[str, Any] = {}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
# Many buckets: the gradients are reduced, hence the state is saved, in 8 parts or more.
BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 2000}
RESHARDABLE = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
PLAIN: dict[str, Any] = {}
# With EP 1 all weights share an optimiser, with EP 2 the experts have their own.
EP1 = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
}
EP2 = {**EP1, "expert_model_parallel_size": 2}
# One stage is dense, and has no optimiser of experts; the checkpoint has the first stage's form.
LATE, EARLY = {"moe_layer_freq": "[0,1]"}, {"moe_layer_freq": "[1,0]"}
BF16 = {"bf16": True}


def _train(folder: Path, name: str, ranks: int, options: dict[str, Any], **more: Any) -> Outcome:
    given = configuration(
        folder,
        {"passes": CHANGING},
        train_iters=STEPS,
        save=str(folder / name),
        save_interval=SAVED,
        **options,
        **more,
    )
    return last_stage(train(given, ranks, each_step=_buckets))


def _buckets(chunks: list[Any], optimizer: Any, step: int) -> int:
    return sum(len(buffer.buckets) for chunk in chunks for buffer in chunk.buffers)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"), _train)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        pytest.param((1, ONE), (2, TP2), RESHARDABLE, id="tp1-tp2"),
        pytest.param((1, ONE), (2, ONE), RESHARDABLE, id="dp1-dp2"),
        pytest.param((1, ONE), (2, PP2), RESHARDABLE, id="pp1-pp2"),
        pytest.param((2, PP2), (1, ONE), RESHARDABLE, id="pp2-pp1"),
        pytest.param((2, PP2), (2, TP2), RESHARDABLE, id="pp2-tp2"),
        pytest.param((2, BUCKETS), (1, ONE), RESHARDABLE, id="buckets-dp2-one"),
        pytest.param((2, BUCKETS), (2, {**TP2, **BUCKETS}), RESHARDABLE, id="buckets", marks=full),
        pytest.param((1, EP1), (2, EP2), RESHARDABLE, id="ep1-ep2"),
        pytest.param((2, EP2), (1, EP1), RESHARDABLE, id="ep2-ep1"),
        pytest.param((1, EP1), (2, EP2), PLAIN, id="ep1-ep2-unsharded"),
        pytest.param((2, EP2), (1, EP1), PLAIN, id="ep2-ep1-unsharded", marks=full),
        pytest.param((1, EP1), (2, EP2), {**RESHARDABLE, **BF16}, id="ep1-ep2-bf16", marks=full),
        pytest.param((2, EP2), (1, EP1), BF16, id="ep2-ep1-bf16-unsharded", marks=full),
        *(
            pytest.param(
                (4, {**EP2, **PP2, **where}), after, RESHARDABLE, id=f"{name}-{to}", marks=full
            )
            for name, where in (("late", LATE), ("early", EARLY))
            for to, after in (
                ("same", (4, {**EP2, **PP2, **where})),
                ("ep1", (1, {**EP1, **where})),
                ("pp1", (2, {**EP2, **where})),
            )
        ),
        pytest.param((2, TP2), (1, ONE), PLAIN, id="tp2-tp1-unsharded", marks=full),
        pytest.param((1, ONE), (2, PP2), PLAIN, id="pp1-pp2-unsharded", marks=full),
        pytest.param(
            (2, PP2), (4, {**TP2, "sequence_parallel": True}), RESHARDABLE, id="tp2-dp2", marks=full
        ),
    ],
)
def test_other_layout(
    sources: Sources,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    optimizer: dict[str, Any],
) -> None:
    source, expected = sources.get(before[0], {**before[1], **optimizer})
    assert (expected.kept[0] >= 8) == ("ddp_bucket_size" in before[1])
    folder, name = sources.folder, f"resumed-{len(list(sources.folder.iterdir()))}"
    load = {"load": str(folder / source), "ckpt_step": SAVED}
    resumed = _train(folder, name, after[0], {**after[1], **optimizer}, **load)
    whole, rest = losses(folder / source), losses(folder / name)
    assert list(rest) == list(range(SAVED + 1, STEPS + 1))
    # In bf16 a sum in another order rounds otherwise; a moment that is lost is off by its size.
    coarse = "bf16" in optimizer
    for step, found in rest.items():
        assert found == pytest.approx(whole[step], rel=1e-3 if coarse else 1e-5), step
    assert resumed.steps == expected.steps == {float(STEPS)}
    for key in ("param", "exp_avg", "exp_avg_sq"):
        for weight, tensor in expected.optimizer[key].items():
            difference = (resumed.optimizer[key][weight] - tensor).norm()
            # Adam divides by the root of gradients that may be rounding noise: 1e-3.
            allowed = (0.1 if coarse else 1e-3) * tensor.norm()
            assert difference <= allowed, f"{key} of {weight}"


@full
@pytest.mark.parametrize("optimizer", [RESHARDABLE, PLAIN], ids=["sharded", "unsharded"])
def test_experts_are_spread_at_another_learning_rate(
    sources: Sources, optimizer: dict[str, Any]
) -> None:
    """As the run goes on that does not spread them."""
    folder = sources.folder
    source, _ = sources.get(1, {**EP1, **optimizer})
    load = {"load": str(folder / source), "ckpt_step": SAVED}
    load |= {"lr": 1e-2, "override_opt_param_scheduler": True}
    names = [f"rate-{len(list(folder.iterdir()))}-{ranks}" for ranks in (1, 2)]
    expected, found = (
        _train(folder, name, ranks, {**options, **optimizer}, **load)
        for name, ranks, options in zip(names, (1, 2), (EP1, EP2), strict=True)
    )
    assert found.steps == expected.steps == {float(STEPS)}
    for key in ("param", "exp_avg", "exp_avg_sq"):
        for weight, tensor in expected.optimizer[key].items():
            difference = (found.optimizer[key][weight] - tensor).norm()
            assert difference <= 1e-4 * tensor.norm(), f"{key} of {weight}"
    assert losses(folder / names[0])[STEPS] != losses(folder / source)[STEPS]
