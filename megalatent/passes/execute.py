"""Executes a plan on one rank: runs its actions in order and hands tensors to the neighbours.

The executor knows neither Megatron nor the model. What an action does is up to a
:class:`StageProgram`; stages that only sleep are as good as real ones. A single stage is the same
plan with every hand-over local: there is no second code path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from megalatent.passes.channels import Inbox, Outbox, Ring
from megalatent.passes.plan import Action, Plan, next_backward, next_forward
from megalatent.passes.watch import Watch

__all__ = ["Executor", "HandOver", "Recorder", "StageProgram", "now"]

# Sends that an evaluation leaves open on an edge before it waits for the receiver.
_OPEN_SENDS = 4


class StageProgram(Protocol):
    """What the actions of a plan do on this rank.

    The executor keeps no tensor longer than the hand-over needs it: a stage input is the
    program's once it is passed, an output until it has been received.
    """

    def forward(self, action: Action, stage_input: Tensor | None) -> Tensor:
        """Run the chunk's layers; ``stage_input`` is None where pass 1 starts from tokens.

        Returns:
            The tensor to hand over, ``[s, b, h]``.
        """

    def head(self, action: Action) -> None:
        """Compute the loss of a pass and the gradient of its state."""

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Back-propagate a visit; ``gradient`` is None where no later visit consumed its output.

        Returns:
            The gradient of the stage input, or None where there was none.
        """

    def last_backward(self, chunk: int) -> None:
        """The next action is the last backward of ``chunk``; all its heads have run."""

    def chunk_finished(self, chunk: int) -> None:
        """The last backward of ``chunk`` is done: its gradients are final on this rank."""


class Recorder(Protocol):
    """Takes the times of a step; see :mod:`megalatent.profiling`.

    Kinds are those of the actions (F, B, H), ``wait`` for an action's input, and ``send`` to hand
    an output over, or at the end for what is still open.
    """

    def begin(self, kind: str, action: Action) -> None: ...

    def end(self, kind: str, action: Action) -> None: ...


