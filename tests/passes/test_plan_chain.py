"""The rules of the chain, written once, against the chain written out."""

from __future__ import annotations

import pytest

from megalatent.passes.plan import (
    Action,
    Plan,
    dependencies,
    make_plan,
    next_backward,
    next_forward,
    previous_backward,
    previous_forward,
)
from megalatent.passes.validate import receive_order
from tests.passes.plan_tools import chain, needs

SHAPES = [(1, 1, (2, 1)), (1, 3, (2,)), (2, 1, (3, 1)), (3, 2, (2, 1, 3)), (4, 3, (1, 2))]


@pytest.mark.parametrize(("stages", "chunks", "passes"), SHAPES)
def test_walking_forward_visits_the_chain_in_order(stages, chunks, passes):
    plan = Plan(stages, chunks, passes, "", ())
    for micro_batch in range(len(passes)):
        visit = (0, Action("F", micro_batch, 1, 0))
        assert previous_forward(visit[1], 0, plan) is None
        walked = [visit]
        while (after := next_forward(visit[1], visit[0], plan)) is not None:
            assert previous_forward(after[1], after[0], plan) == visit
            visit = after
            walked.append(visit)
        assert walked == chain(plan, micro_batch)


@pytest.mark.parametrize(("stages", "chunks", "passes"), SHAPES)
def test_walking_backward_is_the_chain_reversed(stages, chunks, passes):
    plan = Plan(stages, chunks, passes, "", ())
    for micro_batch, count in enumerate(passes):
        visit = (stages - 1, Action("B", micro_batch, count, chunks - 1))
        assert previous_backward(visit[1], visit[0], plan) is None
        walked = [visit]
        while (after := next_backward(visit[1], visit[0], plan)) is not None:
            assert previous_backward(after[1], after[0], plan) == visit
            visit = after
            walked.append(visit)
        expected = [(r, a._replace(kind="B")) for r, a in reversed(chain(plan, micro_batch))]
        assert walked == expected


@pytest.mark.parametrize(("stages", "chunks", "passes"), SHAPES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_dependencies_and_sources(stages, chunks, passes, forward_only):
    plan = make_plan(stages, chunks, passes, forward_only=forward_only)
    table = needs(plan)
    assert {(r, a) for r, rank in enumerate(plan.actions) for a in rank} == set(table)
    for (rank, action), needed in table.items():
        assert sorted(dependencies(action, rank, plan)) == sorted(needed)
        handed = [r for r, a in needed if a.kind == action.kind]
        assert plan.source(action, rank) == (handed[0] if handed else None)


def test_one_stage_runs_micro_batch_by_micro_batch():
    plan = make_plan(1, 1, (1, 2))
    text = " ".join(f"{a.kind}{a.micro_batch}.{a.k}" for a in plan.actions[0])
    # Nobody waits on one stage, so the order is the one that holds least.
    assert text == "F1.1 H1.1 F1.2 H1.2 B1.2 B1.1 F0.1 H0.1 B0.1"


def test_state_leaves_before_a_costly_head():
    """On the last stage the next forward does not wait for a head that can run later."""
    from megalatent.passes.costs import Costs

    plan = make_plan(4, 1, (3,) * 4, costs=Costs(head=2.0))
    kinds = [a.kind for a in plan.actions[-1]]
    assert "F" in kinds[kinds.index("H") :]
    assert kinds[:2] == ["F", "F"]


def test_receive_order_is_the_senders_order():
    plan = make_plan(2, 2, (2, 1, 3))
    for rank in range(2):
        other = 1 - rank
        sent = [
            after[1]
            for a in plan.actions[other]
            if a.kind == "F" and (after := next_forward(a, other, plan)) is not None
        ]
        assert receive_order(plan, rank, "F") == sent
        consumed = {
            a for a in plan.actions[rank] if a.kind == "F" and plan.source(a, rank) is not None
        }
        assert set(receive_order(plan, rank, "F")) == consumed
        gradients = {
            a for a in plan.actions[rank] if a.kind == "B" and plan.source(a, rank) is not None
        }
        assert set(receive_order(plan, rank, "B")) == gradients
    assert receive_order(make_plan(1, 1, (2,)), 0, "F") == []
