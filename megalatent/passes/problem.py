"""The planning problem in numbers: what the strategies search over, and how a result is scored.

Strategies write a rank's list as integers: `code(m, v, kind)` for micro-batch `m` (sorted by
descending K) and virtual pass `v = (k - 1) * chunks + chunk`, counted from 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from megalatent.passes.costs import Costs

__all__ = ["F", "B", "H", "Problem", "Score", "score"]

F, B, H = 0, 1, 2


class Problem:
    """Sizes and durations of one planning problem.

    Attributes:
        lengths: virtual passes (K times chunks) of each micro-batch, descending.
        width: the longest of them; codes are numbered with it.
        forward, backward: durations, `[rank][virtual pass]`.
        hops: hand-over durations, one per edge `rank -> rank + 1`.
        head: duration of a head.
        cap: most activations on a rank, or None.
        work: busy time of each rank.
        size: number of actions of all ranks.
    """

    def __init__(
        self,
        stages: int,
        chunks: int,
        passes: tuple[int, ...],
        costs: Costs,
        cap: int | None = None,
        forward_only: bool = False,
    ) -> None:
        self.stages, self.chunks, self.passes = stages, chunks, passes
        self.forward_only = forward_only
        self.cap = None if forward_only else cap
        self.lengths = [k * chunks for k in passes]
        self.width = width = max(self.lengths)
        ranks, visits = range(stages), [(v // chunks + 1, v % chunks) for v in range(width)]
        self.forward = [
            [costs.forward_time(stages, chunks, r, c, k) for k, c in visits] for r in ranks
        ]
        self.backward = [
            [
                0.0 if forward_only else costs.backward_time(stages, chunks, r, c, k)
                for k, c in visits
            ]
            for r in ranks
        ]
        self.hops = [costs.hand_over_time(stages, r) for r in ranks]
        self.head = costs.head
        counts = [0] * width
        for length in self.lengths:
            counts[length - 1] += 1
        #: micro-batches that have virtual pass v
        self.alive = list(accumulate(reversed(counts)))[::-1]
        self.work = [
            sum(n * (f + b) for n, f, b in zip(self.alive, fr, br, strict=True))
            for fr, br in zip(self.forward, self.backward, strict=True)
        ]
        self.work[-1] += self.head * sum(passes)
        #: times closer than this are the same
        self.eps = 1e-9 * max(self.head, *(max(row) for row in self.forward + self.backward))
        visits_per_rank = sum(self.lengths)
        self.size = visits_per_rank * stages * (1 if forward_only else 2) + sum(passes)

    def code(self, micro_batch: int, virtual_pass: int, kind: int) -> int:
        """The integer that stands for one action in a rank's list."""
        return (micro_batch * self.width + virtual_pass) << 2 | kind

    def has_head(self, virtual_pass: int) -> bool:
        """Whether a head follows this virtual pass on the last rank."""
        return virtual_pass % self.chunks == self.chunks - 1


@dataclass(frozen=True)
class Score:
    """What a set of lists achieves.

    Attributes:
        makespan: end of the last action.
        peaks: most activations in flight on each rank.
        last: the last rank's list with its heads in place.
    """

    makespan: float
    peaks: list[int]
    last: list[int]


def score(p: Problem, lists: list[list[int]], heads: str) -> Score | None:
    """Run the lists in order; None if they block each other or break the cap.

    `heads` says where the last rank's heads go: "given" (they are in the list), "early" (after
    their forward), "gap" (when the rank would wait at least that long, or before their backward),
    "busy" (whenever the rank would wait at all, or before their backward).
    """
    stages, width, chunks, head = p.stages, p.width, p.chunks, p.head
    end_f = [-1.0] * (len(p.lengths) * width * stages + 1)
    end_b = end_f[:] if not p.forward_only else []
    at, clock = [0] * stages, [0.0] * stages
    waits_f, waits_b = [-1] * stages, [-1] * stages
    ready = list(range(stages))
    pending: deque[int] = deque()
    done: list[int] = []
    lengths, last = p.lengths, stages - 1
    least = {"gap": 1.0, "busy": 0.0}.get(heads, 0.0) * head - p.eps
    eps = p.eps
    while ready:
        rank = ready.pop()
        actions, i, now = lists[rank], at[rank], clock[rank]
        forward, backward = p.forward[rank], p.backward[rank]
        hop_in, hop_back = p.hops[rank - 1], p.hops[rank]
        after, before = (rank + 1) % stages, (rank - 1) % stages
        is_last, total = rank == last, len(actions)
        while i < total:
            action = actions[i]
            base = action >> 2
            x, v = base * stages + rank, base % width
            kind = action & 3
            arrives = 0.0
            if kind == F:
                if rank or v:
                    arrives = end_f[x - 1]
                    if arrives < 0:
                        waits_f[rank] = x - 1
                        break
                    arrives += hop_in
            elif kind == B:
                if not is_last or v + 1 < lengths[base // width]:
                    arrives = end_b[x + 1]
                    if arrives < 0:
                        waits_b[rank] = x + 1
                        break
                    arrives += hop_back
                if end_f[x] < 0:
                    return None
            if is_last:
                if kind == B and heads != "given" and v % chunks == chunks - 1:
                    own = base << 2 | H
                    if own in pending:
                        pending.remove(own)
                        now += head
                        done.append(own)
                while pending and arrives - now > eps and arrives - now >= least:
                    done.append(pending.popleft())
                    now += head
                done.append(action)
            if arrives > now:
                now = arrives
            if kind == F:
                now += forward[v]
                end_f[x] = now
                if is_last and heads != "given" and v % chunks == chunks - 1:
                    if heads == "early":
                        now += head
                        done.append(base << 2 | H)
                    else:
                        pending.append(base << 2 | H)
                if waits_f[after] == x:
                    waits_f[after] = -1
                    ready.append(after)
            elif kind == B:
                now += backward[v]
                end_b[x] = now
                if waits_b[before] == x:
                    waits_b[before] = -1
                    ready.append(before)
            else:
                now += head
            i += 1
        at[rank], clock[rank] = i, now
    if any(at[r] < len(lists[r]) for r in range(stages)):
        return None
    while pending:
        done.append(pending.popleft())
        clock[last] += head
    peaks = _peaks(lists)
    if p.cap is not None and max(peaks) > p.cap:
        return None
    return Score(max(clock), [0] * stages if p.forward_only else peaks, done)


def _peaks(lists: list[list[int]]) -> list[int]:
    step = (1, -1, 0)
    return [max(accumulate(step[action & 3] for action in actions)) for actions in lists]
