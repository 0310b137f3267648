"""From the schedule of one rank to the lists of all: the second half of a woven plan."""

from __future__ import annotations

from megalatent.passes.problem import Problem
from megalatent.passes.strategies.woven import Weave, slack_of

__all__ = ["project"]


def project(p: Problem, woven: Weave) -> list[list[int]]:
    """Lists of all ranks, heads not yet placed."""
    mid = woven.recipe.rank
    slack = slack_of(p, woven.recipe.in_slots)
    virtual = range(p.width)
    lists = []
    for rank in range(p.stages):
        way = range(min(rank, mid), max(rank, mid))
        there = sum(p.hops[r] + slack.forward[r] for r in way)
        back = sum(p.hops[r] + slack.backward[r] for r in way)
        early = [there + sum(p.forward[r][v] for r in way) for v in virtual]
        late = [back + sum(p.backward[r + 1][v] for r in way) for v in virtual]
        if rank > mid:
            early, late = [-x for x in early], [-x for x in late]
        lists.append(_merge(p, woven, early, late))
    return lists


def _merge(p: Problem, woven: Weave, early: list[float], late: list[float]) -> list[int]:
    """Forwards and backwards of one rank in the order of their wished times, under the cap."""
    width, total = p.width, len(woven.forwards)
    cap = p.cap if p.cap is not None else total + 1
    wish_f = [
        time - early[base % width]
        for base, time in zip(woven.forwards, woven.forward_times, strict=True)
    ]
    codes_f = [base << 2 for base in woven.forwards]
    actions: list[int] = []
    j = 0
    limit = cap
    for base, time in zip(woven.backwards, woven.backward_times, strict=True):
        wish = time + late[base % width] - p.eps
        most = min(limit, total)
        i = j
        while j < most and wish_f[j] < wish:
            j += 1
        actions += codes_f[i:j]
        actions.append(base << 2 | 1)
        limit += 1
    return actions + codes_f[j:]
