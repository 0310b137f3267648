"""One rank against plain PyTorch, and K = T passes against a token-by-token loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megalatent import kernels
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import EOD, SEED, VOCAB, Rig, Setup
from tests.distributed.layout import full_gradients, full_parameters
from tests.oracle.draws import jitter_rows, prefix_rows
from tests.oracle.model import multi_pass

# fp32 sums in another order differ by about 1e-6; a missing term by 1e-1.
LOSS, GRADIENT = 1e-5, 1e-4

Tensors = dict[str, torch.Tensor]
Outcome = tuple[dict[int, float], Tensors, Tensors]


def _step(rank: int, setups: list[Setup]) -> list[Outcome]:
    init(Layout())
    outcomes = []
    for setup in setups:
        rig = Rig(setup, Layout())
        rig.run()
        outcomes.append(
            (
                rig.losses(),
                full_gradients(rig.chunks, vocab_size=VOCAB),
                full_parameters(rig.chunks, vocab_size=VOCAB),
            )
        )
    return outcomes


def _oracle_step(setup: Setup, parameters: Tensors) -> tuple[dict[int, float], Tensors]:
    """The same step by one autograd graph over the plain model."""
    weights = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    count = len(setup.passes)
    rows = setup.batch // count
    total = torch.zeros(())
    sums: dict[int, list[tuple[float, float]]] = {}
    for i, passes in enumerate(setup.passes):
        samples = list(range(i * rows, (i + 1) * rows))
        raw, starts = setup.micro_batch(samples), setup.starts(samples)
        later = range(2, passes + 1)
        jitter = {
            k: jitter_rows(SEED, samples, k, setup.seq_length, setup.hidden, setup.jitter)
            for k in later
            if setup.jitter
        }
        prefixes = {k: prefix_rows(SEED, samples, k, starts) for k in later if setup.prefix_mixin}
        result = multi_pass(
            setup.shape(),
            weights,
            raw["tokens"],
            raw["labels"],
            raw["loss_mask"],
            starts,
            passes,
            setup.fusion,
            prefix_lengths=prefixes,
            fused_masks=dict.fromkeys(later, _responses(raw)) if setup.plain_prompts else {},
            jitter=jitter,
            input_norm=setup.input_norm,
            loss_weighting=setup.weighting,
            lam=setup.lambda_,
        )
        total = total + result.objective / count
        tokens = float(raw["loss_mask"].sum())
        for k, loss in enumerate(result.losses, 1):
            sums.setdefault(k, []).append((float(loss) * tokens, tokens))
    total.backward()
    losses = {k: sum(s for s, _ in v) / sum(n for _, n in v) for k, v in sums.items()}
    return losses, {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in weights.items()
    }


def _responses(raw: Tensors) -> torch.Tensor:
    """Tokens of responses: token t + 1 belongs to one where position t has a loss."""
    marks = torch.zeros_like(raw["tokens"], dtype=torch.bool)
    for row, mask in zip(marks, raw["loss_mask"], strict=True):
        for t in range(1, len(mask)):
            row[t] = bool(mask[t - 1])
    return marks


@pytest.mark.parametrize("fusion", ["gated", "additive", "concat"])
def test_losses_and_every_gradient_equal_the_oracle(fusion: str) -> None:
    base = Setup(fusion=fusion)
    setups = [
        replace(base, passes=(1, 1)),
        replace(base, passes=(2, 2)),
        replace(base, passes=(3, 3)),
        replace(base, passes=(3, 1, 2, 1)),
        replace(base, passes=(2, 3), weighting="sum", lambda_=1.0),
        replace(base, passes=(3, 2), packed=False, jitter=0.0, prefix_mixin=False),
        replace(base, passes=(3, 2), plain_prompts=True, prefix_mixin=False),
        *([] if fusion == "additive" else [replace(base, passes=(3, 2), input_norm="all")]),
    ]
    outcomes = run_ranks(1, _step, setups)[0]
    for setup, (losses, gradients, parameters) in zip(setups, outcomes, strict=True):
        expected_losses, expected = _oracle_step(setup, parameters)
        assert losses.keys() == expected_losses.keys()
        for k, loss in expected_losses.items():
            assert abs(losses[k] - loss) < LOSS, (setup, k)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            error, scale = (gradients[name] - gradient).norm(), gradient.norm()
            assert error <= GRADIENT * scale, (setup, name, float(error / scale))


def _settled(rank: int, fusion: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """States of K = T passes, and of a loop over positions that knows nothing of passes."""
    init(Layout())
    length = 12
    setup = Setup(
        fusion=fusion,
        passes=(1,),
        batch=2,
        seq_length=length,
        jitter=0.0,
        prefix_mixin=False,
        packed=False,
        std=0.02,
        eval_passes=length,
    )
    rig = Rig(setup, Layout())
    model = rig.models[0].to(dtype).eval()
    rig.config.params_dtype = rig.config.pipeline_dtype = dtype
    states: list[torch.Tensor] = []
    stack = model._stack

    def keep(*args: Any) -> torch.Tensor:
        states.append(stack(*args))
        return states[-1]

    model._stack = keep
    rig.run(forward_only=True)
    settled = states[-1]

    with torch.no_grad():
        from megalatent.model.batch import MicroBatch

        raw = setup.micro_batch([0, 1])
        backend = kernels.select("torch", torch.device("cpu"), dtype)
        embedding = model._embed(MicroBatch(tokens=raw["tokens"], position_ids=raw["position_ids"]))
        inputs = embedding[:1]
        fused = torch.ones(1, 2, dtype=torch.bool)
        for t in range(length):
            batch = MicroBatch(
                tokens=raw["tokens"][:, : t + 1],
                position_ids=raw["position_ids"][:, : t + 1],
                attention_mask=raw["attention_mask"][:, :, : t + 1, : t + 1],
            )
            state = stack(batch, inputs)
            if t + 1 < length:
                row = embedding[t + 1 : t + 2]
                token = model.fusion.token_part(row)
                following = model.fusion.combine(backend, state[-1:], token, row, fused)
                inputs = torch.cat([inputs, following])
    return settled, state


@pytest.mark.parametrize("fusion", ["gated", "additive", "concat"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_as_many_passes_as_tokens_equal_the_sequential_recurrence(
    fusion: str, dtype: torch.dtype, tolerance: float
) -> None:
    settled, recurrent = run_ranks(1, _settled, fusion, dtype)[0]
    assert settled.dtype == dtype
    assert (settled - recurrent).abs().max() < tolerance


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2, sp=True)], ids=str)
def test_a_document_does_not_see_the_one_before_it(layout: Layout) -> None:
    """Changing document 1 changes no state of document 2, in any pass, to the last bit."""
    outcomes = run_ranks(layout.world_size, _states_of_second_document, layout)
    for before, after in outcomes:
        assert len(before) == 3
        for k, (a, b) in enumerate(zip(before, after, strict=True), 1):
            assert a.numel() > 0
            assert torch.equal(a, b), f"pass {k}"


def _states_of_second_document(
    rank: int, layout: Layout
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from megatron.core import parallel_state

    init(layout)
    outcomes = []
    for change in (0, 1):
        setup = Setup(passes=(1,), batch=1, eval_passes=3)
        rig = Rig(setup, layout)
        raw = setup.micro_batch([0])
        assert raw["tokens"][0].tolist().index(EOD) == 4  # document 1 has 5 positions: odd
        raw["tokens"][0, 1:4] = (raw["tokens"][0, 1:4] + 7 * change) % EOD
        states: list[torch.Tensor] = []
        stack = rig.models[0]._stack

        def keep(batch: Any, x: Any, stack: Any = stack, states: Any = states) -> Any:
            state = stack(batch, x)
            rows = _local_positions(layout, state.shape[0])
            states.append(state[rows >= 5].clone())
            return state

        rig.models[0]._stack = keep
        monkey: Any = rig
        monkey.batches = partial(iter, [raw])
        rig.run(forward_only=True)
        outcomes.append(states)
    assert parallel_state.model_parallel_is_initialized()
    return outcomes[0], outcomes[1]


def _local_positions(layout: Layout, rows: int) -> torch.Tensor:
    from megatron.core import parallel_state

    from megalatent.model.shift import context_parallel_positions

    positions = context_parallel_positions(
        32, layout.cp, parallel_state.get_context_parallel_rank()
    )
    if layout.sp:
        positions = positions.chunk(layout.tp)[parallel_state.get_tensor_model_parallel_rank()]
    assert len(positions) == rows
    return positions
