"""Which recorded action handed its output to which: the arrows of traces and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megalatent.passes.plan import Action, Plan
from megalatent.profiling.records import RankInfo, Step

__all__ = ["HandOver", "hand_overs"]


class HandOver(NamedTuple):
    """A tensor that crossed stages.

    Attributes:
        sender, receiver: positions among the recorded ranks.
        sent: position among the sender's spans of the action that made it.
        used: position among the receiver's spans of the action that took it.
    """

    sender: int
    sent: int
    receiver: int
    used: int


def hand_overs(ranks: Sequence[RankInfo], plan: Plan, step: Step) -> list[HandOver]:
    """All hand-overs of a step between recorded ranks, by receiver and in the order of its spans.

    What stays on a rank is no hand-over, and what came from a rank that was not recorded is left
    out.
    """
    places = {(info.replica, info.stage): i for i, info in enumerate(ranks)}
    made: list[dict[Action, int]] = [
        {
            action: i
            for i, span in enumerate(rank.spans)
            if span.kind in "FB" and (action := span.action) is not None
        }
        for rank in step.ranks
    ]
    found = []
    for receiver, info in enumerate(ranks):
        for action, used in made[receiver].items():
            source = plan.maker(action, info.stage)
            sender = None if source is None else places.get((info.replica, source[0]))
            if source is None or sender is None or sender == receiver:
                continue
            sent = made[sender].get(source[1])
            if sent is not None:
                found.append(HandOver(sender, sent, receiver, used))
    return found
