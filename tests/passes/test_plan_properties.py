"""What holds for every plan: random sizes, passes, costs and caps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalatent.errors import UserError
from megalatent.passes.bounds import flush_makespan, lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan, make_plan
from megalatent.passes.simulate import peak_in_flight, simulate
from megalatent.passes.validate import validate
from tests.passes.plan_tools import run_with_queues

#: Actions of a random plan, so that the tests stay within seconds.
MOST = 2000
LEVEL = 1 + 1e-9

times = st.floats(0.1, 4.0)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    stages = draw(st.integers(1, 16))
    chunks = draw(st.integers(1, 4))
    most = min(64, max(1, MOST // (4 * stages * chunks)))
    deepest = draw(st.integers(1, 4))
    count = draw(st.integers(1, most))
    passes = draw(st.lists(st.integers(1, deepest), min_size=count, max_size=count))
    return stages, chunks, tuple(passes)


@st.composite
def all_costs(draw: st.DrawFn, stages: int, chunks: int) -> Costs:
    def several(count: int) -> float | tuple[float, ...]:
        if draw(st.booleans()):
            return draw(times)
        return tuple(draw(st.lists(times, min_size=count, max_size=count)))

    extra = st.sampled_from([0.0, 0.0, 0.4])
    return Costs(
        forward=several(stages * chunks),
        backward=several(stages * chunks),
        head=draw(st.sampled_from([0.0, 0.0, 0.7, 5.0])),
        hand_over=draw(st.sampled_from([0.0, 0.0, 0.1, 1.5])),
        embedding=draw(extra),
        fusion=draw(extra),
        fusion_backward=draw(extra),
        extra_forward=draw(extra),
        extra_backward=draw(extra),
    )


relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


@settings(relaxed, max_examples=40)
@given(st.data())
def test_every_plan_is_valid_and_within_its_bounds(data):
    stages, chunks, passes = data.draw(shapes())
    costs = data.draw(all_costs(stages, chunks))
    least, all_of_it = chunks * max(passes), chunks * sum(passes)
    cap = data.draw(st.one_of(st.none(), st.integers(least, all_of_it), st.just(least)))
    plan = make_plan(stages, chunks, passes, costs=costs, max_in_flight=cap)
    assert (plan.stages, plan.chunks, plan.passes) == (stages, chunks, passes)
    validate(plan, max_in_flight=cap)
    found = simulate(plan, costs)
    assert max(peak_in_flight(plan)) <= (all_of_it if cap is None else cap)
    bound = lower_bound(stages, chunks, passes, costs, max_in_flight=cap)
    assert bound <= found.makespan * LEVEL
    if cap is None or cap >= all_of_it:  # a flush before the backward holds everything
        assert found.makespan <= flush_makespan(stages, chunks, passes, costs) * LEVEL


@settings(relaxed, max_examples=15)
@given(st.data())
def test_plans_run_on_blocking_ranks(data):
    stages, chunks, passes = data.draw(shapes())
    passes = passes[: max(1, 300 // (stages * chunks))]
    costs = data.draw(all_costs(stages, chunks))
    cap = data.draw(st.one_of(st.none(), st.integers(0, 8).map(lambda n: n + chunks * max(passes))))
    plan = make_plan(stages, chunks, passes, costs=costs, max_in_flight=cap)
    assert run_with_queues(plan) == sum(map(len, plan.actions))


@settings(relaxed, max_examples=15)
@given(st.data())
def test_evaluation_plans(data):
    stages, chunks, passes = data.draw(shapes())
    costs = data.draw(all_costs(stages, chunks))
    plan = make_plan(stages, chunks, passes, costs=costs, forward_only=True)
    validate(plan)
    found = simulate(plan, costs)
    sizes = (stages, chunks, passes, costs)
    assert lower_bound(*sizes, forward_only=True) <= found.makespan * LEVEL
    assert found.makespan <= flush_makespan(*sizes, forward_only=True) * LEVEL


@settings(relaxed, max_examples=15)
@given(st.data())
def test_order_of_micro_batches_does_not_matter(data):
    stages, chunks, passes = data.draw(shapes())
    shuffled = tuple(data.draw(st.permutations(passes)))
    first = make_plan(stages, chunks, passes)
    second = make_plan(stages, chunks, shuffled)
    assert kinds(first) == kinds(second)
    assert simulate(first).makespan == simulate(second).makespan


def kinds(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """The plan without the names of its micro-batches."""
    return [[(a.kind, a.k, a.chunk) for a in actions] for actions in plan.actions]


@settings(relaxed, max_examples=15)
@given(st.data())
def test_too_small_caps_are_refused(data):
    stages, chunks, passes = data.draw(shapes())
    least = chunks * max(passes)
    cap = data.draw(st.integers(0, least - 1))
    with pytest.raises(UserError, match=f"at least {least}$"):
        make_plan(stages, chunks, passes, max_in_flight=cap)


@settings(relaxed, max_examples=20)
@given(st.data())
def test_zero_durations_are_no_trouble(data):
    """A stage without layers, a free head: time stands still, the order must hold all the same."""
    stages = data.draw(st.integers(2, 5))
    passes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=8)))
    zero_or_one = st.lists(st.sampled_from([0.0, 1.0]), min_size=stages, max_size=stages)
    costs = Costs(forward=tuple(data.draw(zero_or_one)), backward=tuple(data.draw(zero_or_one)))
    cap = data.draw(st.one_of(st.none(), st.just(max(passes))))
    plan = make_plan(stages, 1, passes, costs=costs, max_in_flight=cap)
    validate(plan, max_in_flight=cap)
    assert lower_bound(stages, 1, passes, costs) <= simulate(plan, costs).makespan * LEVEL
