"""A deliberately slow stage, link or pass is named as such, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalatent.passes.costs import Costs
from megalatent.profiling.diagnose import Finding, diagnose
from megalatent.profiling.report import report
from tests.profiling import synthetic

EVEN = Costs(forward=1.0, backward=2.0, head=0.05, hand_over=0.02, embedding=0.02, fusion=0.02)


def findings(
    costs: Costs, layers: tuple[int, ...] = (2, 2, 2, 2), micro_batches: int = 8, **more: str
) -> list[Finding]:
    cases = ((1,) * micro_batches, (3,) * micro_batches)
    made = synthetic.recording(cases, costs=costs, noise=0.005)
    facts = {"replicas": 1, "layers": list(layers), "num_layers": sum(layers), **more}
    return diagnose(report(replace(made, facts={**made.facts, **facts})))


def test_even_stages_are_not_accused() -> None:
    assert findings(EVEN) == []


@pytest.mark.parametrize("slow", range(4))
def test_slow_stage(slow: int) -> None:
    forward = tuple(1.3 if stage == slow else 1.0 for stage in range(4))
    backward = tuple(2 * f for f in forward)
    [found] = findings(replace(EVEN, forward=forward, backward=backward))
    assert (found.kind, found.stage) == ("stage", slow)
    assert found.factor == pytest.approx(1.3, rel=0.03)
    assert f"stage {slow} is slow" in found.text
    assert "look at its device" in found.text


def test_stage_with_more_layers_and_stage_with_the_head() -> None:
    costs = replace(EVEN, forward=(1.5, 1.0, 1.0, 1.0), backward=(3.0, 2.0, 2.0, 2.0))
    [found] = findings(costs, layers=(3, 2, 2, 2))
    assert (found.stage, "it has 3 layers, the others 2" in found.text) == (0, True)
    [found] = findings(replace(EVEN, head=1.5))
    assert (found.stage, "the head takes 33% of its time" in found.text) == (3, True)


@pytest.mark.parametrize("slow", range(4))
def test_slow_link(slow: int) -> None:
    hops = tuple(0.5 if edge == slow else 0.02 for edge in range(4))
    # With no more micro-batches than stages, nothing hides the edge that closes the ring.
    [found] = findings(replace(EVEN, hand_over=hops), micro_batches=4)
    assert (found.kind, found.stage) == ("link", slow)
    assert f"from stage {slow} to stage {(slow + 1) % 4} is slow" in found.text
    assert "50% of a forward" in found.text


def test_all_links_slow() -> None:
    [found] = findings(replace(EVEN, hand_over=0.4))
    assert (found.kind, found.stage) == ("link", None)


def test_slow_passes_and_where() -> None:
    found = findings(replace(EVEN, extra_forward=0.3, extra_backward=0.6))
    assert [(f.kind, f.k) for f in found] == [("pass", 2), ("pass", 3)]
    assert found[0].factor == pytest.approx(1.3, rel=0.02)
    assert "30% longer than pass 1" in found[0].text
    assert "recomputes" not in found[0].text
    found = findings(replace(EVEN, extra_backward=1.0), recompute="extra")
    assert "it recomputes its activations, which pass 1 does not" in found[0].text
    found = findings(replace(EVEN, fusion=1.0, fusion_backward=1.0))
    passes = [f for f in found if f.kind == "pass"]
    assert [f.k for f in passes] == [2, 3]
    assert "almost all of it on stage 0, where the fusion is" in passes[0].text
