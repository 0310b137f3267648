"""How good the plans are: at the lower bound, with little memory, and the bound is one."""

from __future__ import annotations

import itertools

import pytest

from megalatent.passes.bounds import flush_makespan, lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.plan import make_plan
from megalatent.passes.plan_options import apportion
from megalatent.passes.simulate import simulate

PAPER = {1: 0.75, 2: 0.22, 3: 0.03}
HARSH = {1: 0.34, 2: 0.33, 3: 0.33}


def sizes(stages: int) -> list[int]:
    several = {stages, stages + 1, stages + stages // 2, 2 * stages - 1, 2 * stages + 3, 4 * stages}
    return sorted(several)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7, 8, 11, 13, 16])
def test_uniform_passes_meet_the_bound_exactly(stages, passes):
    for micro_batches in sizes(stages):
        plan = make_plan(stages, 1, (passes,) * micro_batches)
        found = simulate(plan)
        assert found.makespan == (passes * micro_batches + stages - 1) * 3, micro_batches
        group = -(-micro_batches // (micro_batches // stages))
        assert group < 2 * stages
        if passes == 1:
            assert found.peak_in_flight == tuple(stages - rank for rank in range(stages))
        else:
            # Half as much for the way between the stages as interleaved 1F1B usually has.
            assert max(found.peak_in_flight) <= (passes - 1) * group + stages


@pytest.mark.parametrize("mixture", [PAPER, HARSH], ids=["3/22/75", "34/33/33"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 13, 16])
def test_mixed_passes_meet_the_bound(stages, mixture):
    for micro_batches in (2 * stages, 2 * stages + 1, 3 * stages, 4 * stages + 1):
        passes = apportion(mixture, micro_batches)
        found = simulate(make_plan(stages, 1, passes))
        bound = (sum(passes) + stages - 1) * 3
        assert found.makespan <= 1.02 * bound, micro_batches
        # The chain of the deepest micro-batch fills the ring at most max K times.
        assert max(found.peak_in_flight) <= max(passes) * 2 * stages


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_heavy_head_keeps_the_last_stage_busy(passes):
    """A head of 1.4 stages: the last stage's work, plus fill and drain, is all the time."""
    costs = Costs(head=1.4 * 3)
    found = simulate(make_plan(8, 1, (passes,) * 32, costs=costs), costs)
    bound = 32 * passes * (3 + 4.2) + 7 * 3
    assert lower_bound(8, 1, (passes,) * 32, costs) == pytest.approx(bound)
    assert found.makespan <= 1.03 * bound
    assert max(found.peak_in_flight) <= 8 * (passes + 1)


@pytest.mark.parametrize(("chunks", "stages"), [(2, 4), (3, 3), (4, 2)])
@pytest.mark.parametrize("passes", [1, 2])
def test_virtual_chunks_meet_the_bound(chunks, stages, passes):
    for micro_batches in (stages, stages + 1, 3 * stages - 1):
        found = simulate(make_plan(stages, chunks, (passes,) * micro_batches))
        assert found.makespan == (chunks * passes * micro_batches + stages - 1) * 3


@pytest.mark.parametrize(("micro_batches", "passes"), [(1, 3), (2, 2), (3, 3), (5, 2), (7, 1)])
def test_fewer_micro_batches_than_stages(micro_batches, passes):
    """Then the chain of a micro-batch decides, and the others turn round on the last stage."""
    ks = (passes,) * micro_batches
    found = simulate(make_plan(8, 1, ks))
    bound = max(8 * passes + micro_batches - 1, passes * micro_batches + 7) * 3
    assert lower_bound(8, 1, ks) == bound
    assert found.makespan == bound


def test_a_cap_costs_little_until_it_is_tight():
    free = simulate(make_plan(8, 1, (3,) * 32))
    assert max(free.peak_in_flight) == 24
    times = [
        simulate(make_plan(8, 1, (3,) * 32, max_in_flight=cap)).makespan for cap in (24, 22, 18)
    ]
    assert times[0] == free.makespan
    assert times[1] <= 1.06 * free.makespan
    assert times[2] <= 1.20 * free.makespan


@pytest.mark.parametrize("passes", [(1,), (1, 1, 1), (2, 1), (3, 2, 1, 1), (3,) * 5, (2,) * 9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_flush_makespan_closed_form(stages, passes):
    counts = [sum(k >= own for k in passes) for own in range(1, max(passes) + 1)]
    expected = sum((count + stages - 1) * 3 for count in counts)
    assert flush_makespan(stages, 1, passes) == expected


def test_flush_with_unequal_stages_and_hand_overs():
    """One micro-batch, two passes, two stages, by hand."""
    costs = Costs(forward=(1.0, 2.0), backward=(3.0, 4.0), head=5.0, hand_over=(0.5, 0.25))
    # The state goes round the ring while the head runs.
    forward = 2 * (1 + 0.5 + 2 + 5)
    backward = (4 + 0.5 + 3 + 0.25) + (4 + 0.5 + 3)
    assert flush_makespan(2, 1, (2,), costs) == pytest.approx(forward + backward)


def shortest(stages: int, passes: tuple[int, ...], forward: float, backward: float) -> float:
    """The best makespan of all schedules, by trying every order (micro-batches are chains)."""
    chains = []
    for count in passes:
        visits = [rank for _ in range(count) for rank in range(stages)]
        chains.append([(r, forward) for r in visits] + [(r, backward) for r in reversed(visits)])
    best = float("inf")

    def extend(at: tuple[int, ...], ends: tuple[float, ...], free: tuple[float, ...]) -> None:
        nonlocal best
        if max(free) >= best:
            return
        left = False
        for i, steps in enumerate(chains):
            if at[i] == len(steps):
                continue
            left = True
            rank, time = steps[at[i]]
            end = max(ends[i], free[rank]) + time
            extend(
                (*at[:i], at[i] + 1, *at[i + 1 :]),
                (*ends[:i], end, *ends[i + 1 :]),
                (*free[:rank], end, *free[rank + 1 :]),
            )
        if not left:
            best = min(best, max(free))

    zeros = (0.0,) * len(passes)
    extend((0,) * len(passes), zeros, (0.0,) * stages)
    return best


@pytest.mark.parametrize(
    ("stages", "passes"), [(2, (1, 1)), (2, (2, 1)), (2, (2, 2)), (3, (1, 1)), (2, (1, 1, 1))]
)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (3.0, 2.0)])
def test_bound_and_plan_enclose_the_optimum(stages, passes, forward, backward):
    costs = Costs(forward=forward, backward=backward)
    optimum = shortest(stages, passes, forward, backward)
    assert lower_bound(stages, 1, passes, costs) <= optimum + 1e-9
    assert simulate(make_plan(stages, 1, passes, costs=costs), costs).makespan == pytest.approx(
        optimum
    )


def test_bound_under_a_cap():
    """With room for one micro-batch the steps follow each other."""
    for passes, cap in itertools.product((1, 2), (1, 2)):
        if cap < passes:
            continue
        bound = lower_bound(4, 1, (passes,) * 6, max_in_flight=cap)
        plan = make_plan(4, 1, (passes,) * 6, max_in_flight=cap)
        assert max(simulate(plan).peak_in_flight) <= cap
        assert simulate(plan).makespan >= bound
    assert lower_bound(4, 1, (1,) * 6, max_in_flight=1) == 6 * 4 * 3
