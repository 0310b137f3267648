"""Slow, plain restatements of what a plan means, to compare the planner with."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan


def chain(plan: Plan, micro_batch: int) -> list[tuple[int, Action]]:
    """All forward visits of a micro-batch in order, written out."""
    return [
        (rank, Action("F", micro_batch, k, chunk))
        for k in range(1, plan.passes[micro_batch] + 1)
        for chunk in range(plan.chunks)
        for rank in range(plan.stages)
    ]


def needs(plan: Plan) -> dict[tuple[int, Action], list[tuple[int, Action]]]:
    """What each (rank, action) of a plan needs, from the chains written out."""
    table: dict[tuple[int, Action], list[tuple[int, Action]]] = {}
    for micro_batch in range(len(plan.passes)):
        visits = chain(plan, micro_batch)
        for i, visit in enumerate(visits):
            table[visit] = visits[i - 1 : i] if i else []
            rank, action = visit
            headed = rank == plan.stages - 1 and action.chunk == plan.chunks - 1
            if headed:
                table[rank, action._replace(kind="H")] = [visit]
            if plan.forward_only:
                continue
            needed = [visit]
            if headed:
                needed.append((rank, action._replace(kind="H")))
            if i + 1 < len(visits):
                after, next_visit = visits[i + 1]
                needed.append((after, next_visit._replace(kind="B")))
            table[rank, action._replace(kind="B")] = needed
    return table


def relax(plan: Plan, costs: Costs) -> float:
    """The makespan by repeated relaxation of all constraints, without any order of evaluation."""
    table = needs(plan)
    before: dict[tuple[int, Action], tuple[int, Action]] = {}
    for rank, actions in enumerate(plan.actions):
        for first, second in pairwise(actions):
            before[rank, second] = (rank, first)
    times = {
        (rank, action): duration_of(action, rank, plan, costs)
        for rank, actions in enumerate(plan.actions)
        for action in actions
    }
    ends = dict(times)
    changed = True
    while changed:
        changed = False
        for key, time in times.items():
            start = ends[before[key]] if key in before else 0.0
            for source in table[key]:
                start = max(start, ends[source] + hop(source, key, plan, costs))
            if start + time > ends[key] + 1e-12:
                ends[key] = start + time
                changed = True
    return max(ends.values())


def duration_of(action: Action, rank: int, plan: Plan, costs: Costs) -> float:
    """Duration of an action, for costs given as numbers or one per virtual stage."""
    if action.kind == "H":
        return costs.head
    forward = action.kind == "F"
    value = costs.forward if forward else costs.backward
    time = value if isinstance(value, float) else value[action.chunk * plan.stages + rank]
    first = rank == 0 and action.chunk == 0
    if action.k == 1:
        return time + first * (costs.embedding if forward else costs.embedding_backward)
    extra = costs.extra_forward if forward else costs.extra_backward
    time += extra if isinstance(extra, float) else extra[action.chunk * plan.stages + rank]
    return time + first * (costs.fusion if forward else costs.fusion_backward)


def hop(source: tuple[int, Action], target: tuple[int, Action], plan: Plan, costs: Costs) -> float:
    """Hand-over time between two actions."""
    if source[0] == target[0]:
        return 0.0
    if isinstance(costs.hand_over, float):
        return costs.hand_over
    return costs.hand_over[source[0] if source[1].kind == "F" else target[0]]


def run_with_queues(plan: Plan) -> int:
    """Run the plan on ranks that block, with one first-in-first-out queue per edge and direction.

    A rank that needs a message takes messages from the queue, in their order, into a box until it
    has it. Returns the number of actions that ran; fewer than all means a deadlock.
    """
    table = needs(plan)
    users: dict[tuple[int, Action], tuple[int, Action]] = {}
    for key, sources in table.items():
        for place in sources:
            if place[1].kind == key[1].kind and key[1].kind in "FB":
                users[place] = key
    queues: dict[tuple[int, int, str], deque[Action]] = {}
    boxes: list[set[Action]] = [set() for _ in plan.actions]
    done: list[set[Action]] = [set() for _ in plan.actions]
    at = [0] * plan.stages
    progress, total = True, 0
    while progress:
        progress = False
        for rank, actions in enumerate(plan.actions):
            if at[rank] == len(actions):
                continue
            action = actions[at[rank]]
            needed = table[rank, action]
            ready = all(a in done[r] for r, a in needed if r == rank)
            handed = [(r, a) for r, a in needed if r != rank]
            for sender, output in handed if ready else []:
                queue = queues.setdefault((sender, rank, output.kind), deque())
                while output not in boxes[rank] and queue:
                    boxes[rank].add(queue.popleft())
                ready = output in boxes[rank]
            if not ready:
                continue
            boxes[rank].difference_update(output for _, output in handed)
            done[rank].add(action)
            user = users.get((rank, action))
            if user is not None and user[0] != rank:
                queues.setdefault((rank, user[0], action.kind), deque()).append(action)
            at[rank] += 1
            total += 1
            progress = True
    return total
