"""The executor runs every action in the plan's order and loses, doubles or mixes up no hand-over.

The stand-in stages check what they are handed: each tensor says which visit of which micro-batch
made it. What is expected here comes from the rules of a plan, not from the executor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from megalatent.passes import execute
from megalatent.passes.channels import Inbox, Outbox, Ring
from megalatent.passes.plan import Action, Plan, make_plan, next_backward, next_forward
from megalatent.passes.simulate import simulate
from tests.passes.standin import HAND_OVER, Ended, StandIn, launch

MIXED = (1, 3, 2, 1, 1, 2, 3)
Seen = tuple[list[Action], list[tuple[int, int]]]


def results(ended: list[Ended]) -> list[Any]:
    for rank, end in enumerate(ended):
        assert end.code == 0, f"rank {rank}:\n{end.stderr}"
    return [end.result for end in ended]


def execute_all(stages: int, plans: Sequence[Plan]) -> list[list[Seen]]:
    """Of each rank and plan: the actions, and chunks finished after how many of them."""

    def stage(rank: int) -> list[Seen]:
        executor = execute.Executor(Ring.create(dist.group.WORLD))
        programs = []
        for plan in plans:
            programs.append(StandIn(plan, rank))
            executor.run(plan, programs[-1], HAND_OVER)
        return [(program.done, program.finished) for program in programs]

    return results(launch(stages, stage))


def plans_for(stages: int) -> list[Plan]:
    """Uniform and mixed K, several chunks, fewer micro-batches than stages, evaluation."""
    sizes = [(1, (1,)), (1, (3,)), (1, (2,) * 5), (1, MIXED), (2, MIXED), (3, (2, 1))]
    return [
        make_plan(stages, chunks, passes, forward_only=forward_only)
        for chunks, passes in sizes
        for forward_only in (False, True)
    ]


@pytest.mark.parametrize(
    "stages",
    [1, 2, 4, pytest.param(3, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)],
)
def test_every_action_once_and_in_order(stages: int) -> None:
    plans = plans_for(stages)
    for rank, seen in enumerate(execute_all(stages, plans)):
        for plan, (done, finished) in zip(plans, seen, strict=True):
            assert tuple(done) == plan.actions[rank], plan.strategy
            # A chunk is finished right after its last backward, which is announced, both once.
            ends = {a.chunk: i for i, a in enumerate(plan.actions[rank]) if a.kind == "B"}
            expected = [(chunk, at) for chunk, i in ends.items() for at in (-i, i + 1)]
            assert sorted(finished) == sorted(expected)


def test_plan_whose_consumers_are_not_in_sending_order() -> None:
    """A rank may consume what it is sent in another order than it was sent."""
    first = [Action("F", m, 1, 0) for m in (0, 1, 2)]
    swapped = [first[2], first[0], first[1]]
    heads = [action for f in swapped for action in (f, f._replace(kind="H"))]
    back = [f._replace(kind="B") for f in (first[1], first[2], first[0])]
    plan = Plan(2, 1, (1, 1, 1), "by hand", ((*first, *back[::-1]), (*heads, *back)))
    for rank, [(done, _)] in enumerate(execute_all(2, [plan])):
        assert tuple(done) == plan.actions[rank]


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_open_sends_and_posted_receives_do_not_grow_with_the_step(stages: int) -> None:
    """What waits to be received is bounded by what the plan keeps in flight, however long it is."""
    counts = (16, 64)
    kinds = [
        (m, passes) for m in counts for passes in ((1,) * m, (2,) * m, (3, 2, 1, 1) * (m // 4))
    ]
    plans = [make_plan(stages, 1, passes) for _, passes in kinds]
    plans += [make_plan(stages, 1, (1,) * m, forward_only=True) for m in counts]

    def stage(rank: int) -> list[dict[str, int]]:
        peaks: list[dict[str, int]] = []

        class CountingOutbox(Outbox):
            def send(self, tensor: Any, *args: Any) -> None:
                super().send(tensor, *args)
                peaks[-1]["sends"] = max(peaks[-1]["sends"], len(self))
                # What has been sent must not only be forgotten, but freed.
                peak = peaks[-1]
                peak["alive"] += 1
                weakref.finalize(tensor, lambda: peak.update(alive=peak["alive"] - 1))
                peak["most alive"] = max(peak["most alive"], peak["alive"])

        class CountingInbox(Inbox):
            def take(self, key: Any) -> Any:
                taken = super().take(key)
                peaks[-1]["receives"] = max(peaks[-1]["receives"], len(self))
                return taken

        setattr(execute, "Outbox", CountingOutbox)  # noqa: B010
        setattr(execute, "Inbox", CountingInbox)  # noqa: B010
        executor = execute.Executor(Ring.create(dist.group.WORLD))
        for plan in plans:
            peaks.append({"sends": 0, "receives": 0, "alive": 0, "most alive": 0})
            executor.run(plan, StandIn(plan, rank), HAND_OVER)
        return peaks

    for seen in results(launch(stages, stage)):
        for plan, peaks in zip(plans, seen, strict=True):
            what = f"{len(plan.passes)} micro-batches, K = {set(plan.passes)}"
            # The answer to a hand-over comes two actions after it was consumed.
            most = 4 if plan.forward_only else max(simulate(plan).peak_in_flight) + 2
            assert peaks["sends"] <= most, what
            assert peaks["receives"] <= 2, what
            # Both ways, and one that is on its way out.
            assert peaks["most alive"] <= 2 * most + 1, what
            assert peaks["alive"] == 0, what


def test_plan_for_another_number_of_stages_is_refused() -> None:
    executor = execute.Executor(Ring(0, 1, 0, 0))
    plan = make_plan(2, 1, (1,))
    with pytest.raises(ValueError, match="the plan is for 2 stages, but this pipeline has 1"):
        executor.run(plan, StandIn(plan, 0), HAND_OVER)


def test_error_of_an_action_names_the_action() -> None:
    plan = make_plan(1, 1, (2, 1))

    def fail(index: int) -> None:
        if index == 3:
            raise ValueError("told to")

    with pytest.raises(ValueError, match="told to") as caught:
        execute.Executor(Ring(0, 1, 0, 0)).run(plan, StandIn(plan, 0, on_action=fail), HAND_OVER)
    assert caught.value.__notes__ == [f"stage 0, in its action 3, {plan.actions[0][3]}"]


def test_recorder_sees_every_action_and_wait() -> None:
    plan = make_plan(2, 1, (2, 1, 1))

    def stage(rank: int) -> list[tuple[str, str, Action]]:
        seen: list[tuple[str, str, Action]] = []

        class Recorder:
            def begin(self, kind: str, action: Action) -> None:
                seen.append(("begin", kind, action))

            def end(self, kind: str, action: Action) -> None:
                seen.append(("end", kind, action))

        executor = execute.Executor(Ring.create(dist.group.WORLD), recorder=Recorder())
        executor.run(plan, StandIn(plan, rank), HAND_OVER)
        return seen

    for rank, seen in enumerate(results(launch(2, stage))):
        expected = []
        for action in plan.actions[rank]:
            waits = ["wait"] if plan.source(action, rank) is not None else []
            for kind in (*waits, action.kind):
                expected += [("begin", kind, action), ("end", kind, action)]
            outputs = next_forward if action.kind == "F" else next_backward
            if action.kind != "H" and outputs(action, rank, plan) is not None:
                expected += [("begin", "send", action), ("end", "send", action)]
        # At the end of the step it waits for what is still on its way out.
        expected += [(when, "send", plan.actions[rank][-1]) for when in ("begin", "end")]
        assert seen == expected
