"""The executor against the simulator, and multi-pass steps against steps with a flush per pass.

    python tools/bench_executor.py                 # stages that sleep: 8 processes, no core needed
    python tools/bench_executor.py --real          # small real models on two processes

Times on a shared machine are noise: what counts are ratios of times taken in one run. A stage that
sleeps needs no core, so even two cores show what the executor adds to a plan with eight stages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of OpenMP do not survive a fork

import torch
import torch.distributed as dist
from torch import Tensor

from megalatent.passes.channels import Ring
from megalatent.passes.costs import Costs
from megalatent.passes.execute import Executor, HandOver, StageProgram, _Run, now
from megalatent.passes.plan import Action, Plan, make_plan
from megalatent.passes.simulate import duration, simulate
from megalatent.passes.watch import Watch
from tests.passes.standin import HAND_OVER, launch

MIXTURE = {3: 0.03, 2: 0.22, 1: 0.75}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--forward-ms", type=float, default=15.0, help="sleep of a forward visit")
    parser.add_argument("--head", type=float, default=0.5, help="head, in forwards of a stage")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="real models on two stages instead")
    given = parser.parse_args()
    if given.real:
        return real(given.steps)
    return sleeping(given)


# -- stages that sleep ---------------------------------------------------------------------------


def sleeping(given: argparse.Namespace) -> int:
    m = given.micro_batches
    few = [max(1, round(MIXTURE[3] * m)), round(MIXTURE[2] * m)]
    mixture = [3] * few[0] + [2] * few[1] + [1] * (m - sum(few))
    seconds = given.forward_ms / 1000
    equal = Costs(forward=seconds, backward=2 * seconds)
    headed = Costs(forward=seconds, backward=2 * seconds, head=given.head * seconds)
    cases = [("K = 1", [1] * m, equal), ("K = 2", [2] * m, equal), ("mixture", mixture, equal)]
    cases += [(f"{name}, head {given.head:g}", passes, headed) for name, passes, _ in cases[1:]]
    print(
        f"{given.stages} stages that sleep, {m} micro-batches, forward {given.forward_ms:g} ms, "
        f"backward twice that; seconds, median of {given.steps} steps"
    )
    print(f"{'passes':<20}{'actions':>9}{'simulated':>11}{'measured':>10}{'ratio':>8}{'sleep':>8}")
    for name, passes, costs in cases:
        plan = make_plan(given.stages, 1, passes, costs=costs)
        expected = simulate(plan, costs).makespan
        measured, overslept = _measure(plan, costs, given.steps)
        actions = sum(map(len, plan.actions))
        print(
            f"{name:<20}{actions:>9}{expected:>11.3f}{measured:>10.3f}{measured / expected:>8.3f}"
            f"{overslept:>8.3f}",
            flush=True,
        )
    print("ratio: measured over simulated; sleep: time that sleeping took over what was asked for")
    return 0


def _measure(plan: Plan, costs: Costs, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and how long the sleeps were, over what they should have been."""

    def stage(rank: int) -> tuple[list[tuple[float, float]], float]:
        ring = Ring.create(dist.group.WORLD)
        watch = Watch(60.0, name=f"rank {rank}")
        watch.connect(rank)
        executor = Executor(ring, watch=watch)
        times = []
        slept = asked = 0.0
        for step in range(steps + 1):  # the first one opens the connections
            start = _start_together()
            program = _Sleeper(plan, rank, costs)
            executor.run(plan, program, HAND_OVER)
            if step:
                times.append((start, now()))
                slept, asked = slept + program.slept, asked + program.asked
        watch.close()
        dist.barrier()
        return times, slept / asked

    limit = 60 + 4 * (steps + 1) * simulate(plan, costs).makespan
    ended = launch(plan.stages, stage, limit=limit)
    bad = [end for end in ended if end.code != 0]
    if bad:
        raise SystemExit(f"a stage failed:\n{bad[0].stderr}")
    spans = [
        max(end.result[0][step][1] for end in ended) - ended[0].result[0][step][0]
        for step in range(steps)
    ]
    return statistics.median(spans), statistics.mean(end.result[1] for end in ended)


def _start_together() -> float:
    """A time at which all ranks begin; `now` is one clock for all processes of a machine."""
    times = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, now() + 0.05)
    start = max(times)
    time.sleep(max(0.0, start - now()))
    return start


