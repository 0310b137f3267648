"""Woven plans: schedule one rank exactly, then let every other rank follow it in time.

All ranks run the forwards in one order and the backwards in one order, so every edge is first in,
first  A model of the busiest rank (or the last) picks both orders: what leaves it comes back
after one turn of the ring, and while less than `target` activations are in flight it goes forward,
else backward. Each other rank then does its forwards as much earlier, and its backwards as much
later, as the way to the modelled rank takes. With equal stages and uniform K this is interleaved
1F1B over groups of near-equal size, at the bound and with `(K - 1) g + P` activations.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace

from megalatent.passes.problem import Problem

__all__ = ["Recipe", "Slack", "Weave", "group_size", "slack_of", "weave"]


@dataclass(frozen=True)
class Recipe:
    """The choices of one woven plan.

    Attributes:
        rank: the modelled rank.
        starts: "longest" K first, or "spread" (the values of K alternate).
        group: start whole groups of at least so many micro-batches before their second virtual
            pass; 0 for no groups.
        deep_first: begin backwards of the longest micro-batches first, else in order of arrival.
        eager_heads: each head right after its forward, else when the rank would wait.
        target: activations in flight below which forward comes before backward.
        in_slots: the way to the next rank and back takes whole slots (see `slack_of`), else no
            longer than it must.
        admit: a micro-batch enters only if all that the entered ones will need (less what their
            backwards have given back) stays below this.
    """

    rank: int
    starts: str = "longest"
    group: int = 0
    deep_first: bool = True
    eager_heads: bool = False
    target: int = 1
    in_slots: bool = True
    admit: float | None = None


@dataclass(frozen=True)
class Weave:
    """The modelled rank's schedule: bases `micro_batch * width + v` with their start times."""

    recipe: Recipe
    forwards: list[int]
    forward_times: list[float]
    backwards: list[int]
    backward_times: list[float]
    makespan: float
    #: most activations in flight on the modelled rank
    in_flight: int
    #: and on the first rank, by estimate
    peak: float


def start_order(p: Problem, starts: str) -> list[int]:
    """Micro-batches in the order in which they enter the ring."""
    count = len(p.lengths)
    if starts == "longest" or p.lengths[0] == p.lengths[-1]:
        return list(range(count))
    # Each value of K is spread evenly over the step; the shortest come late, to fill the end.
    keys = []
    classes = {length: p.lengths.count(length) for length in set(p.lengths)}
    seen = dict.fromkeys(classes, 0)
    for m, length in enumerate(p.lengths):
        late = length == p.lengths[-1]
        keys.append(((seen[length] + late) / classes[length], m))
        seen[length] += 1
    return [m for _, m in sorted(keys)]


