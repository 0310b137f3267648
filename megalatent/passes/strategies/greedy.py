"""Greedy plans: simulate the ring and let each free rank begin the most urgent action it can."""

from __future__ import annotations

import heapq
from random import Random

from megalatent.passes.problem import B, F, H, Problem

__all__ = ["RULES", "greedy"]

#: How a rank chooses among what it could begin. "tail": the longest remaining way to the end of
#: the step; "progress": what has come furthest on its chain, heads last; "backward": backward, then
#: head, then the deepest forward; "forward": the deepest forward, then head, then backward.
RULES = ("tail", "progress", "backward", "forward")

Ready = tuple[int, float, int]  # class, urgency, action


def greedy(
    p: Problem, rule: str, *, seed: int | None = None, admit: float | None = None
) -> list[list[int]]:
    """Lists of all ranks with heads placed, within the cap.

    Under the cap the micro-batches are to be finished in the order of descending K: a forward of
    another one leaves room for all that the first unfinished one still needs on this rank, so no
    rank can be stuck with its memory full of half-done micro-batches.

    Args:
        rule: one of `RULES`.
        seed: blurs the urgency of each micro-batch, the same way for the same seed.
        admit: under a cap, a micro-batch begins only if all that the begun ones will need (less
            what their backwards have given back) stays below this.
    """
    ring = _State(p, rule, seed, admit)
    events = ring.events
    for length in set(p.lengths):
        ring.offer_fresh(length)
    ring.dispatch(0, 0.0)
    while events:
        now = events[0][0]
        limit = now + p.eps
        touched = set()
        while events and events[0][0] <= limit:
            _, rank, action = heapq.heappop(events)
            if action >= 0:
                ring.offer(rank, action)
            touched.add(rank)
        for rank in sorted(touched):
            ring.dispatch(rank, now)
    return ring.lists


class _State:
    """The ring at one time of the simulation."""

    def __init__(self, p: Problem, rule: str, seed: int | None, admit: float | None) -> None:
        self.p = p
        ranks = range(p.stages)
        self.keys = {length: _keys(p, length, rule) for length in set(p.lengths)}
        random = Random(seed)
        self.blur = [1.0 if seed is None else 1 + 0.3 * random.random() for _ in p.lengths]
        #: micro-batches to begin, in the order in which the memory counts on them
        self.fresh = {
            length: iter([m for m, own in enumerate(p.lengths) if own == length])
            for length in self.keys
        }
        self.events: list[tuple[float, int, int]] = []
        self.forwards: list[list[Ready]] = [[] for _ in ranks]
        self.others: list[list[Ready]] = [[] for _ in ranks]
        self.busy = [0.0] * p.stages
        self.lists: list[list[int]] = [[] for _ in ranks]
        #: inputs that a backward on the last rank waits for, and when the known ones are there
        self.missing: dict[int, tuple[int, float]] = {}
        self.memory = (
            [_Memory(p, admit if r == 0 else None) for r in ranks] if p.cap is not None else []
        )

    def offer(self, rank: int, action: int) -> None:
        """An action has all that it needs to run on `rank`."""
        base, kind = action >> 2, action & 3
        m, v = divmod(base, self.p.width)
        place, rows = self.keys[self.p.lengths[m]][kind]
        heap = self.forwards if kind == F else self.others
        heapq.heappush(heap[rank], (place, rows[rank][v] * self.blur[m], action))

    def offer_fresh(self, length: int) -> None:
        """Let the next micro-batch of this length begin on the first rank."""
        m = next(self.fresh[length], None)
        if m is not None:
            self.offer(0, self.p.code(m, 0, F))

    def dispatch(self, rank: int, now: float) -> None:
        """Begin the best action on `rank`, if it is free and has one."""
        if self.busy[rank] > now + self.p.eps:
            return
        forwards, others = self.forwards[rank], self.others[rank]
        best = None
        if forwards:
            best = self.memory[rank].permitted(forwards) if self.memory else 0
        if best is not None and (not others or forwards[best] <= others[0]):
            action = forwards[best][2]
            if best:
                forwards[best] = forwards[-1]
                forwards.pop()
                heapq.heapify(forwards)
            else:
                heapq.heappop(forwards)
        elif others:
            action = heapq.heappop(others)[2]
        else:
            return
        self._run(rank, action, now)

    def _run(self, rank: int, action: int, now: float) -> None:
        p, last = self.p, self.p.stages - 1
        base, kind = action >> 2, action & 3
        m, v = divmod(base, p.width)
        if kind == F:
            end = now + p.forward[rank][v]
            if not rank and not v:
                self.offer_fresh(p.lengths[m])
            if rank < last:
                self._send(end + p.hops[rank], rank + 1, action)
            else:
                self._leave_last(end, base, v + 1 < p.lengths[m])
        elif kind == B:
            end = now + p.backward[rank][v]
            if rank:
                self._send(end + p.hops[rank - 1], rank - 1, action)
            elif v:
                self._arrive(end + p.hops[last], base - 1)
        else:
            end = now + p.head
            if not p.forward_only:
                self._arrive(end, base)
        if self.memory and kind != H:
            self.memory[rank].note(m, kind)
        self.lists[rank].append(action)
        self.busy[rank] = end
        heapq.heappush(self.events, (end, rank, -1))

    def _leave_last(self, end: float, base: int, more: bool) -> None:
        """A forward on the last rank ends: go round the ring, have the head, turn back."""
        p, last = self.p, self.p.stages - 1
        if more:
            self._send(end + p.hops[last], 0, (base + 1) << 2 | F)
        head = p.has_head(base % p.width)
        if head:
            self._send(end, last, base << 2 | H)
        if not p.forward_only:
            self.missing[base] = (1 + head + more, end)
            self._arrive(end, base)

    def _send(self, time: float, rank: int, action: int) -> None:
        heapq.heappush(self.events, (time, rank, action))

    def _arrive(self, time: float, base: int) -> None:
        """One of the inputs of a backward on the last rank is there at `time`."""
        count, latest = self.missing[base]
        latest = max(latest, time)
        self.missing[base] = (count - 1, latest)
        if count == 1:
            del self.missing[base]
            self._send(latest, self.p.stages - 1, base << 2 | B)


