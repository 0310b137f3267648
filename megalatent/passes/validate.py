"""Checks that a plan is complete and can run on every rank without a deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from megalatent.errors import UserError
from megalatent.passes.plan import Action, Plan, next_backward, next_forward
from megalatent.passes.simulate import run_in_order

__all__ = ["PlanError", "expected_actions", "receive_order", "validate"]


class PlanError(UserError):
    """A plan that cannot be executed.

    Attributes:
        place: the rank and position of the first bad action, where there is one.
    """

    def __init__(self, message: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.place = place


def validate(plan: Plan, *, max_in_flight: int | None = None) -> None:
    """Raise PlanError unless every rank can run its list to the end.

    Checked are: every action of every chain is there exactly once, on its rank; no rank waits for
    an action that comes too late, with every rank running its own list in order and blocking where
    an input is missing; the cap on activations.

    Sends do not block, and the messages of an edge and direction are received in the order in
    which they were sent, into buffers that are posted ahead (see `receive_order`). A rank may
    consume them in another order: what it needs has been sent, and so has all before it.
    """
    _check_complete(plan)
    done = [0] * plan.stages
    for rank, _, _ in run_in_order(plan):
        done[rank] += 1
    stuck = [r for r in range(plan.stages) if done[r] < len(plan.actions[r])]
    if stuck:
        rank = stuck[0]
        action = plan.actions[rank][done[rank]]
        others = f" and {len(stuck) - 1} other rank(s) with it" if len(stuck) > 1 else ""
        raise PlanError(
            f"the plan cannot run: rank {rank} waits for ever at its action {done[rank]}, {action}"
            f"{others}; an action that it needs comes too late in a list",
            (rank, done[rank]),
        )
    if max_in_flight is not None and not plan.forward_only:
        _check_cap(plan, max_in_flight)


def _check_cap(plan: Plan, cap: int) -> None:
    for rank, actions in enumerate(plan.actions):
        held = 0
        for index, action in enumerate(actions):
            held += (action.kind == "F") - (action.kind == "B")
            if held > cap:
                raise PlanError(
                    f"rank {rank} holds {held} activations after its action {index}, {action}, but "
                    f"the cap is {cap}",
                    (rank, index),
                )


def expected_actions(plan: Plan, rank: int) -> Iterator[Action]:
    """Every action that `rank` must have, in no particular order."""
    for micro_batch, passes in enumerate(plan.passes):
        for k in range(1, passes + 1):
            for chunk in range(plan.chunks):
                yield Action("F", micro_batch, k, chunk)
                if not plan.forward_only:
                    yield Action("B", micro_batch, k, chunk)
            if rank == plan.stages - 1:
                yield Action("H", micro_batch, k, plan.chunks - 1)


def _check_complete(plan: Plan) -> None:
    if len(plan.actions) != plan.stages:
        raise PlanError(f"the plan has lists for {len(plan.actions)} ranks, not {plan.stages}")
    for rank, actions in enumerate(plan.actions):
        missing = set(expected_actions(plan, rank))
        every = frozenset(missing)
        for index, action in enumerate(actions):
            if action not in missing:
                why = "is there twice" if action in every else "does not belong there"
                raise PlanError(f"rank {rank}: action {index}, {action}, {why}", (rank, index))
            missing.remove(action)
        if missing:
            raise PlanError(f"rank {rank}: {min(missing)} is missing")


def receive_order(plan: Plan, rank: int, kind: str) -> list[Action]:
    """The actions of `rank` that consume what one neighbour sends, in the order of sending.

    `kind` "F" is the edge from the rank before (round the ring for the first rank), "B" the edge
    from the rank after. Hand-overs inside a rank (one stage) are not listed.
    """
    follow, step = (next_forward, -1) if kind == "F" else (next_backward, 1)
    sender = (rank + step) % plan.stages
    if sender == rank:
        return []
    targets = [follow(a, sender, plan) for a in plan.actions[sender] if a.kind == kind]
    return [target[1] for target in targets if target is not None and target[0] == rank]
