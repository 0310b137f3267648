"""Megatron's own `pretrain()` over gloo: it trains, evaluates, saves, and resumes exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megalatent import platform

platform.install()

from tests.distributed.harness import run_ranks  # noqa: E402
from tests.platform.pretrain_job import Outcome, run  # noqa: E402

pytestmark = pytest.mark.skipif(not platform.on_cpu(), reason="the runs use gloo on a CPU")

SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"


def _outcome(ranks: list[Outcome]) -> Outcome:
    """Of a rank of the last stage, which has the losses; the state is the same on all ranks."""
    return next(outcome for outcome in ranks if outcome.train)


def _assert_same_state(got: Outcome, want: Outcome) -> None:
    assert got.weights.keys() == want.weights.keys()
    assert got.optimizer_steps == want.optimizer_steps
    for name, tensor in want.weights.items():
        assert torch.equal(got.weights[name], tensor), name
    for key, tensors in want.optimizer.items():
        for name, tensor in tensors.items():
            assert torch.equal(got.optimizer[key][name], tensor), f"{key} of {name}"


full = pytest.mark.full


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(1, "--hidden-dropout 0.1 --attention-dropout 0.1", id="dropout"),
        pytest.param(2, SHARDED, id="dp2-sharded"),
        pytest.param(2, f"{SHARDED} --bf16", id="dp2-sharded-bf16"),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", id="tp2-sp"),
        pytest.param(
            2,
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            id="pp2-vp2",
        ),
        pytest.param(2, f"--context-parallel-size 2 {SHARDED}", id="cp2-sharded"),
        pytest.param(
            2,
            f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
            f"{SHARDED}",
            id="ep2-alltoall",
        ),
        pytest.param(1, "", id="single", marks=full),
        pytest.param(2, "", id="dp2", marks=full),
        pytest.param(
            2,
            "--tensor-model-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0.1",
            id="tp2-dropout",
            marks=full,
        ),
        pytest.param(2, "--pipeline-model-parallel-size 2", id="pp2", marks=full),
        pytest.param(
            2,
            f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
            id="ep2-allgather",
            marks=full,
        ),
    ],
)
def test_trains_evaluates_saves_and_resumes_exactly(
    tmp_path: Path, ranks: int, arguments: str
) -> None:
    whole = _outcome(run_ranks(ranks, run, arguments, tmp_path))
    resumed = _outcome(run_ranks(ranks, run, arguments, None, tmp_path))
    assert all(map(math.isfinite, whole.train + whole.evaluation))
    assert whole.evaluation
    # Every second micro-batch loss of four iterations belongs to the last two.
    assert resumed.train == whole.train[len(whole.train) // 2 :]
    # The runs end with the same evaluations; the whole one also evaluated at iteration 2.
    assert resumed.evaluation == whole.evaluation[-len(resumed.evaluation) :]
    _assert_same_state(resumed, whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1, ""), (2, "--tensor-model-parallel-size 2"), id="tp1-to-tp2"),
        pytest.param((1, ""), (2, ""), id="dp1-to-dp2"),
        pytest.param((2, ""), (1, ""), id="dp2-to-dp1", marks=full),
        pytest.param((1, ""), (2, "--pipeline-model-parallel-size 2"), id="pp1-to-pp2", marks=full),
    ],
)
def test_checkpoint_of_many_buckets_reshards_without_loss(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """Masters and moments are those saved, bit for bit, whatever the buckets."""
    common = f"{RESHARDABLE} --overlap-grad-reduce --ddp-bucket-size 3000 --train-iters 2"
    saved = _outcome(run_ranks(before[0], run, f"{common} {before[1]}", tmp_path))
    loaded = run_ranks(after[0], run, f"{common} {after[1]}", None, tmp_path)
    assert saved.buckets > 3
    assert saved.optimizer_steps == {2.0}
    _assert_same_state(loaded[0], saved)
