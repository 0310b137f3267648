"""Recordings made on paper: the simulator's times of a plan as if ranks had measured them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan, make_plan
from megalatent.passes.simulate import simulate
from megalatent.profiling.records import (
    Case,
    MemorySample,
    RankInfo,
    RankStep,
    Recording,
    Span,
    Step,
)

#: Nanoseconds in the unit of the costs.
UNIT = 1_000_000
REDUCE, OPTIMIZER = 300_000, 500_000
STAGES = Costs(
    forward=(1.0, 1.0, 1.2, 0.9),
    backward=(2.0, 2.1, 2.4, 1.8),
    head=0.7,
    hand_over=0.05,
    embedding=0.1,
    embedding_backward=0.15,
    fusion=0.3,
    fusion_backward=0.5,
)


def rank_step(
    plan: Plan,
    costs: Costs,
    times: Sequence[tuple[float, float]],
    stage: int,
    begin: int,
    factor: float,
) -> RankStep:
    """One rank's step from the simulated times of its actions, each multiplied by `factor`."""
    clock, unit = begin, UNIT * factor
    spans: list[Span] = []
    held: list[int] = []
    for action, (from_, to) in zip(plan.actions[stage], times, strict=True):
        place = (action.micro_batch, action.k, action.chunk)
        first, last = begin + round(from_ * unit), begin + round(to * unit)
        if first > clock and plan.source(action, stage) not in (None, stage):
            spans.append(Span("wait", clock, first, *place, of=action.kind))
        if stage == 0 and action.kind in "FB" and action.chunk == 0:
            part = "embedding" if action.k == 1 else "fusion"
            name = part if action.kind == "F" else f"{part}_backward"
            inside = round(getattr(costs, name) * unit)
            spans.append(Span(name, first, min(last, first + inside), *place, of=action.kind))
        spans.append(Span(action.kind, first, last, *place))
        held.append({"F": 1, "B": -1, "H": 0}[action.kind])
        clock = last
    memory = [
        MemorySample(span.end, 1000 + 10 * flight, 1010 + 10 * flight, flight)
        for span, flight in zip(
            (span for span in spans if span.kind in "FBH"), accumulate(held), strict=True
        )
    ]
    spans.append(Span("reduce", clock, clock + REDUCE))
    spans.append(Span("optimizer", clock + REDUCE, clock + REDUCE + OPTIMIZER))
    return RankStep(begin, clock + REDUCE + OPTIMIZER, tuple(spans), tuple(memory))


def recorded_steps(
    recordings: Sequence[tuple[Plan, Costs]],
    *,
    steps: int = 3,
    replicas: int = 1,
    noise: float = 0.0,
    slower: float = 1.0,
    late: tuple[int, ...] = (),
    seed: int = 1,
) -> Recording:
    """A case for each plan, their steps in turns.

    Args:
        noise: standard deviation of a step's own factor on all its times.
        slower: factor on all times.
        late: ns by which the clock of each recorded rank is off.
    """
    stages, chunks = recordings[0][0].stages, recordings[0][0].chunks
    ranks = tuple(
        RankInfo(rank=replica * stages + stage, stage=stage, replica=replica, host=f"node{stage}")
        for replica in range(replicas)
        for stage in range(stages)
    )
    draws = random.Random(seed)
    simulated = [simulate(plan, costs).spans for plan, costs in recordings]
    found: list[list[Step]] = [[] for _ in recordings]
    start, iteration = 5_000, 0
    for _ in range(steps):
        for (plan, costs), spans, own in zip(recordings, simulated, found, strict=True):
            iteration += 1
            factor = slower * (1 + draws.gauss(0, noise) if noise else 1.0)
            done = tuple(
                rank_step(
                    plan,
                    costs,
                    spans[info.stage],
                    info.stage,
                    start + (late[i] if late else 0),
                    factor,
                )
                for i, info in enumerate(ranks)
            )
            own.append(Step(iteration, done))
            start = max(rank.end for rank in done) + 20_000
    cases = tuple(
        Case(
            name=f"K = {'/'.join(map(str, sorted(set(plan.passes))))}",
            plan=plan,
            costs=costs,
            steps=tuple(own),
        )
        for (plan, costs), own in zip(recordings, found, strict=True)
    )
    facts = {"model": "synthetic", "tokens_per_micro_batch": 1024, "layers": [2] * stages * chunks}
    return Recording(
        ranks=ranks, cases=cases, memory_kind="resident", facts=facts, created="2026-01-01T00:00:00"
    )


def recording(
    passes: tuple[tuple[int, ...], ...] = ((1,) * 8, (2,) * 8),
    *,
    stages: int = 4,
    chunks: int = 1,
    costs: Costs = STAGES,
    **options: Any,
) -> Recording:
    """A case for each entry of `passes`; the other options are those of `recorded_steps`."""
    plans = [make_plan(stages, chunks, each, costs=costs) for each in passes]
    return recorded_steps([(plan, costs) for plan in plans], **options)


def large_plan(stages: int, micro_batches: int, k: int) -> Plan:
    """All forwards, then all backwards: found at once at any size."""
    visits = [(m, j) for j in range(1, k + 1) for m in range(micro_batches)]
    actions = []
    for stage in range(stages):
        own = [Action("F", m, j, 0) for m, j in visits]
        if stage == stages - 1:
            own += [Action("H", m, j, 0) for m, j in visits]
        own += [Action("B", m, j, 0) for m, j in reversed(visits)]
        actions.append(tuple(own))
    return Plan(stages, 1, (k,) * micro_batches, "by hand", tuple(actions))