@dataclass(frozen=True)
class HandOver:
    """Shape, dtype and device of every tensor that crosses stages in a step."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class Executor:
    """Runs plans on one rank of a ring.

    Args:
        ring: the channels to the neighbours.
        watch: told of every action, so that a stall is noticed and explained; or None.
        recorder: takes times; or None, which costs nothing.
    """

    def __init__(
        self, ring: Ring, *, watch: Watch | None = None, recorder: Recorder | None = None
    ) -> None:
        self.ring = ring
        self.watch = watch
        self.recorder = recorder

    def run(self, plan: Plan, program: StageProgram, hand_over: HandOver) -> None:
        """Run all actions of ``plan`` on this rank.

        What an action raises is raised again, with a note that names the action.

        Raises:
            ValueError: the plan is for another number of stages.
            RuntimeError: a neighbour is gone; the message names the action that waited.
        """
        if plan.stages != self.ring.size:
            raise ValueError(
                f"the plan is for {plan.stages} stages, but this pipeline has {self.ring.size}"
            )
        with self.watch.step(plan, self.ring.rank) if self.watch else nullcontext():
            _Run(self, plan, program, hand_over).run()


class _Run:
    """One step of one rank."""

    def __init__(
        self, executor: Executor, plan: Plan, program: StageProgram, hand_over: HandOver
    ) -> None:
        self.ring, self.watch, self.recorder = executor.ring, executor.watch, executor.recorder
        self.plan, self.program = plan, program
        self.rank = self.ring.rank
        self.mine = plan.actions[self.rank]
        # Hand-overs inside the rank, by the action that consumes them.
        self.local: dict[Action, Tensor] = {}
        self.alone = self.ring.size == 1
        if not self.alone:
            self._open_channels(hand_over)

    def _open_channels(self, hand_over: HandOver) -> None:
        ring, plan = self.ring, self.plan
        self.before = before = (self.rank - 1) % ring.size
        self.after = after = (self.rank + 1) % ring.size
        self.index_before = {a: i for i, a in enumerate(plan.actions[before])}
        self.index_after = {a: i for i, a in enumerate(plan.actions[after])}
        kwargs: dict[str, Any] = {
            "shape": hand_over.shape,
            "dtype": hand_over.dtype,
            "device": hand_over.device,
        }
        forward = self._expected(before, "F")
        backward = self._expected(after, "B")
        self.forward_in = Inbox(forward, ring.previous_rank, ring.forward_in, **kwargs)
        self.backward_in = Inbox(backward, ring.next_rank, ring.backward_in, **kwargs)
        limit = _OPEN_SENDS if self._may_block() else None
        self.forward_out = Outbox(ring.next_rank, ring.forward_out, limit=limit)
        self.backward_out = Outbox(ring.previous_rank, ring.backward_out)

    def _expected(self, sender: int, kind: str) -> list[tuple[Action, int]]:
        """Messages ``sender`` sends to this rank, in its order, keyed by the consuming action."""
        follow = next_forward if kind == "F" else next_backward
        messages = []
        for index, action in enumerate(self.plan.actions[sender]):
            if action.kind == kind:
                target = follow(action, sender, self.plan)
                if target is not None and target[0] == self.rank:
                    messages.append((target[1], index))
        return messages

    def _may_block(self) -> bool:
        """Whether forwards may wait for the next rank to receive them.

        In training a rank that is ahead waits for gradients. An evaluation has none: the first
        rank would run through all micro-batches and leave all their outputs waiting. It may wait
        for the next rank if that one consumes in the order of sending, so that only what has been
        sent already is needed for it to go on; but the last rank must not, or the ring could
        wait for itself.
        """
        if not self.plan.forward_only or self.rank == self.plan.stages - 1:
            return False
        order = [self.index_after[action] for action in self.mine if action.kind == "F"]
        return all(a < b for a, b in pairwise(order))

    def run(self) -> None:
        last_backward = {a.chunk: i for i, a in enumerate(self.mine) if a.kind == "B"}
        for index, action in enumerate(self.mine):
            last = action.kind == "B" and last_backward[action.chunk] == index
            try:
                self._perform(index, action, last)
                if last:
                    self.program.chunk_finished(action.chunk)
            except Exception as error:
                error.add_note(f"stage {self.rank}, in its action {index}, {action}")
                raise
        if not self.alone:
            end = len(self.mine) - 1
            if self.recorder:
                self.recorder.begin("send", self.mine[-1])
            for outbox, stage in ((self.forward_out, self.after), (self.backward_out, self.before)):
                while len(outbox):
                    self._sending(end, stage, outbox.oldest)
                    outbox.finish_oldest(on_host=False)
            self._end("send", self.mine[-1])

    def _perform(self, index: int, action: Action, last: bool) -> None:
        if action.kind == "F":
            stage_input = self._receive(index, action)
            self._begin(index, "F", action)
            output = self.program.forward(action, stage_input)
            self._end("F", action)
            target = next_forward(action, self.rank, self.plan)
            self._hand_over(index, "F", output.detach(), target)
        elif action.kind == "B":
            gradient = self._receive(index, action)
            if last:
                self.program.last_backward(action.chunk)
            self._begin(index, "B", action)
            gradient = self.program.backward(action, gradient)
            self._end("B", action)
            target = next_backward(action, self.rank, self.plan)
            if target is not None:
                assert gradient is not None
                self._hand_over(index, "B", gradient, target)
        elif action.kind == "H":
            self._begin(index, "H", action)
            self.program.head(action)
            self._end("H", action)
        else:
            raise ValueError(f"an action of unknown kind: {action}")

    # -- hand-overs -------------------------------------------------------------------------

    def _receive(self, index: int, action: Action) -> Tensor | None:
        """The input of ``action``, or None if nothing is handed to it."""
        source = self.plan.source(action, self.rank)
        if source is None:
            return None
        if source == self.rank:
            return self.local.pop(action)
        if self.watch:
            self.watch.waiting(index)
        if self.recorder:
            self.recorder.begin("wait", action)
        self.forward_out.release(self.backward_in.latest)
        self.backward_out.release(self.forward_in.latest)
        inbox = self.forward_in if action.kind == "F" else self.backward_in
        try:
            tensor = inbox.take(action)
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {self.rank} waited for the input of {action} from stage {source}, which "
                f"is gone: {error}"
            ) from error
        if self.recorder:
            self.recorder.end("wait", action)
        return tensor

    def _hand_over(
        self, index: int, kind: str, tensor: Tensor, target: tuple[int, Action] | None
    ) -> None:
        if target is None:
            return
        rank, consumer = target
        if rank == self.rank:
            self.local[consumer] = tensor
            return
        outbox, indices = (
            (self.forward_out, self.index_after)
            if kind == "F"
            else (self.backward_out, self.index_before)
        )
        if self.recorder:
            self.recorder.begin("send", self.mine[index])
        while outbox.full:
            self._sending(index, rank, outbox.oldest)
            outbox.finish_oldest()
        outbox.send(tensor.contiguous(), indices[consumer])
        self._end("send", self.mine[index])

    # -- telling others ---------------------------------------------------------------------

    def _sending(self, index: int, stage: int, consumer_index: int) -> None:
        if self.watch:
            self.watch.sending(index, stage, consumer_index)

    def _begin(self, index: int, kind: str, action: Action) -> None:
        if self.watch:
            self.watch.running(index)
        if self.recorder:
            self.recorder.begin(kind, action)

    def _end(self, kind: str, action: Action) -> None:
        if self.recorder:
            self.recorder.end(kind, action)


def now() -> float:
    """Seconds on the clock that all recorders share."""
    return time.perf_counter()
