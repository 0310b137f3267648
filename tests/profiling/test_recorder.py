"""A recorder makes spans, memory samples and byte counts of what it hears; off, it is not there."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megalatent.passes.channels import Ring
from megalatent.passes.execute import Executor
from megalatent.passes.plan import Action, make_plan
from megalatent.profiling.clock import CpuClock
from megalatent.profiling.memory import KeptTensors
from megalatent.profiling.recorder import KeptCounter, StepRecorder
from megalatent.profiling.records import Span
from megalatent.profiling.run import join_cases
from tests.passes.standin import HAND_OVER, StandIn

F, B = Action("F", 0, 1, 0), Action("B", 0, 1, 0)


class Ticks(CpuClock):
    """A clock that shows 0, 10, 20, …"""

    def __init__(self) -> None:
        ticks = count(0, 10)
        self.mark = lambda: next(ticks)


class Meter:
    kind = "allocated"

    def __init__(self) -> None:
        self.calls = count(1)

    def read(self) -> tuple[int, int]:
        call = next(self.calls)
        return 100 * call, 100 * call + 7


def test_spans_parts_and_memory() -> None:
    recorder = StepRecorder(Ticks(), Meter())
    recorder.step_begins(4)
    recorder.begin("F", F)
    recorder.begin("embedding", F)
    recorder.end("embedding", F)
    recorder.end("F", F)
    recorder.begin("wait", B)
    recorder.end("wait", B)
    recorder.begin("B", B)
    recorder.end("B", B)
    recorder.begin("reduce")
    recorder.end("reduce")
    recorder.step_ends(make_plan(1, 1, (1,)))
    [(iteration, _, step)] = recorder.finish(lambda time: time + 1000)
    assert iteration == 4
    assert (step.start, step.end) == (1000, 1110)
    assert step.spans == (
        Span("embedding", 1020, 1030, 0, 1, 0, "F"),
        Span("F", 1010, 1040, 0, 1, 0),
        Span("wait", 1050, 1060, 0, 1, 0, "B"),
        Span("B", 1070, 1080, 0, 1, 0),
        Span("reduce", 1090, 1100),
    )
    assert step.spans[2].action == B
    assert step.spans[4].action is None
    # One sample as the step begins, then one at the end of each action.
    assert [tuple(sample) for sample in step.memory] == [
        (1000, 100, 100, 0),
        (1040, 200, 207, 1),
        (1080, 300, 307, 0),
    ]


def test_steps_that_did_not_follow_their_plan_are_left_out() -> None:
    plan = make_plan(1, 1, (1, 1))
    recorder = StepRecorder(Ticks())
    for extra in (False, True):
        recorder.step_begins(int(extra))
        for action in (*plan.actions[0], *(plan.actions[0][:1] if extra else ())):
            recorder.begin(action.kind, action)
            recorder.end(action.kind, action)
        recorder.step_ends(plan)
    [case] = join_cases([0], [recorder.finish(lambda time: time)], costs=None)  # type: ignore[arg-type]
    assert [step.iteration for step in case.steps] == [0]


def test_kept_bytes_are_those_of_activations() -> None:
    """x * w keeps x and w; sin keeps its input; a view of x is x. Weights do not count."""
    x = torch.ones(8, 4, requires_grad=True)
    w = torch.nn.Parameter(torch.ones(4))
    counter = KeptCounter(KeptTensors([w]))
    with counter.kept(F):
        product = x * w
        out = product.sin() + x.view(4, 8).reshape(8, 4).cos()
    counter.end("F", F)
    assert counter.bytes == {(0, 1): (8 * 4 + 8 * 4) * 4}  # x and product, fp32
    out.sum().backward()
    assert x.grad is not None
    # The most that any visit of the pass kept.
    with counter.kept(F._replace(micro_batch=1)):
        x.cos()
    counter.end("F", F)
    assert counter.bytes == {(0, 1): 256}


def _calls(recorder: Any) -> dict[str, int]:
    """Calls of Python and C functions while a rank executes a plan, by name."""
    plan = make_plan(1, 1, (2, 1, 3))
    executor, program = Executor(Ring(0, 1, 0, 0), recorder=recorder), StandIn(plan, 0)
    found: dict[str, int] = {}

    def see(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            name = argument.__qualname__ if event == "c_call" else frame.f_code.co_qualname
            found[name] = found.get(name, 0) + 1

    sys.setprofile(see)
    try:
        executor.run(plan, program, HAND_OVER)
    finally:
        sys.setprofile(None)
    return found


def test_without_a_recorder_nothing_more_is_called() -> None:
    """Off costs no clock, no event and no memory reading: the executor's own calls are all."""
    recorder = StepRecorder(CpuClock())
    recorder.step_begins(0)
    off, on = _calls(None), _calls(recorder)
    actions = sum(map(len, make_plan(1, 1, (2, 1, 3)).actions))
    more = {name: n - off.get(name, 0) for name, n in on.items() if n != off.get(name, 0)}
    assert more["StepRecorder.begin"] == more["StepRecorder.end"] == actions
    assert more["perf_counter_ns"] == 2 * actions
    assert not any("Recorder" in name or "perf_counter" in name for name in off)
    # Nothing is called more often without it, either.
    assert all(on.get(name, 0) >= n for name, n in off.items())


def test_kept_tensors_do_not_change_gradients() -> None:
    def gradient(around: Any) -> Tensor:
        x = torch.linspace(0, 1, 6, requires_grad=True)
        with around:
            y = (x.sin() * x).exp().sum()
        y.backward()
        assert x.grad is not None
        return x.grad

    import contextlib

    assert torch.equal(gradient(KeptTensors([]).around()), gradient(contextlib.nullcontext()))
