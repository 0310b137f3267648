"""The cache of plans: by multiset, ahead of time, the same on every rank."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter

import pytest

from megalatent.errors import UserError
from megalatent.passes import plan as plan_module
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Planner, make_plan
from megalatent.passes.simulate import simulate
from megalatent.passes.validate import validate


def test_plans_once_for_each_multiset(monkeypatch):
    made = []
    original = plan_module.make_plan
    monkeypatch.setattr(
        plan_module, "make_plan", lambda *a, **k: made.append(a) or original(*a, **k)
    )
    planner = Planner(4, 1, costs=Costs(head=0.5), max_in_flight=20)
    passes = (1, 2, 1, 3, 1, 1, 2, 1)
    first = planner.get(passes)
    second = planner.get(passes[::-1])
    assert len(made) == 1
    for got, wanted in ((first, passes), (second, passes[::-1])):
        assert got.passes == wanted
        validate(got, max_in_flight=20)
        assert Counter(wanted) == Counter(got.passes)
    assert simulate(first).makespan == simulate(second).makespan
    assert first == make_plan(4, 1, passes, costs=Costs(head=0.5), max_in_flight=20)
    evaluation = planner.get(passes, forward_only=True)
    assert evaluation.forward_only
    assert len(made) == 2
    planner.close()


def test_prefetch_plans_in_another_thread(monkeypatch):
    threads = []
    original = plan_module.make_plan

    def recorded(*args, **kwargs):
        threads.append(threading.current_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(plan_module, "make_plan", recorded)
    planner = Planner(2)
    planner.prefetch((2, 1))
    assert planner.get((1, 2)).passes == (1, 2)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    planner.close()


def test_keeps_only_the_latest(monkeypatch):
    made = []
    original = plan_module.make_plan
    monkeypatch.setattr(
        plan_module, "make_plan", lambda *a, **k: made.append(a[2]) or original(*a, **k)
    )
    planner = Planner(2, keep=2)
    for passes in ((1,), (2,), (3,), (3,), (2,), (1,)):
        planner.get(passes)
    assert made == [(1,), (2,), (3,), (1,)]
    planner.close()


def test_errors_of_a_prefetched_plan_come_from_get():
    planner = Planner(2, max_in_flight=2)
    planner.prefetch((3, 1))
    with pytest.raises(UserError, match="give at least 3"):
        planner.get((3, 1))
    planner.close()


def test_every_process_makes_the_same_plan():
    """Ranks plan on their own: hash seeds and timing must not matter."""
    code = (
        "from megalatent.passes.plan import make_plan, Costs;"
        "import hashlib;"
        "p = make_plan(4, 2, (1, 3, 2, 1, 1, 2), costs=Costs(head=1.7, hand_over=0.1,"
        " forward=(1.0, 1.2, 0.9, 1.1)), max_in_flight=20);"
        "print(hashlib.sha256(repr(p).encode()).hexdigest())"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, (1,)), "stages is 0"),
        ((1, 0, (1,)), "chunks is 0"),
        ((1, 1, ()), "no micro-batches"),
        ((2, 1, (1, 0)), "micro-batch 1 has 0 passes"),
        ((100, 10, (10,) * 1000), "plan a smaller step"),
    ],
)
def test_numbers_out_of_range(arguments, message):
    with pytest.raises(UserError, match=message):
        make_plan(*arguments)


def test_too_small_a_cap_names_the_least():
    with pytest.raises(UserError, match=r"max_in_flight is 5.*at least 6"):
        make_plan(4, 2, (1, 3), max_in_flight=5)
    validate(make_plan(4, 2, (1, 3), max_in_flight=6), max_in_flight=6)
    # An evaluation step holds nothing.
    assert make_plan(4, 2, (1, 3), max_in_flight=1, forward_only=True).forward_only
