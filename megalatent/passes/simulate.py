"""Runs a plan on paper: when each action starts and ends, what waits, what is held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action, Plan, dependencies

__all__ = ["Simulation", "duration", "peak_in_flight", "run_in_order", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """Times of a plan, in the unit of the costs.

    Attributes:
        spans: start and end of each action, `[rank][position]`.
        makespan: end of the last action.
        busy: working time of each rank.
        bubble_fraction: share of all ranks' time until the makespan in which they wait.
        peak_in_flight: most activations each rank holds at once.
    """

    spans: tuple[tuple[tuple[float, float], ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubble_fraction: float
    peak_in_flight: tuple[int, ...]


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Run a valid plan with these costs.

    Each rank runs its list in order. Sends do not block: an output is on the next rank a hand-over
    time after its action ended, whether or not that rank wants it yet.

    Raises:
        ValueError: the ranks wait for each other; `validate` says where.
    """
    costs = costs or Costs()
    times = _Times(plan, costs)
    spans: list[list[tuple[float, float]]] = [[] for _ in plan.actions]
    ends: dict[tuple[int, Action], float] = {}
    clock = [0.0] * plan.stages
    done = 0
    for rank, action, needed in run_in_order(plan):
        start = clock[rank]
        for source, before in needed:
            start = max(start, ends[source, before] + times.hand_over(before, source, rank))
        end = start + times.of(action, rank)
        ends[rank, action] = clock[rank] = end
        spans[rank].append((start, end))
        done += 1
    if done < sum(map(len, plan.actions)):
        raise ValueError("the ranks of this plan wait for each other: validate it first")
    makespan = max(clock)
    busy = tuple(sum(end - start for start, end in rank) for rank in spans)
    idle = 1 - sum(busy) / (plan.stages * makespan) if makespan else 0.0
    return Simulation(
        tuple(tuple(rank) for rank in spans),
        makespan,
        busy,
        max(0.0, idle),
        peak_in_flight(plan),
    )


def run_in_order(plan: Plan) -> Iterator[tuple[int, Action, list[tuple[int, Action]]]]:
    """All actions in an order in which they can run: (rank, action, what it needed).

    Stops early where every rank waits for another one.
    """
    at = [0] * plan.stages
    done: set[tuple[int, Action]] = set()
    waiting: dict[tuple[int, Action], list[int]] = {}
    ready = list(range(plan.stages))
    while ready:
        rank = ready.pop()
        actions = plan.actions[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]
            needed = dependencies(action, rank, plan)
            missing = next((need for need in needed if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            done.add((rank, action))
            yield rank, action, needed
            ready += waiting.pop((rank, action), ())


def duration(action: Action, rank: int, plan: Plan, costs: Costs) -> float:
    """Time that one action takes on `rank`."""
    if action.kind == "H":
        return costs.head
    time = costs.forward_time if action.kind == "F" else costs.backward_time
    return time(plan.stages, plan.chunks, rank, action.chunk, action.k)


def peak_in_flight(plan: Plan) -> tuple[int, ...]:
    """Most activations (forwards whose backward has not run) that each rank holds at once."""
    if plan.forward_only:
        return (0,) * plan.stages
    step = {"F": 1, "B": -1}
    return tuple(
        max(accumulate(step.get(action.kind, 0) for action in actions), default=0)
        for actions in plan.actions
    )


class _Times:
    """Durations, each looked up once."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.known: dict[tuple[int, str, int, int], float] = {}

    def of(self, action: Action, rank: int) -> float:
        key = (rank, action.kind, action.chunk, action.k)
        if key not in self.known:
            self.known[key] = duration(action, rank, self.plan, self.costs)
        return self.known[key]

    def hand_over(self, output: Action, source: int, rank: int) -> float:
        if source == rank:
            return 0.0
        # Gradients take the edges backwards.
        return self.costs.hand_over_time(self.plan.stages, source if output.kind == "F" else rank)
