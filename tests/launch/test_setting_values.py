"""What settings may be, beside what `test_submit` refuses."""

from __future__ import annotations

import os

import pytest

from megalatent.launch.setting_values import (
    array_tasks,
    minutes_of,
    option_lines,
    path,
)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0-3", [0, 1, 2, 3]), ("7,0-4:2,2%2", [0, 2, 4, 7]), ("5", [5]), ("3-3", [3])],
)
def test_array_tasks(text: str, tasks: list[int]) -> None:
    assert array_tasks(text) == tasks


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30:00", 90), ("2-00", 2880), ("1:30", 1.5), ("1-2:03:30", 1563.5)],
)
def test_times(text: str, minutes: float) -> None:
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["0", "unlimited", "-5", "", "1-", "٣٠"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        minutes_of(text)


def test_options_stay_one_line_each() -> None:
    given = "--exclusive -w node[0-1]\n--comment='two words; $(x)' -D a b"
    assert option_lines(given) == [
        "--exclusive",
        "-w 'node[0-1]'",
        "'--comment=two words; $(x)'",
        "-D a b",
    ]


def test_a_home_that_the_shell_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert path("~/venv") == os.path.join("/home/me", "venv")
