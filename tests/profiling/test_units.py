"""Figures as people read them: with digits, in a unit that fits, and never cut off."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from megalatent.profiling.advice import advise
from megalatent.profiling.diagnose import diagnose
from megalatent.profiling.records import Recording
from megalatent.profiling.report import report
from megalatent.profiling.tables import print_profile
from megalatent.profiling.units import bytes_text, share_text, time_text
from tests.profiling.synthetic import recording
from tests.profiling.test_advice import recorded


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (3e-9, "0.003 µs"),
        (0.00099996, "1 ms"),
        (0.0123456, "12.35 ms"),
        (0.999996, "1 s"),
        (-0.25, "-250 ms"),
        (12345.6, "12346 s"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (6_571_000, "6.267 MiB"),
        (-3 * 2**20, "-3 MiB"),
        (80 * 2**30, "80 GiB"),
        (20_000 * 2**30, "20000 GiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_shares() -> None:
    assert share_text(-1e-9) == "0.0%"
    assert share_text(-1e-9, signed=True) == "+0.0%"
    assert share_text(0.1234, signed=True) == "+12.3%"
    assert share_text(-0.02) == "-2.0%"


def shown(made: Recording, stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    figures = report(made)
    print_profile(figures, diagnose(figures), advise(made), stream)
    return stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_figure_is_cut_off_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "dumb")
    assert "…" not in shown(recorded(), Terminal())


def test_short_steps_show_digits() -> None:
    """A step of half a millisecond has parts of microseconds."""
    made = recording(((1,) * 4, (2,) * 4), slower=0.001)
    known = {"replicas": 1, "num_layers": 8}
    text = shown(replace(made, facts={**made.facts, **known}))
    ranks = text.split("where a step goes")[1].split("hand-overs")[0].splitlines()
    rows = [line.split() for line in ranks if line[:2].strip().isdigit()]
    assert len(rows) == 4
    for _, _, step, forward, backward, *_ in rows:
        assert float(step) > float(backward) > float(forward) > 0
