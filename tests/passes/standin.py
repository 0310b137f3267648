"""Stages without a model: they sleep, check what they are handed, and fail where they are told to.

`launch` forks ranks that may die, and tells how each of them ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalatent.passes.channels import Ring
from megalatent.passes.costs import Costs
from megalatent.passes.execute import Executor, HandOver
from megalatent.passes.plan import Action, Plan
from megalatent.passes.simulate import duration
from megalatent.passes.watch import Watch
from tests.waiting import HANG

__all__ = ["HAND_OVER", "Ended", "StandIn", "join", "launch", "run_steps"]

HAND_OVER = HandOver((2, 1, 3), torch.float64, torch.device("cpu"))


@dataclass
class StandIn:
    """A stage program that hands over what says where it comes from, and checks what it gets.

    The tensor that a visit hands over holds the micro-batch, the pass and how many visits the
    chain has behind it, so that a tensor that is lost, doubled, swapped or overwritten shows.

    Args:
        plan: what is executed.
        rank: of this stage.
        costs: how long actions sleep, in seconds; None not at all.
        on_action: called with the index of each action as it begins.

    Attributes:
        done: the actions, in order.
        finished: chunks with how many actions came before their end, and negated before their
            last backward.
    """

    plan: Plan
    rank: int
    costs: Costs | None = None
    on_action: Callable[[int], None] = lambda index: None
    done: list[Action] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)

    def forward(self, action: Action, stage_input: Tensor | None) -> Tensor:
        self._act(action)
        behind = self._visits_before(action)
        if behind == 0:
            assert stage_input is None
        else:
            self._check(action, stage_input, behind)
        return self._tensor(action, behind + 1)

    def head(self, action: Action) -> None:
        self._act(action)

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        self._act(action)
        behind = self._visits_before(action)
        last = self.plan.stages * self.plan.chunks * self.plan.passes[action.micro_batch]
        if behind + 1 == last:
            assert gradient is None
        else:
            self._check(action, gradient, -(behind + 2))
        return None if behind == 0 else self._tensor(action, -(behind + 1))

    def last_backward(self, chunk: int) -> None:
        self.finished.append((chunk, -len(self.done)))

    def chunk_finished(self, chunk: int) -> None:
        self.finished.append((chunk, len(self.done)))

    def _act(self, action: Action) -> None:
        self.on_action(len(self.done))
        self.done.append(action)
        if self.costs is not None:
            time.sleep(duration(action, self.rank, self.plan, self.costs))

    def _visits_before(self, action: Action) -> int:
        laps = (action.k - 1) * self.plan.chunks + action.chunk
        return laps * self.plan.stages + self.rank

    def _tensor(self, action: Action, visit: int) -> Tensor:
        code = 1e6 * action.micro_batch + 1e3 * action.k + visit
        return torch.full(tuple(HAND_OVER.shape), code, dtype=HAND_OVER.dtype)

    def _check(self, action: Action, tensor: Tensor | None, visit: int) -> None:
        # A hand-over between laps belongs to the pass that made it.
        chunks, k = self.plan.chunks, action.k
        if action.kind == "F" and self.rank == 0 and action.chunk == 0:
            k -= 1
        if action.kind == "B" and self.rank == self.plan.stages - 1 and action.chunk == chunks - 1:
            k += 1
        expected = self._tensor(action._replace(k=k), visit)
        assert tensor is not None
        assert torch.equal(tensor, expected), f"{action} on {self.rank} got {tensor.flatten()[0]}"


def join(rank: int, world: int, folder: Path, timeout: float) -> None:
    """Make the world's process group, over the loopback interface."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def run_steps(
    plan: Plan,
    steps: int,
    *,
    costs: Costs | None = None,
    watch: Watch | None = None,
    after_step: Callable[[int, StandIn], None] = lambda step, program: None,
) -> None:
    """Execute a plan on this rank of a world that is one ring."""
    ring = Ring.create(dist.group.WORLD)
    if watch is not None:
        watch.connect(ring.rank)
    executor = Executor(ring, watch=watch)
    for step in range(steps):
        program = StandIn(plan, ring.rank, costs)
        executor.run(plan, program, HAND_OVER)
        after_step(step, program)


def _dump_stacks(hung: list[Any]) -> None:
    """Let processes that should have ended write their stacks to their standard error."""
    for process in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    if hung:
        time.sleep(3.0)


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: exit code; negative: the signal that killed it; None: it did not end by itself.
        stderr: what it wrote.
        seconds: from the start of all ranks to its end.
        result: what the function returned.
    """

    code: int | None
    stderr: str
    seconds: float
    result: Any


def launch(
    world: int, fn: Callable[[int], Any], *, limit: float = HANG, stopped: tuple[int, ...] = ()
) -> list[Ended]:
    """Call `fn(rank)` in forked processes joined by gloo, and wait until they have ended.

    Args:
        limit: seconds after which ranks that are still there are killed.
        stopped: ranks that are not waited for, because they cannot end by themselves.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="standin-") as name:
        folder = Path(name)

        def main(rank: int) -> None:
            stream = (folder / f"stderr-{rank}").open("w", buffering=1)
            os.dup2(stream.fileno(), 2)
            sys.stderr = stream
            faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
            code = 1
            try:
                join(rank, world, folder, limit + 30)
                torch.save(fn(rank), folder / f"result-{rank}")
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)

        sys.stdout.flush()
        processes = [context.Process(target=main, args=(rank,)) for rank in range(world)]
        begin = time.monotonic()
        for process in processes:
            process.start()
        ends: dict[int, float] = {}
        while time.monotonic() - begin < limit and len(ends) < world - len(stopped):
            for rank, process in enumerate(processes):
                if rank not in ends and process.exitcode is not None:
                    ends[rank] = time.monotonic() - begin
            time.sleep(0.005)
        codes = [process.exitcode for process in processes]
        _dump_stacks([p for rank, p in enumerate(processes) if rank not in (*ends, *stopped)])
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        return [
            Ended(
                codes[rank],
                (folder / f"stderr-{rank}").read_text(),
                ends.get(rank, limit),
                torch.load(folder / f"result-{rank}", weights_only=False)
                if codes[rank] == 0
                else None,
            )
            for rank in range(world)
        ]
