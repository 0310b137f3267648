"""What follows from how an attempt ended, case by case."""

from __future__ import annotations

import pytest

from megalatent.launch.decisions import (
    Action,
    Cause,
    Outcome,
    Policy,
    back_off_seconds,
    decide,
)
from megalatent.launch.runfolder import State

ONE = Policy(max_requeues=3, back_off_seconds=10)
CHAIN = Policy(max_requeues=3, back_off_seconds=10, chained=True, successor="9")
LAST = Policy(max_requeues=3, back_off_seconds=10, chained=True)


def outcome(cause: Cause, code: int = 0, steps: int = 10, target: bool | None = False) -> Outcome:
    return Outcome(cause, "why", code, 20, 20 + steps, target)


@pytest.mark.parametrize(
    ("given", "policy", "action"),
    [
        (outcome(Cause.EXITED, 0, target=True), ONE, Action.FINISH),
        (outcome(Cause.EXITED, 0, target=None), ONE, Action.FINISH),
        # the ranks stopped by themselves: Slurm had told them, and not the script
        (outcome(Cause.EXITED, 0), ONE, Action.REQUEUE),
        (outcome(Cause.EXITED, 1), ONE, Action.REQUEUE),
        (outcome(Cause.EXITED, 1), CHAIN, Action.REQUEUE),
        (outcome(Cause.EXITED, 2), ONE, Action.FAIL),
        (outcome(Cause.EXITED, 17), ONE, Action.FAIL),
        (outcome(Cause.HANG), ONE, Action.REQUEUE),
        (outcome(Cause.BAD_LOSS), ONE, Action.FAIL),
        (outcome(Cause.BAD_NODES), ONE, Action.REQUEUE),
        (outcome(Cause.NO_GOOD_NODE), ONE, Action.FAIL),
        (outcome(Cause.SIGNAL), ONE, Action.REQUEUE),
        (outcome(Cause.SIGNAL), CHAIN, Action.HAND_OVER),
        (outcome(Cause.SIGNAL), LAST, Action.STOP),
        (outcome(Cause.SIGNAL, target=True), ONE, Action.FINISH),
        (outcome(Cause.TIME_LIMIT), ONE, Action.REQUEUE),
        (outcome(Cause.TIME_LIMIT), CHAIN, Action.HAND_OVER),
        (outcome(Cause.PREEMPTED), CHAIN, Action.REQUEUE),
        (outcome(Cause.CANCELLED), ONE, Action.NOTHING),
        (outcome(Cause.SLURM_REQUEUE), ONE, Action.NOTHING),
    ],
)
def test_what_follows(given: Outcome, policy: Policy, action: Action) -> None:
    assert decide(given, State(), policy).action is action


def test_failures_in_a_row_end_the_run() -> None:
    state, seen = State(), []
    for _ in range(4):
        decision = decide(outcome(Cause.EXITED, 1, steps=0), state, ONE)
        seen.append((decision.action, decision.delay_seconds))
        state.failures, state.failures_at = decision.failures, 20
    assert seen == [
        (Action.REQUEUE, 10),
        (Action.REQUEUE, 20),
        (Action.REQUEUE, 40),
        (Action.FAIL, 0),
    ]
    assert "gave up after starting again 3 times" in decision.reason


def test_a_new_checkpoint_starts_the_count_anew() -> None:
    state = State(failures=3, failures_at=20)
    assert decide(outcome(Cause.EXITED, 1, steps=5), state, ONE).failures == 1


def test_time_slices_without_a_checkpoint_are_failures() -> None:
    state = State(failures=3, failures_at=20)
    decision = decide(outcome(Cause.TIME_LIMIT, steps=0), state, ONE)
    assert decision.action is Action.FAIL
    assert "before a new checkpoint" in decision.reason


def test_never_to_requeue() -> None:
    policy = Policy(max_requeues=0, back_off_seconds=10)
    decision = decide(outcome(Cause.EXITED, 1), State(), policy)
    assert (decision.action, decision.reason) == (
        Action.FAIL,
        "gave up without a new checkpoint: why",
    )


def test_back_off_doubles_up_to_half_an_hour() -> None:
    assert [back_off_seconds(n, 30) for n in (1, 2, 3, 7, 50)] == [30, 60, 120, 1800, 1800]
