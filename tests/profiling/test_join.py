"""Steps whose micro-batches drew the same K in another order are steps of one case."""

from __future__ import annotations

from itertools import pairwise

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Planner
from megalatent.passes.simulate import simulate
from megalatent.passes.validate import validate
from megalatent.profiling.advice import advise
from megalatent.profiling.recorder import RecordedStep
from megalatent.profiling.records import ACTIONS, RankInfo, Recording
from megalatent.profiling.report import report
from megalatent.profiling.run import join_cases
from tests.profiling.synthetic import rank_step

DRAWN = ((1, 2, 1, 3), (2, 1, 3, 1), (1, 1, 2, 3), (2, 2, 1, 1))


def joined() -> Recording:
    planner = Planner(3)
    ranks: list[list[RecordedStep]] = [[], [], []]
    for iteration, passes in enumerate(DRAWN):
        plan = planner.get(passes)
        spans = simulate(plan, Costs()).spans
        for stage, own in enumerate(ranks):
            begin = 1_000_000_000 * iteration
            step = rank_step(plan, Costs(), spans[stage], stage, begin, 1.0)
            own.append(RecordedStep(iteration, plan, step))
    planner.close()
    facts = {
        "tokens_per_micro_batch": 8,
        "layers": [1] * 3,
        "num_layers": 3,
        "replicas": 1,
        "mixture": {"1": 0.5, "2": 0.25, "3": 0.25},
    }
    infos = tuple(RankInfo(rank=stage, stage=stage) for stage in range(3))
    return Recording(ranks=infos, cases=join_cases(range(3), ranks, Costs()), facts=facts)


def test_orders_of_micro_batches_are_one_case() -> None:
    made = joined()
    assert [case.name for case in made.cases] == ["K = 2x1 + 2x2", "K = 2x1 + 1x2 + 1x3"]
    assert [len(case.steps) for case in made.cases] == [1, 3]
    for case in made.cases:
        assert all(a <= b for a, b in pairwise(case.plan.passes))
        validate(case.plan)
        for step in case.steps:
            for stage, rank in enumerate(step.ranks):
                done = [span.action for span in rank.of_kind(*ACTIONS)]
                assert done == list(case.plan.actions[stage])


def test_they_are_reported_once() -> None:
    made = joined()
    assert [case.steps for case in report(made).cases] == [1, 3]
    advice = advise(made)
    assert sum(advice.weights.values()) == 1
    assert advice.weights["K = 2x1 + 1x2 + 1x3"] == 0.75  # three of the four steps
