"""The strategies one by one: what the search counts on."""

from __future__ import annotations

import pytest

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan
from megalatent.passes.problem import B, F, H, Problem, score
from megalatent.passes.simulate import simulate
from megalatent.passes.strategies.greedy import RULES, greedy
from megalatent.passes.strategies.orders import one_by_one, pass_by_pass
from megalatent.passes.strategies.projection import project
from megalatent.passes.strategies.woven import Recipe, slack_of, weave
from megalatent.passes.validate import validate

COSTS = Costs(forward=(1.0, 1.5, 0.75, 1.25), backward=2.0, head=1.5, hand_over=0.25, fusion=0.5)
PASSES = (3, 2, 2, 1, 1, 1, 1, 1)


def as_plan(p: Problem, lists: list[list[int]]) -> Plan:
    actions = tuple(
        tuple(
            Action("FBH"[code & 3], *divmod_pass(p, code >> 2))
            for code in rank
        )
        for rank in lists
    )  # fmt: skip
    return Plan(p.stages, p.chunks, p.passes, "", actions, p.forward_only)


def divmod_pass(p: Problem, base: int) -> tuple[int, int, int]:
    micro_batch, v = divmod(base, p.width)
    return micro_batch, v // p.chunks + 1, v % p.chunks


def check(p: Problem, costs: Costs, lists: list[list[int]], heads: str) -> float:
    """The search's fast score says what the validator and the simulator say."""
    found = score(p, lists, heads)
    assert found is not None
    plan = as_plan(p, [*lists[:-1], found.last])
    validate(plan, max_in_flight=p.cap)
    simulation = simulate(plan, costs)
    assert simulation.makespan == pytest.approx(found.makespan, rel=1e-12)
    assert list(simulation.peak_in_flight) == found.peaks
    return found.makespan


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("forward_only", [False, True])
def test_fixed_orders(chunks, forward_only):
    p = Problem(4, chunks, PASSES, COSTS, None, forward_only)
    alone = check(p, COSTS, one_by_one(p), "given")
    assert check(p, COSTS, pass_by_pass(p), "given") < alone
    if not forward_only:
        peaks = score(p, one_by_one(p), "given").peaks
        assert peaks == [3 * chunks] * 4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("cap", [None, 9, 12])
@pytest.mark.parametrize("admit", [None, 1.25])
def test_greedy(rule, chunks, cap, admit):
    p = Problem(4, chunks, PASSES, COSTS, cap)
    share = None if cap is None or admit is None else admit * cap
    check(p, COSTS, greedy(p, rule, admit=share), "given")


def test_greedy_blur_is_the_same_for_the_same_seed():
    p = Problem(4, 1, PASSES, COSTS)
    assert greedy(p, "tail", seed=3) == greedy(p, "tail", seed=3)
    assert greedy(p, "tail", seed=3) != greedy(p, "tail", seed=4)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("starts", ["longest", "spread"])
@pytest.mark.parametrize("group", [0, 3, 4])
@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("heads", ["early", "busy", "gap"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_woven(rank, starts, group, deep, heads, chunks):
    p = Problem(4, chunks, PASSES, COSTS)
    recipe = Recipe(rank, starts, group, deep, eager_heads=heads == "early" and rank == 3)
    woven = weave(p, recipe)
    check(p, COSTS, project(p, woven), heads)
    # All ranks share one order of forwards and one of backwards: every edge is first in, first out.
    lists = project(p, woven)
    for kind in (F, B):
        orders = {tuple(code for code in rank_list if code & 3 == kind) for rank_list in lists}
        assert len(orders) == 1
    assert not any(code & 3 == H for rank_list in lists for code in rank_list)


def test_woven_under_a_cap():
    p = Problem(4, 1, (2,) * 12, Costs(), cap=6)
    woven = weave(p, Recipe(3, admit=8))
    assert check(p, Costs(), project(p, woven), "early") < score(p, one_by_one(p), "given").makespan


def test_slots_take_whole_periods():
    """The way to the next rank and back takes a whole number of the busiest rank's turns."""
    costs = Costs(forward=1.0, backward=2.0, head=4.2, hand_over=0.1)
    p = Problem(4, 1, (2,) * 8, costs)
    slack = slack_of(p, in_slots=True)
    for there, back in zip(slack.forward[:-1], slack.backward[:-1], strict=True):
        assert 1 + 2 + 2 * 0.1 + there + back == pytest.approx(7.2)
        assert 1 + there == pytest.approx(2 + back)  # there and back alike
    assert slack.slope == pytest.approx(3)
    assert slack_of(p, in_slots=False).forward == [0.0] * 4


def test_score_refuses_what_blocks():
    p = Problem(2, 1, (1, 1), Costs())
    good = one_by_one(p)
    assert score(p, good, "given") is not None
    assert score(p, [good[0][::-1], good[1]], "given") is None
    capped = Problem(2, 1, (1, 1), Costs(), cap=1)
    assert score(capped, pass_by_pass(capped), "given") is None
