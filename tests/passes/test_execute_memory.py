"""What a step with real models holds in memory, as the allocator sees it or by objects alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megalatent.passes import execute
from megalatent.passes.channels import Outbox
from megalatent.passes.plan import Action
from megalatent.training.program import MegatronProgram
from tests.distributed import conftest, latent  # noqa: F401  (Megatron's imports, before forks)
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import Rig, Setup

PP2 = Layout(pp=2)
MICRO_BATCHES, SEQ_LENGTH = 5, 32
SMALL, LARGE = 61, 20_000
LOGITS_BYTES = 4 * SEQ_LENGTH * LARGE  # of one micro-batch of one row, fp32


def _setup(passes: int) -> Setup:
    return Setup(
        passes=(passes,) * MICRO_BATCHES, batch=MICRO_BATCHES, seq_length=SEQ_LENGTH, layers=4
    )


def _peaks(rank: int, vocabulary: int) -> list[int]:
    """Most bytes that a step with K = 1, 2, 3 allocates beyond what it began with."""
    latent.VOCAB = vocabulary
    init(PP2)
    peaks = []
    for passes in (1, 2, 3):
        rig = Rig(_setup(passes), PP2)
        rig.run()  # makes what later steps keep
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            rig.run()
        held = peak = 0
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        peaks.append(peak)
    return peaks


def test_memory_of_the_last_stage_grows_with_k_by_its_layers_only() -> None:
    """More passes cost the same memory with a large vocabulary as with a small one.

    The peak is not that of the sum: with the large vocabulary it is in a head, with the small one
    it may be between two. So much, a fraction of one micro-batch's logits, is allowed.
    """
    small = run_ranks(2, _peaks, SMALL)[1]
    large = run_ranks(2, _peaks, LARGE)[1]
    assert large[0] - small[0] > LOGITS_BYTES  # they are seen
    for passes in (2, 3):
        growth = large[passes - 1] - large[0]
        expected = small[passes - 1] - small[0]
        assert growth < expected + 0.1 * LOGITS_BYTES, f"K = {passes}: {large}, {small}"


def _outputs_alive(rank: int) -> tuple[int, int]:
    """Run a step and check, before each action, which outputs of this rank are still there.

    Returns:
        Most visits in flight at a check, and most outputs alive.
    """
    init(PP2)
    alive: set[Action] = set()
    headless: set[Action] = set()
    most = [0, 0]
    original = MegatronProgram.forward, MegatronProgram.backward, MegatronProgram.head

    def check(program: MegatronProgram) -> None:
        assert alive == headless, f"rank {rank}: {alive ^ headless}"
        most[0] = max(most[0], len(program._visits))
        most[1] = max(most[1], len(alive))

    def forward(self: MegatronProgram, action: Action, stage_input: Any) -> torch.Tensor:
        check(self)
        output = original[0](self, action, stage_input)
        alive.add(action)
        weakref.finalize(output.untyped_storage(), alive.discard, action)
        if rank == 1:
            headless.add(action)
        return output

    def backward(self: MegatronProgram, action: Action, gradient: Any) -> Any:
        check(self)
        return original[1](self, action, gradient)

    def head(self: MegatronProgram, action: Action) -> None:
        original[2](self, action)
        headless.discard(action._replace(kind="F"))

    class CopyingOutbox(Outbox):
        """What is being sent must live; a copy of it leaves the output to the program."""

        def send(self, tensor: torch.Tensor, *args: Any) -> None:
            super().send(tensor.clone(), *args)

    setattr(execute, "Outbox", CopyingOutbox)  # noqa: B010
    MegatronProgram.forward = forward  # type: ignore[method-assign]
    MegatronProgram.backward = backward  # type: ignore[method-assign]
    MegatronProgram.head = head  # type: ignore[method-assign]
    Rig(_setup(2), PP2).run()
    return most[0], most[1]


def test_outputs_are_freed_once_they_are_handed_over() -> None:
    """A visit keeps its graph until its backward, but its output only until the head has run."""
    first, last = run_ranks(2, _outputs_alive)
    assert first[0] > 2
    assert first[1] == 0
    assert last[0] > 2
    assert last[1] <= 1
