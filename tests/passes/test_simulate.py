"""The simulator against closed forms, hand-made examples and a relaxation without any order."""

from __future__ import annotations

import random

import pytest

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan, make_plan
from megalatent.passes.simulate import peak_in_flight, simulate
from tests.passes.plan_tools import relax


def one_f_one_b(stages: int, micro_batches: int) -> Plan:
    """The schedule of the textbooks, written down without the planner."""
    lists = []
    for rank in range(stages):
        warm_up = min(micro_batches, stages - rank)
        actions: list[Action] = []
        done = 0
        for micro_batch in range(micro_batches):
            actions.append(Action("F", micro_batch, 1, 0))
            if rank == stages - 1:
                actions.append(Action("H", micro_batch, 1, 0))
            if micro_batch >= warm_up - 1:
                actions.append(Action("B", done, 1, 0))
                done += 1
        actions += [Action("B", m, 1, 0) for m in range(done, micro_batches)]
        lists.append(tuple(actions))
    return Plan(stages, 1, (1,) * micro_batches, "written down", tuple(lists))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 5), (4, 4), (4, 9), (8, 11)])
def test_one_f_one_b_closed_form(stages, micro_batches):
    plan = one_f_one_b(stages, micro_batches)
    found = simulate(plan)
    assert found.makespan == (micro_batches + stages - 1) * 3
    assert found.peak_in_flight == tuple(
        min(micro_batches, stages - rank) for rank in range(stages)
    )
    assert found.busy == (3.0 * micro_batches,) * stages
    assert found.bubble_fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_times_of_a_small_plan_by_hand():
    """Two stages, one micro-batch, two passes; each edge has its own hand-over time."""
    chain = [("F", 1, 0), ("F", 1, 1), ("F", 2, 0), ("F", 2, 1)]
    first = [Action("F", 0, 1, 0), Action("F", 0, 2, 0), Action("B", 0, 2, 0), Action("B", 0, 1, 0)]
    last = [
        Action("F", 0, 1, 0),
        Action("H", 0, 1, 0),
        Action("F", 0, 2, 0),
        Action("H", 0, 2, 0),
        Action("B", 0, 2, 0),
        Action("B", 0, 1, 0),
    ]
    plan = Plan(2, 1, (2,), "by hand", (tuple(first), tuple(last)))
    costs = Costs(
        forward=(1.0, 2.0),
        backward=(3.0, 4.0),
        head=5.0,
        hand_over=(0.5, 0.25),
        embedding=0.125,
        embedding_backward=1.0,
        fusion=0.75,
        fusion_backward=0.375,
    )
    assert len(chain) == 4
    # F1@0 ends 1.125, +0.5; F1@1 1.625-3.625; H1 to 8.625; state at 3.875; F2@0 to 5.625, +0.5;
    # F2@1 waits for H1: 8.625-10.625; H2 to 15.625; B2@1 to 19.625, +0.5; B2@0 20.125-23.5, +0.25
    # over the ring edge; B1@1 23.75-27.75, +0.5; B1@0 28.25-32.25.
    found = simulate(plan, costs)
    assert found.spans[0] == ((0.0, 1.125), (3.875, 5.625), (20.125, 23.5), (28.25, 32.25))
    assert found.spans[1] == (
        (1.625, 3.625),
        (3.625, 8.625),
        (8.625, 10.625),
        (10.625, 15.625),
        (15.625, 19.625),
        (23.75, 27.75),
    )
    assert found.makespan == 32.25


def test_equals_relaxation():
    rng = random.Random(5)
    for _ in range(12):
        stages, chunks = rng.randint(1, 4), rng.randint(1, 3)
        passes = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]

        def several(low: float, high: float, count: int) -> tuple[float, ...]:
            return tuple(rng.uniform(low, high) for _ in range(count))

        costs = Costs(
            forward=several(0.5, 2, stages * chunks),
            backward=several(0.5, 4, stages * chunks),
            head=rng.choice([0.0, 1.7]),
            hand_over=several(0, 1, stages),
            embedding=rng.random(),
            embedding_backward=rng.random(),
            fusion=rng.random(),
            fusion_backward=rng.random(),
            extra_forward=several(0, 1, stages * chunks),
            extra_backward=0.3,
        )
        plan = make_plan(stages, chunks, passes, costs=costs, forward_only=rng.random() < 0.3)
        assert simulate(plan, costs).makespan == pytest.approx(relax(plan, costs), rel=1e-12)


def test_a_plan_that_blocks_is_refused():
    good = make_plan(2, 1, (1, 1))
    lists = [list(rank) for rank in good.actions]
    lists[1].reverse()
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(Plan(2, 1, (1, 1), "", tuple(map(tuple, lists))))


def test_evaluation_holds_nothing():
    plan = make_plan(3, 1, (2, 2, 1), forward_only=True)
    assert peak_in_flight(plan) == (0, 0, 0)
    assert not any(action.kind == "B" for rank in plan.actions for action in rank)
    assert simulate(plan).makespan == 5 + 2  # five visits on the last stage, two to fill it