def group_begins(count: int, least: int) -> list[bool]:
    """For each start, whether a new group begins there; groups have near-equal sizes >= `least`."""
    groups = max(1, count // least)
    size, larger = divmod(count, groups)
    begins = [False] * count
    at = 0
    for i in range(groups):
        begins[at] = True
        at += size + (i < larger)
    return begins


def group_size(p: Problem) -> int:
    """Micro-batches that keep the last rank in forwards until the first one is back from its turn.

    P of them where hand-overs take no time and stages are equal.
    """
    if p.width == 1 or not p.forward[-1][0]:
        return p.stages
    turn = sum(p.hops) + sum(row[1] for row in p.forward[:-1]) + p.forward[-1][0]
    return min(2 * p.stages, max(p.stages, math.ceil((turn - p.eps) / p.forward[-1][0])))


class _Ring:
    """Times around the ring as the modelled rank sees them."""

    def __init__(self, p: Problem, rank: int, slack: Slack) -> None:
        stages, width = p.stages, p.width
        before, after = range(rank), range(rank + 1, stages)
        fwd, bwd = p.forward, p.backward
        #: from the end of forward v here to the arrival of forward v + 1, if nobody makes it wait
        self.forward = [
            sum(p.hops) + sum(fwd[r][v] for r in after) + sum(fwd[r][v + 1] for r in before)
            for v in range(width - 1)
        ]
        #: from the end of backward v here to the arrival of backward v - 1, likewise
        self.backward = [0.0] + [
            sum(p.hops) + sum(bwd[r][v] for r in before) + sum(bwd[r][v - 1] for r in after)
            for v in range(1, width)
        ]
        #: what they take longer where forwards and backwards meet
        self.slack_forward, self.slack_backward = sum(slack.forward), sum(slack.backward)
        #: from the end of the deepest forward v here to the arrival of its backward
        edges = range(rank, stages - 1)
        rest = sum(2 * p.hops[r] + slack.forward[r] + slack.backward[r] for r in edges)
        if edges:
            rest += p.head
        self.turn = [rest + sum(fwd[r][v] + bwd[r][v] for r in after) for v in range(width)]
        self.first = sum(fwd[r][0] for r in before) + sum(p.hops[:rank])
        self.interval = max(fwd[r][0] for r in range(rank + 1))
        self.drain = sum(bwd[r][0] for r in before) + sum(p.hops[:rank])


@dataclass(frozen=True)
class Slack:
    """What hand-overs may take longer than they must, per edge `rank -> rank + 1`."""

    forward: list[float]
    backward: list[float]
    #: activations that the first rank holds more than the last
    slope: float


def slack_of(p: Problem, in_slots: bool) -> Slack:
    """Slack that keeps forwards and backwards out of each other's way, or none.

    In the steady state each rank has one forward and one backward in every slot, a slot being the
    busiest rank's time for a visit. If the way to the next rank and back takes whole slots, what
    fits together on one rank fits together on all. The way there and the way back are made alike.
    """
    visits = sum(p.lengths)
    slot = max(p.work) / visits or 1.0

    def mean(row: list[float]) -> float:
        return sum(n * x for n, x in zip(p.alive, row, strict=True)) / visits

    slack = Slack([0.0] * p.stages, [0.0] * p.stages, 0.0)
    slope = 0.0
    for rank in range(p.stages - 1):
        there = mean(p.forward[rank]) + p.hops[rank]
        back = mean(p.backward[rank + 1]) + p.hops[rank]
        if in_slots:
            whole = max(1, math.ceil((there + back - p.eps) / slot)) * slot
            spare = max(0.0, whole - there - back)
            slack.forward[rank] = min(spare, max(0.0, whole / 2 - there))
            slack.backward[rank] = spare - slack.forward[rank]
            slope += whole / slot
        else:
            slope += (there + back) / slot
    return replace(slack, slope=slope)


def weave(p: Problem, recipe: Recipe) -> Weave | None:
    """Schedule the modelled rank; None if the cap leaves it no way forward."""
    return _Weaver(p, recipe).run()


class _Weaver:
    """The modelled rank at one time of its schedule."""

    def __init__(self, p: Problem, recipe: Recipe) -> None:
        rank = recipe.rank
        self.p, self.recipe = p, recipe
        self.slack = slack_of(p, recipe.in_slots)
        self.ring = _Ring(p, rank, self.slack)
        self.forward, self.backward = p.forward[rank], p.backward[rank]
        self.head = p.head if rank == p.stages - 1 else 0.0
        self.headed = [bool(self.head) and p.has_head(v) for v in range(p.width)]
        self.starts = start_order(p, recipe.starts)
        count = len(self.starts)
        self.begins = group_begins(count, recipe.group) if recipe.group else [True] * count
        #: what is on its way round the ring or to its turn: arrival, micro-batch, virtual pass
        self.returning: deque[tuple[float, int, int]] = deque()
        self.descending: deque[tuple[float, int, int]] = deque()
        self.turning: deque[tuple[float, int, int]] = deque()
        self.turned: list[tuple[int, int, int]] = []
        self.heads: deque[int] = deque()
        self.safe: _Safe | None = None
        if p.cap is not None:
            # The first rank holds more than the modelled one, by what is under way between them.
            ahead = int(self.slack.slope * rank / max(1, p.stages - 1) + 0.5)
            self.safe = _Safe(p, self.starts, max(p.width, p.cap - ahead))
        self.forwards: list[int] = []
        self.forward_times: list[float] = []
        self.backwards: list[int] = []
        self.backward_times: list[float] = []
        self.now = self.next_start = self.ring.first
        self.started = self.in_flight = self.most = self.reserved = 0

    def run(self) -> Weave | None:
        p, recipe = self.p, self.recipe
        left = sum(p.lengths) * (1 if p.forward_only else 2)
        while left:
            place = self._forward_place()
            backward = self._has_backward()
            # Fewer in flight than there once were would save nothing and make bursts of backwards.
            room = self.in_flight < max(recipe.target, self.most)
            if place is not None and (room or not backward):
                self._run_forward(place)
                left -= 1
            elif backward:
                self._run_backward()
                left -= 1
            elif self.heads:
                self.heads.popleft()
                self.now += self.head
            elif not self._wait():
                return None
        end = self.now + self.head * len(self.heads) + self.ring.drain
        return Weave(
            recipe,
            self.forwards,
            self.forward_times,
            self.backwards,
            self.backward_times,
            end,
            self.most,
            self.most + self.slack.slope * recipe.rank / max(1, p.stages - 1),
        )

    def _forward_place(self) -> int | None:
        """Which forward could run now: a place in `returning`, -1 for a new one, None for none."""
        now, safe, started = self.now, self.safe, self.started
        place = None
        if self.returning and self.returning[0][0] <= now:
            place = 0
            if safe is not None:
                place = safe.first_allowed(self.returning, now, self.in_flight)
        if started == len(self.starts) or self.next_start > now:
            return place
        if place is not None and self.begins[started]:
            return place
        m, admit = self.starts[started], self.recipe.admit
        need = self.reserved + self.p.lengths[m]
        admitted = admit is None or not self.reserved or need <= admit
        if admitted and (safe is None or safe.allows(m, self.in_flight)):
            return -1
        return place

    def _has_backward(self) -> bool:
        turning, lengths, deep = self.turning, self.p.lengths, self.recipe.deep_first
        while turning and turning[0][0] <= self.now:
            _, m, order = turning.popleft()
            heapq.heappush(self.turned, (-lengths[m] if deep else 0, order, m))
        descending = self.descending
        return bool(self.turned or (descending and descending[0][0] <= self.now))

    def _run_forward(self, place: int) -> None:
        p, ring = self.p, self.ring
        if place < 0:
            m, v = self.starts[self.started], 0
            self.started += 1
            self.next_start += ring.interval
            self.reserved += p.lengths[m]
        else:
            _, m, v = self.returning[place]
            del self.returning[place]
        base = m * p.width + v
        self.forwards.append(base)
        self.forward_times.append(self.now)
        self.now += self.forward[v]
        if v + 1 < p.lengths[m]:
            extra = ring.slack_forward if self.backwards else 0.0
            self.returning.append((self.now + ring.forward[v] + extra, m, v + 1))
        elif not p.forward_only:
            self.turning.append((self.now + ring.turn[v], m, len(self.forwards)))
        if self.headed[v]:
            if self.recipe.eager_heads:
                self.now += self.head
            else:
                self.heads.append(base)
        if not p.forward_only:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            if self.safe is not None:
                self.safe.forward(m)

    def _run_backward(self) -> None:
        p, ring, turned, descending = self.p, self.ring, self.turned, self.descending
        if descending and descending[0][0] <= self.now:
            deeper = self.recipe.deep_first and turned
            fresh = bool(deeper) and p.lengths[turned[0][2]] > descending[0][2] + 1
        else:
            fresh = True
        if fresh:
            m = heapq.heappop(turned)[2]
            v = p.lengths[m] - 1
        else:
            _, m, v = descending.popleft()
        base = m * p.width + v
        if self.headed[v] and not self.recipe.eager_heads and base in self.heads:
            self.heads.remove(base)
            self.now += self.head
        self.backwards.append(base)
        self.backward_times.append(self.now)
        self.now += self.backward[v]
        self.in_flight -= 1
        self.reserved -= 1
        if v:
            forwards_left = self.returning or self.started < len(self.starts)
            extra = ring.slack_backward if forwards_left else 0.0
            descending.append((self.now + ring.backward[v] + extra, m, v - 1))
        if self.safe is not None:
            self.safe.backward(m)

    def _wait(self) -> bool:
        """Pass to the next arrival; whether there is one."""
        now = self.now
        times = [time for time, *_ in self.returning if time > now][:1]
        times += [queue[0][0] for queue in (self.descending, self.turning) if queue]
        if self.started < len(self.starts) and self.next_start > now:
            times.append(self.next_start)
        if not times:
            return False
        self.now = min(times)
        return True


class _Safe:
    """Which forwards keep the rank able to finish every micro-batch under the cap.

    The micro-batches are to be finished in the order of their starts: for each one whose forward
    has begun and is not complete, its full need and what the later ones hold must fit together.
    """

    def __init__(self, p: Problem, starts: list[int], cap: int) -> None:
        self.cap, self.lengths, self.longest = cap, p.lengths, p.width
        self.place = {m: i for i, m in enumerate(starts)}
        self.held: dict[int, int] = {}  # in the order of the starts
        self.ahead: dict[int, int] = {}  # forwards to come

    def allows(self, m: int, in_flight: int) -> bool:
        """Whether one more activation of `m` leaves a way to finish all."""
        if in_flight + self.longest < self.cap:
            return True
        if in_flight >= self.cap:
            return False
        place, later = self.place[m], 1
        for other, held in reversed(self.held.items()):
            if (
                self.place[other] < place
                and self.ahead[other]
                and self.lengths[other] + later > self.cap
            ):
                return False
            later += held
        return True

    def first_allowed(
        self, returning: deque[tuple[float, int, int]], now: float, in_flight: int
    ) -> int | None:
        """Place of the first arrived forward that is allowed; None if none is."""
        for place, (time, m, _) in enumerate(returning):
            if time > now:
                break
            if self.allows(m, in_flight):
                return place
        return None

    def forward(self, m: int) -> None:
        if m not in self.held:
            self.held[m], self.ahead[m] = 0, self.lengths[m]
        self.held[m] += 1
        self.ahead[m] -= 1

    def backward(self, m: int) -> None:
        self.held[m] -= 1
        if not self.held[m]:
            del self.held[m], self.ahead[m]
