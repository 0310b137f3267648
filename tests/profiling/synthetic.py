"""Recordings made on paper: the simulator's times of a plan as if ranks had measured them."""

from __future__ import annotations

import random
from itertools import accumulate

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan, make_plan
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
    plan: Plan, costs: Costs, stage: int, start: int, *, late: int = 0, factor: float = 1.0
) -> RankStep:
    """One rank's step, `late` ns off the common clock, every time multiplied by `factor`."""
    begin, unit = start + late, UNIT * factor
    clock = begin
    spans: list[Span] = []
    held: list[int] = []
    for action, (from_, to) in zip(
        plan.actions[stage], simulate(plan, costs).spans[stage], strict=True
    ):
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


def recording(
    passes: tuple[tuple[int, ...], ...] = ((1,) * 8, (2,) * 8),
    *,
    stages: int = 4,
    chunks: int = 1,
    costs: Costs = STAGES,
    steps: int = 3,
    replicas: int = 1,
    noise: float = 0.0,
    slower: float = 1.0,
    late: tuple[int, ...] = (),
    seed: int = 1,
) -> Recording:
    """A case for each entry of `passes`, their steps in turns.

    Args:
        noise: standard deviation of a step's own factor on all its times.
        slower: factor on all times.
        late: ns by which the clock of each recorded rank is off.
    """
    ranks = tuple(
        RankInfo(rank=replica * stages + stage, stage=stage, replica=replica, host=f"node{stage}")
        for replica in range(replicas)
        for stage in range(stages)
    )
    draws = random.Random(seed)
    plans = [make_plan(stages, chunks, each, costs=costs) for each in passes]
    found: list[list[Step]] = [[] for _ in plans]
    start, iteration = 5_000, 0
    for _ in range(steps):
        for plan, list_of_steps in zip(plans, found, strict=True):
            iteration += 1
            factor = slower * (1 + draws.gauss(0, noise) if noise else 1.0)
            done = tuple(
                rank_step(
                    plan,
                    costs,
                    info.stage,
                    start,
                    late=late[i] if late else 0,
                    factor=factor,
                )
                for i, info in enumerate(ranks)
            )
            list_of_steps.append(Step(iteration, done))
            start = max(rank.end for rank in done) + 20_000
    cases = tuple(
        Case(name=f"K = {'/'.join(map(str, sorted(set(each))))}", plan=plan, costs=costs, steps=s)
        for each, plan, s in zip(passes, plans, map(tuple, found), strict=True)
    )
    facts = {"model": "synthetic", "tokens_per_micro_batch": 1024, "layers": [2] * stages * chunks}
    return Recording(
        ranks=ranks, cases=cases, memory_kind="resident", facts=facts, created="2026-01-01T00:00:00"
    )
