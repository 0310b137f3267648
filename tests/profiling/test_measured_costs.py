"""Measured costs for the planner: what is noise counts as nothing, what is more counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megalatent.passes.costs import Costs
from megalatent.profiling.measured_costs import cheaper_passes, measure
from megalatent.profiling.records import Recording, Step
from tests.profiling.synthetic import recording

ALIKE = Costs(forward=1.0, backward=2.0, head=0.5)


def jittered(made: Recording, deviation: float) -> Recording:
    """Every action ends earlier or later than it did, each by chance of its own."""
    draws = random.Random(3)

    def moved(step: Step) -> Step:
        ranks = tuple(
            replace(
                rank,
                spans=tuple(
                    span._replace(
                        end=span.start
                        + round(span.nanoseconds * max(0.1, draws.gauss(1, deviation)))
                    )
                    for span in rank.spans
                ),
            )
            for rank in step.ranks
        )
        return replace(step, ranks=ranks)

    cases = tuple(replace(case, steps=tuple(map(moved, case.steps))) for case in made.cases)
    return replace(made, cases=cases)


def extras(costs: Costs) -> list[float]:
    assert isinstance(costs.extra_forward, tuple)
    assert isinstance(costs.extra_backward, tuple)
    return [*costs.extra_forward, *costs.extra_backward]


def test_noise_is_no_extra_work() -> None:
    """Passes that cost the same are written as such, although no two medians are equal."""
    made = jittered(recording(((1,) * 8, (2,) * 8), costs=ALIKE, steps=6), 0.05)
    measured = measure(made)
    typical = {
        measured.visits[stage, 0, "F", 2] - measured.visits[stage, 0, "F", 1] for stage in range(4)
    }
    assert min(typical) < 0 < max(typical)
    assert extras(measured.costs()) == [0.0] * 8
    assert cheaper_passes(measured.costs()) == []


@pytest.mark.parametrize("extra", [0.3, -0.3])
def test_what_is_more_than_noise_counts(extra: float) -> None:
    true = replace(ALIKE, extra_forward=extra, extra_backward=2 * extra)
    made = jittered(recording(((1,) * 8, (2,) * 8), costs=true, steps=6), 0.05)
    costs = measure(made).costs()
    expected = [extra * 1e-3] * 4 + [2 * extra * 1e-3] * 4
    assert extras(costs) == pytest.approx(expected, rel=0.15)
    said = cheaper_passes(costs)
    assert len(said) == (2 if extra < 0 else 0)
    assert all("take less than in pass 1" in line for line in said)
