"""The z-loss against autograd of its formula, on several layouts and with several passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalatent.model.z_loss import cross_entropy_and_log_z
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import VOCAB, Rig, Setup
from tests.distributed.layout import full_gradients, full_parameters
from tests.oracle.model import multi_pass
from tests.training.runs import configuration, train

Tensors = dict[str, torch.Tensor]

# fp32 sums in another order differ by about 1e-6; a missing term by 1e-1.
LOSS, GRADIENT = 1e-5, 1e-4
# Large, so that the z-loss makes a good part of each gradient.
COEFFICIENT = 0.1
# lambda is 0.5 and K is 2 and 3: every pass has a weight of its own. Loss masks are uneven.
SETUP = Setup(passes=(2, 3), jitter=0.0, prefix_mixin=False)


def _formula(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Losses, log Z and gradients of this rank's quarter of a vocabulary, from one generator."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 3, 64, generator=generator)
    labels = torch.randint(64, (6, 3), generator=generator)
    group = dist.group.WORLD
    assert group is not None
    own = logits.chunk(group.size(), -1)[rank].to(dtype).requires_grad_()
    losses, log_z = cross_entropy_and_log_z(own, labels, group)
    weights = torch.rand(2, 6, 3, generator=generator)
    (weights[0] * losses + weights[1] * log_z.square()).sum().backward()
    assert own.grad is not None
    return [losses.detach(), log_z.detach(), own.grad.float()]


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(1, torch.float32), (2, torch.float32), pytest.param(2, torch.bfloat16)],
    ids=["one", "two", "two-bf16"],
)
def test_function_equals_autograd_of_the_formula(ranks: int, dtype: torch.dtype) -> None:
    results = run_ranks(ranks, _formula, dtype)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(6, 3, 64, generator=generator)).to(dtype).float().requires_grad_()
    labels = torch.randint(64, (6, 3), generator=generator)
    log_z = logits.logsumexp(-1)
    losses = log_z - logits.gather(-1, labels[..., None])[..., 0]
    weights = torch.rand(2, 6, 3, generator=generator)
    (weights[0] * losses + weights[1] * log_z.square()).sum().backward()
    for found in results:
        assert torch.allclose(found[0], losses, atol=1e-5)
        assert torch.allclose(found[1], log_z, atol=1e-5)
    gradient = torch.cat([found[2] for found in results], -1)
    assert logits.grad is not None
    # A gradient in bf16 keeps 8 bits.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (gradient - logits.grad).norm() <= tolerance * logits.grad.norm()


def _step(rank: int, layout: Layout) -> tuple[dict[int, float], Tensors, Tensors]:
    init(layout)
    rig = Rig(SETUP, layout)
    rig.schedule.z_loss = COEFFICIENT
    rig.run()
    gradients = full_gradients(rig.chunks, vocab_size=VOCAB)
    return rig.losses(), gradients, full_parameters(rig.chunks, vocab_size=VOCAB)


def _plain(parameters: Tensors, coefficient: float) -> tuple[dict[int, float], Tensors]:
    """Losses without the z-loss, and gradients with it, by one graph over the plain model."""
    weights = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    table = weights["embedding.word_embeddings.weight"]
    count, total = len(SETUP.passes), torch.zeros(())
    sums: dict[int, list[float]] = {}
    for i, passes in enumerate(SETUP.passes):
        samples = list(range(i * SETUP.batch // count, (i + 1) * SETUP.batch // count))
        raw, starts = SETUP.micro_batch(samples), SETUP.starts(samples)
        mask = raw["loss_mask"]
        result = multi_pass(
            SETUP.shape(), weights, raw["tokens"], raw["labels"], mask, starts, passes, "gated"
        )
        for k, (loss, state) in enumerate(zip(result.losses, result.states, strict=True), 1):
            z_loss = ((state @ table.T).logsumexp(-1).square() * mask).sum() / mask.sum()
            weight = 1.0 if k == 1 else SETUP.lambda_ / (passes - 1)
            total = total + weight * (loss + coefficient * z_loss) / count
            seen = sums.setdefault(k, [0.0, 0.0])
            seen[0] += float(loss * mask.sum())
            seen[1] += float(mask.sum())
    total.backward()
    gradients = {n: p.grad for n, p in weights.items() if p.grad is not None}
    return {k: loss / tokens for k, (loss, tokens) in sums.items()}, gradients


@pytest.fixture(scope="module")
def expected() -> Callable[[Tensors], tuple[dict[int, float], Tensors]]:
    made: list[tuple[dict[int, float], Tensors]] = []

    def get(parameters: Tensors) -> tuple[dict[int, float], Tensors]:
        if not made:
            made.append(_plain(parameters, COEFFICIENT))
            _, without = _plain(parameters, 0.0)
            name = "embedding.word_embeddings.weight"
            difference = (made[0][1][name] - without[name]).norm()
            assert difference > 0.1 * without[name].norm()
        return made[0]

    return get


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, sp=True),
        Layout(pp=2),
        pytest.param(Layout(tp=2), marks=pytest.mark.full),
        pytest.param(Layout(cp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_gradients_equal_the_formula_and_losses_leave_it_out(
    layout: Layout, expected: Callable[[Tensors], tuple[dict[int, float], Tensors]]
) -> None:
    losses, gradients, parameters = run_ranks(layout.world_size, _step, layout)[0]
    want_losses, want = expected(parameters)
    assert losses == pytest.approx(want_losses, abs=LOSS)
    assert gradients.keys() == want.keys()
    for name, gradient in want.items():
        assert (gradients[name] - gradient).norm() <= GRADIENT * gradient.norm(), name


@pytest.mark.full
def test_multi_token_prediction_has_no_z_loss(tmp_path: Path) -> None:
    """Its layers get the same gradient to the last bit; the decoder's is another."""
    found = []
    for coefficient in (0.0, COEFFICIENT):
        given = configuration(
            tmp_path,
            {
                "passes": {"schedule": 2, "timeout_seconds": 300},
                "decay_phase": {"z_loss": coefficient},
            },
            mtp_num_layers=1,
            train_iters=1,
            lr_decay_iters=1,
            lr_decay_style="WSD",
            lr_wsd_decay_iters=1,
            clip_grad=0.0,
        )
        found.append(train(given, each_step=_gradients)[0].kept[1])
    without, with_z = found
    predicting = [name for name in without if name.startswith("mtp.")]
    assert len(predicting) > 5
    assert all(torch.equal(without[name], with_z[name]) for name in predicting)
    decoding = [name for name in without if name.startswith("decoder.")]
    assert not any(torch.equal(without[name], with_z[name]) for name in decoding)


def _gradients(chunks: list[Any], optimizer: Any, step: int) -> Tensors:
    return full_gradients(chunks) if step else {}
