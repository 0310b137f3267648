"""Two profiles beside each other: real differences are named, and noise is not taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.profiling.compare import (
    Comparison,
    Difference,
    Figure,
    compare,
    compare_files,
    table,
    to_json,
)
from megalatent.profiling.records import SCHEMA, VERSION, Recording
from tests.profiling.synthetic import OPTIMIZER, STAGES, UNIT, recording

CASE = "K = 2"


def made(*, costs: Costs = STAGES, steps: int = 8, **options) -> Recording:
    return recording(((2,) * 6,), costs=costs, steps=steps, **options)


def by_figure(comparison: Comparison) -> dict[Figure, Difference]:
    found = {item.figure: item for item in comparison.differences}
    assert len(found) == len(comparison.differences)
    return found


def test_a_profile_differs_nowhere_from_itself() -> None:
    one = made(noise=0.02)
    found = compare(one, one)
    assert {item.verdict for item in found.differences} == {"within noise"}
    assert all(item.change == 0 for item in found.differences)
    assert found.remarks == ("K = 2: 8 steps before, 8 after",)


def test_figures_are_those_of_the_spans() -> None:
    one = made(noise=0.05, seed=4)
    found = by_figure(compare(one, one))
    per_step = []
    for step in one.cases[0].steps:
        spans = [s for s in step.ranks[1].spans if (s.kind, s.k) == ("B", 2)]
        per_step.append(median(span.end - span.start for span in spans) / 1e9)
    assert found[Figure("backward", 1, None, 2)].before == pytest.approx(median(per_step))
    assert found[Figure("optimizer", 3)].before == pytest.approx(OPTIMIZER / 1e9)
    # Stage 0: pass 2 has the fusion where pass 1 has the embedding.
    first = 1.0 + STAGES.embedding + 2.0 + STAGES.embedding_backward
    second = 1.0 + STAGES.fusion + 2.0 + STAGES.fusion_backward
    overhead = found[Figure("overhead over pass 1", 0, None, 2)].before
    assert overhead == pytest.approx(second / first - 1, abs=1e-5)
    assert found[Figure("overhead over pass 1", 2, None, 2)].before == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_not_taken_for_a_difference(seed: int) -> None:
    """All times of a step share one random factor, so all figures exceed their noise, or few."""
    found = compare(made(noise=0.03, seed=10 + seed), made(noise=0.03, seed=110 + seed))
    steps = by_figure(found)[Figure("step")]
    assert steps.noise is not None
    # 3% of the step: the noise is of the size of two standard errors of medians of 8.
    assert 0.01 < steps.noise / steps.before < 0.12
    assert steps.verdict == "within noise"


def test_one_slower_backward_is_found_and_nothing_else_of_its_kind() -> None:
    assert isinstance(STAGES.backward, tuple)
    slow = replace(STAGES, backward=(2.0, 2.1, 3.4, 1.8))
    one, two = made(noise=0.01), made(costs=slow, noise=0.01, seed=9)
    found = by_figure(compare(one, two))
    for figure, item in found.items():
        if figure.name in ("forward", "backward", "head", "fusion", "embedding"):
            slower = figure.name == "backward" and figure.stage == 2
            assert (item.verdict == "slower") == slower, item
    # Each of 6 micro-batches and 2 passes takes 1 unit more on the slowest stage.
    assert found[Figure("step")].change > 10 * UNIT / 1e9
    assert found[Figure("step")].verdict == "slower"
    assert found[Figure("backward", 2, None, 1)].change == pytest.approx(UNIT / 1e9, rel=0.1)
    back = by_figure(compare(two, one))
    assert back[Figure("step")].verdict == "faster"
    assert back[Figure("bubble", 3)].verdict == "less"


def test_the_noise_shrinks_with_the_number_of_steps() -> None:
    def noise(steps: int) -> float:
        found = compare(made(noise=0.03, steps=steps), made(noise=0.03, steps=steps, seed=2))
        value = by_figure(found)[Figure("step")].noise
        assert value is not None
        return value

    # Four times the steps: half the error, and a smaller factor of Student's.
    assert 1.4 < noise(6) / noise(24) < 4


def test_with_one_step_nobody_knows_the_noise() -> None:
    found = compare(made(steps=1), made(steps=1, slower=2.0))
    assert {item.noise for item in found.differences} == {None}
    assert {item.verdict for item in found.differences} == {"noise unknown"}
    assert "?" in table(found)


def test_remarks_name_what_cannot_be_compared() -> None:
    one = recording(((1,) * 4, (2,) * 4), steps=2)
    two = recording(((2,) * 4, (3,) * 4), steps=2)
    two = replace(two, facts={**two.facts, "tokens_per_micro_batch": 2048, "fusion": "gated"})
    found = compare(one, two)
    assert {item.case for item in found.differences} == {"K = 2"}
    assert list(found.remarks) == [
        "tokens_per_micro_batch: 1024 before, 2048 after",
        "fusion: nothing before, gated after",
        "only before: case K = 1",
        "only after: case K = 3",
        "K = 2: 2 steps before, 2 after",
    ]
    # The fifth stage: 2 forwards, backwards and heads, overhead, wait, bubble, reduce, optimizer.
    fewer, more = (recording(((2,) * 4,), steps=2, stages=n, costs=Costs()) for n in (4, 5))
    remarks = compare(fewer, more).remarks
    assert "K = 2: only before: 2 figures, such as head, pass 1, stage 3" in remarks
    assert "K = 2: only after: 11 figures, such as backward, pass 1, stage 4" in remarks


def test_nothing_in_common_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="cases K = 1, the other K = 2; profile the same"):
        compare(recording(((1, 1),)), recording(((2, 2),)))


def test_the_table() -> None:
    slow = replace(STAGES, head=2.0)
    text = table(compare(made(), made(costs=slow)), every=True)
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("head, pass 1, stage 3"))
    assert head.split() == "head, pass 1, stage 3 700 µs 2 ms +1.3 ms +185.7% ±0 µs slower".split()
    assert max(map(len, lines)) <= 118
    # A long table names what is above noise, and how much it leaves out.
    one = recording(((2,) * 2,), stages=12, costs=Costs(), steps=2)
    two = recording(((2,) * 2,), stages=12, costs=Costs(head=0.5), steps=2)
    found = compare(one, two)
    short, whole = table(found), table(found, every=True)
    quiet = [
        d for d in found.differences if d.verdict == "within noise" and d.figure.stage is not None
    ]
    assert f"and {len(quiet)} figures of stages, all within noise" in short
    assert len(whole.splitlines()) - len(short.splitlines()) == len(quiet) - 1
    assert "head, pass 2, stage 11" in short


def write(path: Path, recorded: Recording) -> Path:
    profile = {"schema": SCHEMA, "version": VERSION, "report": {}, "recording": recorded.to_dict()}
    path.write_text(json.dumps(profile))
    return path


def test_files(tmp_path: Path) -> None:
    one, two = made(noise=0.01), made(noise=0.01, slower=1.5)
    found = compare_files(write(tmp_path / "a.json", one), write(tmp_path / "b.json", two))
    assert found == compare(one, two)
    values = json.loads(json.dumps(to_json(found)))
    step = values["differences"][0]
    assert (step["name"], step["unit"], step["verdict"]) == ("step", "seconds", "slower")
    assert step["after"] / step["before"] == pytest.approx(1.5, rel=0.05)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(UserError, match=r"c\.json: no profile"):
        compare_files(tmp_path / "a.json", tmp_path / "c.json")
