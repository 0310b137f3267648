"""Recordings of stages that sleep for known times: what a report says can be told to be true.

Sleeping needs no core, so several stages on a small machine take the times they are told to. The
outputs carry when they were made, so that a link can be made to take its time, too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalatent.passes import execute
from megalatent.passes.channels import Inbox, Ring
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan
from megalatent.passes.simulate import duration, simulate
from megalatent.profiling.clock import Alignment, CpuClock, align
from megalatent.profiling.memory import make_meter
from megalatent.profiling.recorder import StepRecorder
from megalatent.profiling.records import RankInfo, Recording
from megalatent.profiling.run import join_cases
from tests.passes.standin import HAND_OVER, launch

Seconds = Callable[[Action, int], float]

REDUCE, UPDATE = 0.011, 0.017
PART = 0.005


class Sleeper:
    """A stage whose actions sleep; what it hands over says when it was made."""

    def __init__(self, rank: int, seconds: Seconds, recorder: Any, part: float) -> None:
        self.rank, self.seconds, self.recorder, self.part = rank, seconds, recorder, part

    def forward(self, action: Action, stage_input: Tensor | None) -> Tensor:
        return self._act(action, "embedding" if action.k == 1 else "fusion")

    def head(self, action: Action) -> None:
        self._act(action, None)

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        made = self._act(action, "embedding_backward" if action.k == 1 else "fusion_backward")
        return None if self.rank == 0 and action.k == 1 and action.chunk == 0 else made

    def last_backward(self, chunk: int) -> None: ...

    def chunk_finished(self, chunk: int) -> None: ...

    def _act(self, action: Action, part: str | None) -> Tensor:
        until = time.perf_counter() + self.seconds(action, self.rank)
        if self.part and part is not None and self.rank == 0 and action.chunk == 0:
            self.recorder.begin(part, action)
            time.sleep(self.part)
            self.recorder.end(part, action)
        time.sleep(max(0.0, until - time.perf_counter()))
        shape = tuple(HAND_OVER.shape)
        return torch.full(shape, time.perf_counter(), dtype=torch.float64)


def record(
    plans: Sequence[Plan],
    seconds: Sequence[Seconds],
    *,
    steps: int = 3,
    links: Mapping[int, float] | None = None,
    parts: bool = False,
    whole_step: bool = False,
    planned: Costs | None = None,
    facts: Mapping[str, Any] | None = None,
    factor: float = 1.0,
) -> Recording:
    """Execute plans in turn on stages that sleep, and record them.

    Args:
        plans: one per case, all with the same number of stages.
        seconds: how long each action of each plan takes on a rank.
        links: edge -> seconds that a hand-over takes there, either way.
        parts: the first stage spends `PART` of each visit on its embedding or fusion.
        whole_step: each step ends with `REDUCE` and `UPDATE` seconds on every rank.
        planned: what the planner assumed.
        facts: for `Recording.facts`, besides what is always known.
        factor: by which `PART`, `REDUCE` and `UPDATE` are longer.
    """
    stages = plans[0].stages

    def stage(rank: int) -> Any:
        ring = Ring.create(dist.group.WORLD)
        _slow_links(ring, links or {})
        recorder = StepRecorder(CpuClock(), make_meter(torch.device("cpu")))
        before = align(dist.group.WORLD)
        iteration = 0
        for number in range(steps + 1):
            for plan, time_of in zip(plans, seconds, strict=True):
                dist.barrier()
                # The first round opens the connections.
                mine = StepRecorder(CpuClock()) if number == 0 else recorder
                mine.step_begins(iteration)
                program = Sleeper(rank, time_of, mine, PART * factor * parts)
                execute.Executor(ring, recorder=mine).run(plan, program, HAND_OVER)
                if whole_step:
                    for kind, nap in (("reduce", REDUCE), ("optimizer", UPDATE)):
                        mine.begin(kind)
                        time.sleep(nap * factor)
                        mine.end(kind)
                mine.step_ends(plan)
                iteration += 1
        dist.barrier()
        info = RankInfo(rank=rank, stage=rank, host=socket.gethostname())
        return info, recorder.finish(Alignment.between(before, align(dist.group.WORLD)))

    results = launch(stages, stage)
    bad = [end.stderr for end in results if end.code != 0]
    assert not bad, bad[0]
    every = [end.result for end in results]
    return Recording(
        ranks=tuple(info for info, _ in every),
        cases=join_cases(
            [info.stage for info, _ in every], [s for _, s in every], planned or Costs()
        ),
        memory_kind="resident",
        facts={
            "stages": stages,
            "chunks": plans[0].chunks,
            "replicas": 1,
            "world_size": stages,
            "tokens_per_micro_batch": 100,
            "layers": [1] * (stages * plans[0].chunks),
            "num_layers": stages * plans[0].chunks,
            **(facts or {}),
        },
        created="2026-01-01T00:00:00+00:00",
    )


def by_costs(plan: Plan, costs: Costs) -> Seconds:
    """Times as these costs have them."""
    return lambda action, rank: duration(action, rank, plan, costs)


def makespan(plan: Plan, costs: Costs) -> float:
    return simulate(plan, costs).makespan


def _slow_links(ring: Ring, links: Mapping[int, float]) -> None:
    """Hand-overs arrive that much later than they were made."""

    class SlowInbox(Inbox):
        def __init__(self, expected: Any, source: int, group: Any, **kwargs: Any) -> None:
            super().__init__(expected, source, group, **kwargs)
            edge = (ring.rank - 1) % ring.size if group is ring.forward_in else ring.rank
            self.late = links.get(edge, 0.0)

        def take(self, key: Any) -> Tensor:
            tensor = super().take(key)
            arrives = float(tensor.flatten()[0]) + self.late
            time.sleep(max(0.0, arrives - time.perf_counter()) if self.late else 0.0)
            return tensor

    setattr(execute, "Inbox", SlowInbox)  # noqa: B010


def cores() -> int:
    return len(os.sched_getaffinity(0))