class _Memory:
    """One rank's activations under the cap."""

    def __init__(self, p: Problem, admit: float | None) -> None:
        assert p.cap is not None
        self.cap, self.width, self.lengths = p.cap, p.width, p.lengths
        self.admit = admit
        self.in_flight = 0
        self.reserved = 0  # in flight, or to come from micro-batches that have begun
        self.held = [0] * len(p.lengths)
        self.ahead = list(p.lengths)  # forwards to come
        self.first = 0  # the first micro-batch with forwards to come
        self.before = 0  # held by the micro-batches before it

    def permitted(self, forwards: list[Ready]) -> int | None:
        """Index of the most urgent forward that may begin; None if none may."""
        if self.admit is None and self.in_flight + self.width < self.cap:
            return 0
        if self.in_flight >= self.cap:
            return None
        while not self.ahead[self.first]:
            self.before += self.held[self.first]
            self.first += 1
        first = self.first
        later = self.in_flight - self.before - self.held[first]
        room = self.lengths[first] + later < self.cap

        def allowed(m: int) -> bool:
            return m == first or (room and self._admitted(m))

        if allowed((forwards[0][2] >> 2) // self.width):
            return 0
        places = [i for i, ready in enumerate(forwards) if allowed((ready[2] >> 2) // self.width)]
        return min(places, key=lambda i: forwards[i], default=None)

    def _admitted(self, m: int) -> bool:
        if self.admit is None or self.ahead[m] < self.lengths[m]:
            return True
        return self.reserved + self.lengths[m] <= self.admit

    def note(self, m: int, kind: int) -> None:
        """A forward or backward of micro-batch `m` has begun."""
        if kind == F:
            if self.ahead[m] == self.lengths[m]:
                self.reserved += self.lengths[m]
            self.ahead[m] -= 1
            self.held[m] += 1
            self.in_flight += 1
        else:
            self.held[m] -= 1
            self.in_flight -= 1
            self.reserved -= 1
            if m < self.first:
                self.before -= 1


def _keys(p: Problem, length: int, rule: str) -> list[tuple[int, list[list[float]]]]:
    """For each kind its class and urgency `[rank][virtual pass]`; the smallest goes first."""
    ranks, virtual = range(p.stages), range(length)
    tail_f = [[0.0] * length for _ in ranks]
    tail_b = [[0.0] * length for _ in ranks]
    visits = [(v, r) for v in virtual for r in ranks]
    time = 0.0
    for v, r in visits:
        time += p.backward[r][v] + (p.hops[r - 1] if v or r else 0.0)
        tail_b[r][v] = -time
    time += p.head
    for v, r in reversed(visits):
        time += p.forward[r][v]
        tail_f[r][v] = -time
        time += p.hops[r - 1]
    tail_h = [[x - p.head for x in row] for row in tail_b]
    depth = [[-float(v) for v in virtual] for _ in ranks]
    if rule == "tail":
        return [(0, tail_f), (0, tail_b), (0, tail_h)]
    if rule == "backward":
        return [(2, depth), (0, tail_b), (1, tail_h)]
    if rule == "forward":
        return [(0, depth), (2, depth), (1, depth)]
    progress = [[float(v - 2 * length) for v in virtual] for _ in ranks]
    return [(0, depth), (0, progress), (1, tail_h)]
