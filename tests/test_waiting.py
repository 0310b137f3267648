"""What the tests wait with: it ends, and it does not make a wrong result right."""

from __future__ import annotations

import pytest

from tests.waiting import patiently, reserve_ports, wait_until


def test_patience_has_an_end() -> None:
    seen: list[float] = []

    def check(factor: float, least: float) -> None:
        seen.append(factor)
        assert factor >= least

    patiently(lambda factor: check(factor, 3), (1, 3, 9))
    assert seen == [1, 3]
    with pytest.raises(AssertionError):
        patiently(lambda factor: check(factor, 10), (1, 3, 9))
    assert seen == [1, 3, 1, 3, 9]


def test_waiting_gives_the_value_or_says_what_for() -> None:
    answers = iter([0, None, "it"])
    assert wait_until("an answer", lambda: next(answers)) == "it"
    with pytest.raises(TimeoutError, match="the moon: not within 0 s"):
        wait_until("the moon", lambda: False, seconds=0)


def test_ports_are_reserved_before_anybody_listens() -> None:
    first, second = reserve_ports(2), reserve_ports(150)
    assert not set(range(first, first + 2)) & set(range(second, second + 150))
