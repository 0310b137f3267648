"""The whole way, from the executor to the report, on stages that sleep for known times.

The times are tens of milliseconds. What a machine adds to each stays small beside them; where it is
busy and it does not, a measurement is repeated with longer ones, to which it adds no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan, make_plan
from megalatent.passes.simulate import simulate
from megalatent.profiling.advice import advise
from megalatent.profiling.diagnose import diagnose
from megalatent.profiling.records import Recording
from megalatent.profiling.report import report
from tests.profiling.sleeping import PART, REDUCE, UPDATE, by_costs, makespan, record
from tests.waiting import patiently

UNEQUAL = Costs(
    forward=(0.03, 0.05, 0.03),
    backward=(0.06, 0.10, 0.06),
    head=0.04,
    extra_forward=(0.02, 0.0, 0.03),
    extra_backward=(0.0, 0.05, 0.04),
)
EVEN = Costs(forward=0.05, backward=0.1)


# A recording of the last size takes minutes.
LONGER = (1, 3, 10, 30, 60)


def times(costs: Costs, factor: float) -> Costs:
    """Each stage and part takes `factor` times as long."""

    def longer(value: Any) -> Any:
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

    return Costs(**{field.name: longer(getattr(costs, field.name)) for field in fields(costs)})


def recorded(cases: Sequence[tuple[int, ...]], costs: Costs, **options: object) -> Recording:
    stages = len(costs.forward) if isinstance(costs.forward, tuple) else 3
    plans = [make_plan(stages, 1, passes) for passes in cases]
    return record(plans, [by_costs(plan, costs) for plan in plans], **options)  # type: ignore[arg-type]


def test_unequal_stages_and_passes() -> None:
    def check(factor: float) -> None:
        costs = times(UNEQUAL, factor)
        made = recorded([(2, 2, 1, 1)], costs, parts=True, whole_step=True, steps=2, factor=factor)
        [case] = report(made).cases
        plan = made.cases[0].plan
        for stage in case.stages:
            for own in stage.passes:
                place = (3, 1, stage.stage, 0, own.k)
                assert own.forward_seconds == pytest.approx(costs.forward_time(*place), rel=0.03)
                assert own.backward_seconds == pytest.approx(costs.backward_time(*place), rel=0.03)
                if stage.stage == 2:
                    assert own.head_seconds == pytest.approx(costs.head, rel=0.03)
        first = case.stages[0]
        # A nap of 5 ms that is 0.3 ms late is 6% off.
        part = PART * factor
        assert first.embedding_seconds == pytest.approx(part, abs=0.1 * part)
        assert first.passes[1].fusion_seconds == pytest.approx(part, abs=0.1 * part)
        assert first.passes[1].fusion_backward_seconds == pytest.approx(part, abs=0.1 * part)
        assert case.pipeline_seconds == pytest.approx(makespan(plan, costs), rel=0.03)
        assert case.simulated_pipeline_seconds == pytest.approx(makespan(plan, costs), rel=0.03)
        outside = (REDUCE + UPDATE) * factor
        assert case.step_seconds == pytest.approx(makespan(plan, costs) + outside, rel=0.03)
        assert case.optimizer_seconds == pytest.approx(UPDATE * factor, abs=1e-3 * factor)
        truth = simulate(plan, costs)
        assert case.bubble_fraction == pytest.approx(truth.bubble_fraction, abs=0.02)
        assert case.simulated_bubble_fraction == pytest.approx(truth.bubble_fraction, abs=0.02)
        for rank in case.ranks:
            share = 1 - truth.busy[rank.stage] / truth.makespan
            assert rank.bubble_fraction == pytest.approx(share, abs=0.02)
            # Hardly any time is in no span at all.
            assert abs(rank.parts["other"]) < 0.01 * rank.step_seconds
            assert sum(rank.parts.values()) == pytest.approx(rank.step_seconds, rel=1e-9)

    patiently(check, LONGER)


def named(costs: Costs, **options: object) -> list[tuple[str, int | None]]:
    """What is called slow: (kind, stage or pass).

    With no more micro-batches than stages nothing hides the edge that closes the ring.
    """
    found = diagnose(report(recorded([(2,) * 3], costs, **options)))
    return [(f.kind, f.stage if f.k is None else f.k) for f in found]


@pytest.mark.full
def test_slow_stage_link_and_pass_are_named() -> None:
    slow_stage = Costs(forward=(0.05, 0.075, 0.05), backward=(0.1, 0.15, 0.1))
    slow_pass = replace(EVEN, extra_forward=0.025, extra_backward=0.05)

    def check(
        costs: Costs, expected: list[tuple[str, int]], links: dict[int, float] | None = None
    ) -> None:
        def with_times(factor: float) -> None:
            slow = {edge: seconds * factor for edge, seconds in (links or {}).items()}
            assert named(times(costs, factor), links=slow) == expected

        patiently(with_times, LONGER)

    check(slow_stage, [("stage", 1)])
    check(EVEN, [("link", 0)], links={0: 0.03})
    check(EVEN, [("link", 2)], links={2: 0.03})
    check(slow_pass, [("pass", 2)])
    check(EVEN, [])


def layered(layers: Sequence[int], recompute: bool = False) -> Costs:
    """Stages whose layers sleep 15 ms forward and 30 ms back; the head is two layers' forward."""
    forward = tuple(0.015 * n for n in layers)
    extra = forward if recompute else (0.0,) * len(layers)
    return Costs(
        forward=forward, backward=tuple(2 * f for f in forward), extra_backward=extra, head=0.03
    )


@pytest.mark.full
def test_predicted_steps_are_then_measured() -> None:
    """Four other settings: micro-batches, virtual chunks, layers, recomputation."""
    facts = {
        "num_layers": 6,
        "layers": [2, 2, 2],
        "micro_batch_size": 1,
        "global_batch_size": 6,
        "recompute": "never",
    }

    def step(plan: Plan, own: Costs) -> float:
        [case] = report(record([plan], [by_costs(plan, own)], steps=2)).cases
        return case.step_seconds

    def check(factor: float) -> None:
        costs = times(layered((2, 2, 2)), factor)
        advice = advise(recorded([(2,) * 6], costs, facts=facts))
        options = {option.name: option for option in advice.options}
        split = next(name for name in options if name.startswith("layers"))
        layers = tuple(map(int, split.split()[1:]))
        again = layered((2, 2, 2), recompute=True)
        for name, plan, own in (
            ("12 micro-batches", make_plan(3, 1, (2,) * 12), costs),
            ("2 chunks a stage", make_plan(3, 2, (2,) * 6), times(layered((1,) * 6), factor)),
            (split, make_plan(3, 1, (2,) * 6), times(layered(layers), factor)),
            ("recompute extra", make_plan(3, 1, (2,) * 6), times(again, factor)),
        ):
            predicted = options[name].predicted_step_seconds
            assert predicted == pytest.approx(step(plan, own), rel=0.08), name

    patiently(check, LONGER)
