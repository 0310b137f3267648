"""What to do when the ranks of an attempt have ended: a pure function, one table.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megalatent.launch.runfolder import State

__all__ = ["Action", "Cause", "Decision", "Outcome", "Policy", "back_off_seconds", "decide"]

# Exit codes of `megalatent train` and of Megatron's result validation.
WRONG_INPUT = 2
VALIDATION_FAILED = 17

_LONGEST_BACK_OFF_SECONDS = 1800.0


class Cause(StrEnum):
    """Why an attempt ended."""

    EXITED = "exited"  # by itself, see the exit code
    SIGNAL = "asked to stop"  # Slurm's early signal: time limit or preemption ahead
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    SLURM_REQUEUE = "requeued by Slurm"  # scontrol requeue, or a node went down
    HANG = "hang"
    BAD_LOSS = "bad loss"
    BAD_NODES = "bad nodes"
    NO_GOOD_NODE = "no good node"  # more likely something else than all of them


class Action(StrEnum):
    FINISH = "finish"
    REQUEUE = "requeue"
    HAND_OVER = "hand over"  # the next job of the chain goes on
    STOP = "stop"  # nothing left that goes on, nothing wrong
    FAIL = "fail"  # and do not start again
    NOTHING = "nothing"  # Slurm has decided already


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; iterations are those of complete checkpoints, 0 for none."""

    cause: Cause
    reason: str
    returncode: int = 0
    from_iteration: int = 0
    to_iteration: int = 0
    reached_target: bool | None = None  # None: the target is not known


@dataclass(frozen=True)
class Policy:
    """`max_requeues` failures in a row without a new checkpoint between them; `chained`: a chain
    of jobs bounds the time, so that a time limit never requeues; `successor`: the next of them."""

    max_requeues: int
    back_off_seconds: float
    chained: bool = False
    successor: str | None = None


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    failures: int
    delay_seconds: float = 0.0


def decide(outcome: Outcome, state: State, policy: Policy) -> Decision:
    """What follows from an outcome, given what happened before."""
    failures = state.failures if outcome.to_iteration <= state.failures_at else 0
    reason = outcome.reason
    match outcome.cause:
        case Cause.BAD_LOSS | Cause.NO_GOOD_NODE:
            return Decision(Action.FAIL, reason, failures)
        case Cause.CANCELLED | Cause.SLURM_REQUEUE:
            return Decision(Action.NOTHING, reason, failures)
        case Cause.HANG | Cause.BAD_NODES:
            return _after_failure(reason, failures, policy)
        case Cause.EXITED if outcome.returncode == 0:
            if outcome.reached_target is not False:
                return Decision(Action.FINISH, reason, 0)
        case Cause.EXITED:
            if outcome.returncode == WRONG_INPUT:
                return Decision(Action.FAIL, reason, failures)
            if outcome.returncode == VALIDATION_FAILED:
                return Decision(
                    Action.FAIL, f"Megatron's result validation failed: {reason}", failures
                )
            return _after_failure(reason, failures, policy)
    if outcome.reached_target:
        return Decision(Action.FINISH, reason, 0)
    return _after_time_used_up(outcome, failures, policy)


def back_off_seconds(failures: int, first: float) -> float:
    """Doubles with every failure in a row."""
    return min(first * 2.0 ** max(0, failures - 1), _LONGEST_BACK_OFF_SECONDS)


def _after_failure(reason: str, failures: int, policy: Policy) -> Decision:
    failures += 1
    if failures > policy.max_requeues:
        times = "once" if policy.max_requeues == 1 else f"{policy.max_requeues} times"
        restarted = f"after starting again {times} " if policy.max_requeues else ""
        return Decision(
            Action.FAIL, f"gave up {restarted}without a new checkpoint: {reason}", failures
        )
    delay = back_off_seconds(failures, policy.back_off_seconds)
    return Decision(Action.REQUEUE, reason, failures, delay)


def _after_time_used_up(outcome: Outcome, failures: int, policy: Policy) -> Decision:
    if policy.chained and outcome.cause is not Cause.PREEMPTED:
        if policy.successor:
            return Decision(
                Action.HAND_OVER, f"{outcome.reason}; job {policy.successor} goes on", failures
            )
        return Decision(
            Action.STOP, f"{outcome.reason}; the chain is used up, submit again to go on", failures
        )
    if outcome.to_iteration > outcome.from_iteration:
        return Decision(Action.REQUEUE, outcome.reason, failures)
    # a slice of time too short for one checkpoint would repeat for ever
    return _after_failure(f"{outcome.reason} before a new checkpoint", failures, policy)