class _Sleeper:
    """A stage whose actions sleep, and do nothing else."""

    def __init__(self, plan: Plan, rank: int, costs: Costs) -> None:
        self.plan, self.rank, self.costs = plan, rank, costs
        self.made = torch.zeros(tuple(HAND_OVER.shape), dtype=HAND_OVER.dtype)
        self.slept = self.asked = 0.0

    def forward(self, action: Action, stage_input: Tensor | None) -> Tensor:
        self.head(action)
        return self.made

    def head(self, action: Action) -> None:
        seconds = duration(action, self.rank, self.plan, self.costs)
        begin = now()
        time.sleep(seconds)
        self.slept += now() - begin
        self.asked += seconds

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        self.head(action)
        return self.made

    def last_backward(self, chunk: int) -> None: ...

    def chunk_finished(self, chunk: int) -> None: ...


# -- real models ---------------------------------------------------------------------------------


class _FlushRun(_Run):
    """Waits for all stages after each pass, forwards and backwards alike."""

    def _perform(self, index: int, action: Action, last: bool) -> None:
        super()._perform(index, action, last)
        following = self.mine[index + 1 :]
        phase = _phase(action)
        if following and all(_phase(a) != phase for a in following):
            dist.barrier()


def _phase(action: Action) -> tuple[bool, int]:
    return action.kind == "B", action.k


class _FlushExecutor(Executor):
    def run(self, plan: Plan, program: StageProgram, hand_over: HandOver) -> None:
        _FlushRun(self, plan, program, hand_over).run()


class _FlushPlanner:
    """Plans all forwards of pass 1, of pass 2, …, then the backwards in reverse order."""

    def __init__(self, stages: int) -> None:
        self.stages = stages

    def get(self, passes: Sequence[int], *, forward_only: bool = False) -> Plan:
        assert not forward_only
        visits = [
            (m, k) for k in range(1, max(passes) + 1) for m, own in enumerate(passes) if own >= k
        ]
        first = [Action("F", m, k, 0) for m, k in visits]
        last = [Action(kind, m, k, 0) for m, k in visits for kind in "FH"]
        back = [
            Action("B", m, k, 0)
            for k in range(max(passes), 0, -1)
            for m, own in enumerate(passes)
            if own >= k
        ]
        lists = [tuple(first + back)] * (self.stages - 1) + [tuple(last + back)]
        return Plan(self.stages, 1, tuple(passes), "flush per pass", tuple(lists))

    def prefetch(self, passes: Sequence[int]) -> None: ...


def real(steps: int) -> int:
    import tests.distributed.conftest  # noqa: F401  (Megatron's imports, before anything forks)
    from tests.distributed.harness import Layout, run_ranks
    from tests.distributed.latent import Setup

    m = 8
    mixtures = {"K = 2": (2,) * m, "K = 3": (3,) * m, "mixed": (3, 2, 2, 1, 1, 1, 1, 1)}
    print(f"real models on 2 stages, {m} micro-batches; seconds, median of {steps} steps each")
    print(f"{'passes':<10}{'multi-pass':>11}{'flushes':>9}{'ratio':>8}{'simulated':>11}")
    for name, passes in mixtures.items():
        setup = Setup(passes=passes, batch=2 * m, seq_length=64, hidden=128, packed=False)
        ours, flush = run_ranks(2, _steps, setup, Layout(pp=2), steps, timeout=600)[0]
        plan = make_plan(2, 1, passes)
        simulated = simulate(plan).makespan / _flush_makespan(passes)
        print(f"{name:<10}{ours:>11.3f}{flush:>9.3f}{ours / flush:>8.3f}{simulated:>11.3f}")
    print("ratio, simulated: multi-pass over flushes; simulated with backward = 2 forward, no head")
    return 0


def _flush_makespan(passes: Sequence[int]) -> float:
    from megalatent.passes.bounds import flush_makespan

    return flush_makespan(2, 1, passes)


def _steps(rank: int, setup: Any, layout: Any, steps: int) -> tuple[float, float]:
    """Median seconds of a step with our plan, and of one with flushes, in turn."""
    from megalatent.passes.plan import Planner
    from megalatent.training import schedule
    from tests.distributed.harness import init
    from tests.distributed.latent import Rig

    del rank
    init(layout)
    rig = Rig(setup, layout)
    planners: list[Any] = [Planner(layout.pp), _FlushPlanner(layout.pp)]
    times: list[list[float]] = [[], []]
    losses = []
    for step in range(2 * (steps + 1)):
        which = step % 2
        rig.schedule._planner = planners[which]
        setattr(schedule, "Executor", (Executor, _FlushExecutor)[which])  # noqa: B010
        dist.barrier()
        begin = now()
        rig.run()
        dist.barrier()
        if step > 1:
            times[which].append(now() - begin)
        losses.append(rig.losses())
    for a, b in pairwise(losses):
        if any(abs(a[k] - b[k]) > 1e-5 for k in a):
            raise RuntimeError(f"the two schedules give different losses: {a}, {b}")
    planners[0].close()
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
