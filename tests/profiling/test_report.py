"""The report's figures against costs that are known: recordings made on paper, and from sleep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalatent.passes.bounds import lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.simulate import simulate
from megalatent.profiling.measure import rank_parts
from megalatent.profiling.measured_costs import measure
from megalatent.profiling.records import Activation, Recording
from megalatent.profiling.report import CaseReport, report
from tests.profiling import synthetic
from tests.profiling.synthetic import OPTIMIZER, REDUCE, STAGES, UNIT

MS = UNIT * 1e-9  # seconds of a unit of cost
COSTS = replace(
    STAGES, extra_forward=(0.0, 0.3, 0.0, 0.0), extra_backward=(0.4, 0.0, 0.0, 0.2), hand_over=0.3
)
PASSES = ((1,) * 6, (2,) * 6, (3, 2, 2, 1, 1, 1))


def made(**options: Any) -> Recording:
    found = synthetic.recording(PASSES, costs=COSTS, **options)
    stages, replicas = 4, options.get("replicas", 1)
    facts = {
        **found.facts,
        "stages": stages,
        "chunks": options.get("chunks", 1),
        "replicas": replicas,
        "world_size": stages * replicas,
        "num_layers": 8,
        "peak_flops": 1e9,
        "flops_per_token": [1e3, 2.2e3, 3.3e3],
    }
    return replace(found, facts=facts)


def outside(case: CaseReport) -> float:
    """Reduction and update on the rank that ends last."""
    return (REDUCE + OPTIMIZER) * 1e-9


@pytest.mark.parametrize("replicas", [1, 2])
def test_figures_are_the_costs(replicas: int) -> None:
    recording = made(replicas=replicas)
    for case, passes in zip(report(recording).cases, PASSES, strict=True):
        own = next(c for c in recording.cases if c.plan.passes == passes)
        simulated = simulate(own.plan, COSTS)
        for stage in case.stages:
            for p in stage.passes:
                forward = COSTS.forward_time(4, 1, stage.stage, 0, p.k) * MS
                backward = COSTS.backward_time(4, 1, stage.stage, 0, p.k) * MS
                assert p.forward_seconds == pytest.approx(forward, rel=1e-5)
                assert p.backward_seconds == pytest.approx(backward, rel=1e-5)
                one = COSTS.forward_time(4, 1, stage.stage, 0, 1)
                one += COSTS.backward_time(4, 1, stage.stage, 0, 1)
                over = (forward + backward) / MS / one - 1
                assert p.overhead_over_pass_1 == pytest.approx(over, abs=1e-5)
                assert p.head_seconds == pytest.approx(
                    COSTS.head * MS if stage.stage == 3 else 0.0, rel=1e-5
                )
                fused = stage.stage == 0 and p.k > 1
                fusion = (COSTS.fusion * MS, COSTS.fusion_backward * MS) if fused else (0, 0)
                assert p.fusion_seconds == pytest.approx(fusion[0], rel=1e-5)
                assert p.fusion_backward_seconds == pytest.approx(fusion[1], rel=1e-5)
            embedding = COSTS.embedding * MS if stage.stage == 0 else 0.0
            assert stage.embedding_seconds == pytest.approx(embedding, rel=1e-5)
            assert stage.work_seconds == pytest.approx(simulated.busy[stage.stage] * MS, rel=1e-5)
        assert case.pipeline_seconds == pytest.approx(simulated.makespan * MS, rel=1e-5)
        assert case.simulated_pipeline_seconds == pytest.approx(simulated.makespan * MS, rel=1e-5)
        bound = lower_bound(4, 1, passes, COSTS) * MS
        assert case.lower_bound_pipeline_seconds == pytest.approx(bound, rel=1e-5)
        assert case.step_seconds == pytest.approx(case.pipeline_seconds + outside(case), rel=1e-5)
        assert case.simulated_step_seconds == pytest.approx(case.step_seconds, rel=1e-5)
        assert case.bubble_fraction == pytest.approx(simulated.bubble_fraction, abs=1e-5)
        assert case.simulated_bubble_fraction == pytest.approx(simulated.bubble_fraction, abs=1e-5)
        assert case.slowest_stage == simulated.busy.index(max(simulated.busy))
        mean = sum(simulated.busy) / 4
        assert case.imbalance == pytest.approx(max(simulated.busy) / mean - 1, abs=1e-5)
        assert case.optimizer_seconds == pytest.approx(OPTIMIZER * 1e-9, rel=1e-5)
        tokens = 1024 * 6 * replicas / case.step_seconds
        assert case.tokens_per_second == pytest.approx(tokens, rel=1e-6)
        equivalent = tokens * sum(passes) / 6
        assert case.token_equivalent_tokens_per_second == pytest.approx(equivalent, rel=1e-6)
        operations = sum({1: 1e3, 2: 2.2e3, 3: 3.3e3, 4: 4.4e3}[k] for k in passes) / 6
        assert case.mfu == pytest.approx(tokens * operations / (4 * replicas * 1e9), rel=1e-6)
        assert len(case.ranks) == 4 * replicas
        for rank in case.ranks:
            busy = simulated.busy[rank.stage] / simulated.makespan
            assert rank.bubble_fraction == pytest.approx(1 - busy, abs=1e-5)
            assert sum(rank.parts.values()) == pytest.approx(rank.step_seconds, rel=1e-9)
            assert rank.in_flight == simulated.peak_in_flight[rank.stage]


def test_links_are_the_hand_overs() -> None:
    costs = replace(COSTS, hand_over=(0.1, 0.2, 0.3, 0.4))
    recording = synthetic.recording(((1,) * 6, (3,) * 3), costs=costs)
    recording.facts.update(replicas=1, num_layers=8, stages=4, chunks=1)
    shallow, deep = report(recording).cases
    assert [link.target for link in deep.links] == [1, 2, 3, 0]
    for link in deep.links:
        for seconds in (link.forward_seconds, link.backward_seconds):
            expected = (0.1, 0.2, 0.3, 0.4)[link.source] * MS
            assert seconds is None or seconds == pytest.approx(expected, rel=1e-4)
        assert link.seen > 0
    # With one pass nothing goes over the edge that closes the ring.
    assert shallow.links[3].seen == 0
    assert shallow.links[3].forward_seconds is None
    assert shallow.over_one_pass == pytest.approx(0.0)
    assert deep.over_one_pass == pytest.approx(deep.step_seconds / shallow.step_seconds - 1)


def test_virtual_chunks_add_up() -> None:
    recording = made(chunks=2)
    recording.facts["layers"] = [1, 2, 3, 4, 5, 6, 7, 8]
    deep = report(recording).cases[1]
    assert [stage.layers for stage in deep.stages] == [6, 8, 10, 12]
    second = deep.stages[1].passes[1]
    assert second.forward_seconds == pytest.approx(2 * (1.0 + 0.3) * MS, rel=1e-5)


def test_activations() -> None:
    kept = tuple(
        Activation(s, 0, k, 1000 + 100 * s + 500 * (k - 1)) for s in range(4) for k in (1, 2)
    )
    deep = report(replace(made(), activations=kept)).cases[1]
    first, second = deep.stages[2].passes
    assert (first.activation_bytes, second.activation_bytes) == (1200, 1700)
    assert second.activation_overhead_over_pass_1 == pytest.approx(1700 / 1200 - 1)
    assert deep.ranks[0].allocated_peak_bytes == 1010 + 10 * deep.ranks[0].in_flight


def test_costs_for_the_planner_repeat_the_measurement() -> None:
    recording = made()
    [case] = [c for c in recording.cases if c.plan.passes == PASSES[2]]
    costs = Costs.from_dict(measure(recording, [case]).costs().to_dict())
    measured = simulate(case.plan, costs).makespan
    assert measured == pytest.approx(simulate(case.plan, COSTS).makespan * MS, rel=0.01)
    assert costs.fusion == pytest.approx(COSTS.fusion * MS, rel=1e-4)
    assert costs.embedding_backward == pytest.approx(COSTS.embedding_backward * MS, rel=1e-4)
    assert costs.extra_forward == pytest.approx([0.0, 0.3 * MS, 0.0, 0.0], abs=1e-6)
    assert costs.extra_backward == pytest.approx([0.4 * MS, 0.0, 0.0, 0.2 * MS], abs=1e-6)


def test_parts_name_all_time_but_what_no_span_covers() -> None:
    recording = made()
    for rank in recording.cases[0].steps[0].ranks:
        parts = rank_parts(rank)
        # The synthetic ranks do nothing but actions, waits, reduction and update.
        assert parts["other"] == pytest.approx(0.0, abs=1e-9)
        assert parts["wait"] > 0
