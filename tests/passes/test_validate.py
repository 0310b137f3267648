"""The validator: broken plans are named, and what it lets pass runs on blocking ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalatent.passes.plan import Action, Plan, make_plan
from megalatent.passes.validate import PlanError, validate
from tests.passes.plan_tools import run_with_queues


def changed(plan: Plan, rank: int, change) -> Plan:
    lists = [list(actions) for actions in plan.actions]
    change(lists[rank])
    return replace(plan, actions=tuple(map(tuple, lists)))


@pytest.fixture
def plan() -> Plan:
    return make_plan(3, 2, (1, 2, 2, 1))


def test_a_made_plan_is_valid(plan):
    validate(plan)
    validate(make_plan(3, 2, (1, 2), forward_only=True))


def test_missing_action(plan):
    gone = plan.actions[1][7]
    with pytest.raises(PlanError, match=r"rank 1: .* is missing") as caught:
        validate(changed(plan, 1, lambda actions: actions.remove(gone)))
    assert str(gone) in str(caught.value)


def test_action_twice(plan):
    with pytest.raises(PlanError, match="is there twice") as caught:
        validate(changed(plan, 2, lambda actions: actions.append(actions[3])))
    assert caught.value.place == (2, len(plan.actions[2]))


@pytest.mark.parametrize(
    "stray",
    [
        Action("H", 0, 1, 1),  # heads belong on the last rank
        Action("F", 9, 1, 0),
        Action("F", 0, 2, 0),  # micro-batch 0 has one pass
        Action("W", 0, 1, 0),
    ],
)
def test_action_that_does_not_belong(plan, stray):
    with pytest.raises(PlanError, match=r"rank 0: action 0, .*does not belong"):
        validate(changed(plan, 0, lambda actions: actions.insert(0, stray)))


def test_wrong_number_of_lists(plan):
    with pytest.raises(PlanError, match="lists for 2 ranks, not 3"):
        validate(replace(plan, actions=plan.actions[:2]))


def move(action: Action, before: Action):
    def change(actions: list[Action]) -> None:
        actions.remove(action)
        actions.insert(actions.index(before), action)

    return change


@pytest.mark.parametrize(
    ("rank", "late", "early"),
    [
        (0, Action("F", 1, 1, 0), Action("F", 1, 2, 0)),  # pass 2 before pass 1
        (2, Action("H", 1, 2, 1), Action("B", 1, 2, 1)),  # backward before its head
        (2, Action("F", 1, 2, 1), Action("B", 1, 2, 1)),  # backward before its forward
        (2, Action("B", 1, 2, 0), Action("B", 1, 1, 1)),  # pass 1's backward before pass 2's
    ],
)
def test_deadlock_names_the_action(plan, rank, late, early):
    broken = changed(plan, rank, move(early, late))
    with pytest.raises(PlanError, match="waits for ever") as caught:
        validate(broken)
    stuck_rank, position = caught.value.place
    assert str(broken.actions[stuck_rank][position]) in str(caught.value)
    assert run_with_queues(broken) < sum(map(len, broken.actions))


def test_deadlock_across_ranks():
    """Each list is fine alone; together the ranks wait for each other."""
    plan = make_plan(2, 1, (1, 1))
    first = [
        Action("F", 0, 1, 0), Action("B", 0, 1, 0), Action("F", 1, 1, 0), Action("B", 1, 1, 0)
    ]  # fmt: skip
    last = [
        Action("F", 1, 1, 0), Action("H", 1, 1, 0), Action("B", 1, 1, 0),
        Action("F", 0, 1, 0), Action("H", 0, 1, 0), Action("B", 0, 1, 0),
    ]  # fmt: skip
    broken = replace(plan, actions=(tuple(first), tuple(last)))
    with pytest.raises(PlanError, match="1 other rank"):
        validate(broken)
    assert run_with_queues(broken) < 10


def test_cap(plan):
    held = peak = 0
    for action in plan.actions[0]:
        held += {"F": 1, "B": -1}.get(action.kind, 0)
        peak = max(peak, held)
    validate(plan, max_in_flight=peak)
    with pytest.raises(PlanError, match=f"rank 0 holds {peak} activations"):
        validate(plan, max_in_flight=peak - 1)


def test_out_of_order_consumption_is_allowed():
    """Messages wait in posted buffers: a rank may take the second one first."""
    plan = make_plan(2, 1, (1, 1))
    lists = [list(actions) for actions in plan.actions]
    lists[0] = [
        Action("F", 0, 1, 0), Action("F", 1, 1, 0), Action("B", 1, 1, 0), Action("B", 0, 1, 0)
    ]  # fmt: skip
    lists[1] = [
        Action("F", 1, 1, 0), Action("H", 1, 1, 0), Action("B", 1, 1, 0),
        Action("F", 0, 1, 0), Action("H", 0, 1, 0), Action("B", 0, 1, 0),
    ]  # fmt: skip
    crossed = replace(plan, actions=tuple(map(tuple, lists)))
    validate(crossed)
    assert run_with_queues(crossed) == 10
