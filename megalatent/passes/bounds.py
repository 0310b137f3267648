"""Lower bounds on the makespan of any plan, and the schedule with a flush between passes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megalatent.passes.costs import Costs
from megalatent.passes.problem import Problem

__all__ = ["flush_makespan", "lower_bound", "problem_bound", "problem_flush"]

Job = tuple[float, float, float]  # earliest start, work, least time after it


def lower_bound(
    stages: int,
    chunks: int,
    passes: Sequence[int],
    costs: Costs | None = None,
    *,
    max_in_flight: int | None = None,
    forward_only: bool = False,
) -> float:
    """A time that no plan can beat, in the unit of the costs.

    Three facts, the largest wins. A micro-batch is a chain: its visits follow each other. A rank
    works on one thing at a time: for any set of its actions, the earliest start, all the work and
    the shortest remainder after it add up (the best such set is found by preemptive scheduling,
    Carlier 1982); with equal stages this gives `(V * sum(K) + P - 1)(f + b)`, with a busy head
    the busiest rank's work plus fill and drain. And under a cap, an activation holds its place for
    at least as long as its micro-batch needs from forward to backward.
    """
    ordered = tuple(sorted(passes, reverse=True))
    problem = Problem(stages, chunks, ordered, costs or Costs(), max_in_flight, forward_only)
    return problem_bound(problem)[0]


def problem_bound(p: Problem) -> tuple[float, list[float]]:
    """`lower_bound` of a problem in numbers, and the least activation-time of each rank."""
    jobs: list[list[Job]] = [[] for _ in range(p.stages)]
    held = [0.0] * p.stages
    best = 0.0
    for length in sorted(set(p.lengths)):
        count = p.lengths.count(length)
        best = max(best, _chain(p, length, count, jobs, held))
    best = max(best, *(_one_machine(rank_jobs) for rank_jobs in jobs))
    if p.cap is not None:
        best = max(best, *(time / p.cap for time in held))
    return best, held


def _chain(p: Problem, length: int, count: int, jobs: list[list[Job]], held: list[float]) -> float:
    """Length of one micro-batch's chain; adds the jobs of `count` such micro-batches."""
    visits = [(v, r) for v in range(length) for r in range(p.stages)]
    starts: dict[tuple[int, int], float] = {}
    time = 0.0
    for v, r in visits:
        if v or r:
            time += p.hops[r - 1]
        starts[v, r] = time
        time += p.forward[r][v]
    forward_end = time
    # Time from the end of a backward visit to the end of the chain's backward.
    remains: dict[tuple[int, int], float] = {}
    time = 0.0
    for v, r in visits:
        if (v or r) and not p.forward_only:
            time += p.hops[r - 1]
        remains[v, r] = time
        time += p.backward[r][v]
    total = forward_end + p.head + time  # no backward costs nothing
    for v, r in visits:
        forward, backward = p.forward[r][v], p.backward[r][v]
        jobs[r].append((starts[v, r], count * forward, total - starts[v, r] - forward))
        held[r] += count * (total - remains[v, r] - starts[v, r])
        if not p.forward_only:
            jobs[r].append((total - remains[v, r] - backward, count * backward, remains[v, r]))
    for v in range(length):
        if p.head and p.has_head(v):
            last = (v, p.stages - 1)
            after = 0.0 if p.forward_only else remains[last] + p.backward[-1][v]
            jobs[-1].append((starts[last] + p.forward[-1][v], count * p.head, after))
    return total


def _one_machine(jobs: list[Job]) -> float:
    """Length of the best preemptive schedule of jobs with release and delivery times."""
    jobs = sorted(jobs)
    queue: list[list[float]] = []
    now = best = 0.0
    i = 0
    while i < len(jobs) or queue:
        if not queue:
            now = max(now, jobs[i][0])
        while i < len(jobs) and jobs[i][0] <= now:
            heapq.heappush(queue, [-jobs[i][2], jobs[i][1]])
            i += 1
        tail, work = queue[0]
        until = jobs[i][0] if i < len(jobs) else float("inf")
        if now + work <= until:
            now += work
            heapq.heappop(queue)
            best = max(best, now - tail)
        else:
            queue[0][1] -= until - now
            now = until
    return best


def flush_makespan(
    stages: int,
    chunks: int,
    passes: Sequence[int],
    costs: Costs | None = None,
    *,
    forward_only: bool = False,
) -> float:
    """Makespan of the step with a pipeline flush after each pass.

    All micro-batches that have pass k run it forward, the pipeline drains, pass k + 1 begins; then
    the backwards in reverse order, likewise. With equal stages and one chunk it is
    `sum over k of (m_k + P - 1)(f + b)` with m_k micro-batches that have pass k.
    """
    ordered = tuple(sorted(passes, reverse=True))
    return problem_flush(Problem(stages, chunks, ordered, costs or Costs(), None, forward_only))


def problem_flush(p: Problem) -> float:
    """`flush_makespan` of a problem in numbers."""
    chunks = p.chunks
    arrive = [0.0] * len(p.lengths)
    start = 0.0
    for k in range(1, max(p.passes) + 1):
        laps = [[row[v] for row in p.forward] for v in range((k - 1) * chunks, k * chunks)]
        start = _phase(laps, sum(own >= k for own in p.passes), p.hops, start, arrive, p.head)
    if p.forward_only:
        return start
    arrive = [0.0] * len(p.lengths)  # the way back begins where the way there ended
    hops = p.hops[-2::-1] + p.hops[-1:]  # from the last rank down, then round the ring
    for k in range(max(p.passes), 0, -1):
        virtual = reversed(range((k - 1) * chunks, k * chunks))
        laps = [[row[v] for row in reversed(p.backward)] for v in virtual]
        start = _phase(laps, sum(own >= k for own in p.passes), hops, start, arrive)
    return start


def _phase(
    laps: list[list[float]],
    count: int,
    hops: list[float],
    start: float,
    arrive: list[float],
    head: float = 0.0,
) -> float:
    """End of a phase: `count` jobs, in order, through the stations of `laps[chunk][station]`.

    No station begins before `start`; `arrive` holds each job's arrival and is updated. The last
    station of the last lap has each job's head to do when the job has left.
    """
    clock = [start] * len(hops)
    last = (len(laps) - 1, len(hops) - 1)
    for lap, work in enumerate(laps):
        for station, hop in enumerate(hops):
            now = clock[station]
            after = head if (lap, station) == last else 0.0
            for job in range(count):
                now = max(now, arrive[job]) + work[station]
                arrive[job] = now + hop
                now += after
            clock[station] = now
    return max(clock)
