"""The file of the HTML page: it holds what was recorded, and everything that it needs."""

from __future__ import annotations

import base64
import json
import re
import tomllib
from array import array
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from megalatent.passes.costs import Costs
from megalatent.passes.simulate import simulate
from megalatent.profiling.html import render_html
from megalatent.profiling.page_data import CATEGORIES
from megalatent.profiling.records import PARTS
from tests.profiling.synthetic import STAGES, UNIT, large_plan, recorded_steps, recording


def page_data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="profile-data">(.*?)</script>', html)
    assert found is not None
    return json.loads(found[1])


def column(text: str, code: str) -> list[int]:
    numbers = array(code)
    numbers.frombytes(base64.b64decode(text))
    return numbers.tolist()


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_page_holds_what_was_recorded(replicas: int) -> None:
    recorded = recording(((3, 1, 2, 1),), steps=2, replicas=replicas, noise=0.1)
    data = page_data(render_html(recorded))
    assert len(data["steps"]) == 2
    assert sum("(typical)" in step["name"] for step in data["steps"]) == 1
    for packed, step in zip(data["steps"], recorded.cases[0].steps, strict=True):
        origin, tick = min(rank.start for rank in step.ranks), packed["tick_nanoseconds"]
        assert tick == 1
        spans = packed["measured"]
        read = zip(
            column(spans["category"], "B"),
            column(spans["of"], "B"),
            column(spans["pass"], "B"),
            column(spans["micro_batch"], "i"),
            column(spans["start"], "I"),
            column(spans["length"], "I"),
            strict=True,
        )
        rows = [
            (
                CATEGORIES[category].kind,
                CATEGORIES[of].kind if of != category else "",
                *(k, micro_batch, start + origin, start + length + origin),
            )
            for category, of, k, micro_batch, start, length in read
        ]
        expected = [
            (span.kind, span.of, span.k, span.micro_batch, span.start, span.end)
            for rank in step.ranks
            for span in sorted(rank.spans, key=lambda span: span.start)
            if span.kind not in PARTS
        ]
        assert rows == expected
        assert spans["counts"] == [
            sum(span.kind not in PARTS for span in rank.spans) for rank in step.ranks
        ]
        parts = sum(span.kind in PARTS for rank in step.ranks for span in rank.spans)
        assert len(spans["parts"]) == parts
        crossing = sum(4 * k - 1 for k in recorded.cases[0].plan.passes) * 2 * replicas
        for packed_spans in (spans, packed["plan"]):
            sources = column(packed_spans["source"], "i")
            assert sum(source >= 0 for source in sources) == crossing


def test_the_plan_is_the_simulation_with_measured_costs() -> None:
    """Recorded from a simulation, the plan beside it is that simulation again, to a rounding."""
    recorded = recording(((2,) * 8,), steps=3)
    (packed, *_) = page_data(render_html(recorded))["steps"]
    plan = recorded.cases[0].plan
    times = [span for rank in simulate(plan, STAGES).spans for span in rank]
    starts, lengths = (column(packed["plan"][name], "I") for name in ("start", "length"))
    for (begin, end), start, length in zip(times, starts, lengths, strict=True):
        assert start == pytest.approx(begin * UNIT, abs=100)
        assert length == pytest.approx((end - begin) * UNIT, abs=100)


def test_long_steps_have_coarser_ticks() -> None:
    recorded = recorded_steps([(large_plan(2, 2, 1), Costs(forward=4000.0))], steps=1)
    (packed,) = page_data(render_html(recorded))["steps"]
    step = recorded.cases[0].steps[0]
    length = max(rank.end for rank in step.ranks) - min(rank.start for rank in step.ranks)
    assert length > 2**32
    assert packed["tick_nanoseconds"] == -(-length // (2**32 - 1))
    assert packed["length"] == length // packed["tick_nanoseconds"] < 2**32


def test_a_page_leaves_steps_out_beyond_its_room() -> None:
    recorded = recording(((2,) * 4,), steps=5, noise=0.2)
    spans = max(sum(len(rank.spans) for rank in step.ranks) for step in recorded.cases[0].steps)
    data = page_data(render_html(recorded, most_spans=2 * spans))
    assert len(data["steps"]) == 2
    lengths = [
        max(rank.end for rank in step.ranks) - min(rank.start for rank in step.ranks)
        for step in recorded.cases[0].steps
    ]
    typical = [step for step in data["steps"] if "(typical)" in step["name"]]
    assert [step["length"] for step in typical] == [median(lengths)]
    assert "3 more steps of this case" in data["steps"][0]["findings"][-1]
    assert len(page_data(render_html(recorded, most_spans=1))["steps"]) == 1


def test_the_page_names_no_address_and_forbids_the_network() -> None:
    html = render_html(recording(steps=1))
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"//[^\n]*\n", "\n", html))
    assert "default-src 'none'" in html
    assert not re.search(r"<(link|script|img|iframe)[^>]*(src|href)=(?!\"data:,\")", html)


def test_nothing_recorded_is_no_page() -> None:
    recorded = recording(steps=1)
    empty = replace(recorded, cases=tuple(replace(case, steps=()) for case in recorded.cases))
    with pytest.raises(ValueError, match="no case has a step"):
        render_html(empty)


def test_what_the_page_is_made_of_is_installed() -> None:
    root = Path(__file__).resolve().parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    package = root / "megalatent" / "profiling"
    patterns = [*data["*"], *data["megalatent.profiling"]]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assets = set((package / "assets").iterdir())
    assert {path.suffix for path in assets} == {".html", ".css", ".js"}
    assert assets <= packed
