"""Which candidates are tried, in which order, and for how long.

The effort is counted in actions, never in seconds: all ranks of a run must find the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalatent.passes.bounds import problem_bound, problem_flush
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Action
from megalatent.passes.problem import Problem, score
from megalatent.passes.strategies.greedy import greedy
from megalatent.passes.strategies.orders import one_by_one, pass_by_pass
from megalatent.passes.strategies.projection import project
from megalatent.passes.strategies.woven import Recipe, Weave, group_size, slack_of, weave

__all__ = ["best_lists", "search"]

#: Effort for any plan, and more for each of its actions; one unit is about a microsecond.
_LEAST_EFFORT = 15_000
_EFFORT = 5
#: Effort of making and scoring a candidate, per action, and of one run of the woven model.
_WOVEN, _GREEDY, _FIXED, _MODEL = 1.8, 6.0, 1.2, 1.3
#: Rules for greedy plans, best ones first; under a cap with what is let in, as a share of it.
_GREEDY_FREE = (("tail", None), ("progress", None), ("backward", None), ("forward", None))
_GREEDY_CAPPED = (
    ("forward", 1.25),
    ("backward", 1.25),
    ("forward", None),
    ("tail", 1.25),
    ("progress", None),
    ("tail", None),
)
#: A makespan this close to the bound is at the bound (floating-point sums differ in order).
_AT_BOUND = 1 + 1e-9
#: A plan may take this much longer than the fastest one if it needs less memory.
_NEARLY = 1.002


@dataclass(frozen=True)
class _Candidate:
    name: str
    makespan: float
    peak: int
    lists: list[list[int]]


class _Pool:
    """The candidates that have been scored."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.bound, self.held = problem_bound(p)
        #: what is as good as the bound; with equal stages and uniform K plans meet it exactly
        self.limit = self.bound * (_AT_BOUND if _even(p) else _NEARLY)
        self.effort = float(_LEAST_EFFORT + _EFFORT * p.size)
        self.fastest = float("inf")
        self.candidates: list[_Candidate] = []

    @property
    def done(self) -> bool:
        """Whether no plan could be worth more time."""
        return self.fastest <= self.limit

    def offer(self, name: str, lists: list[list[int]], heads: str, effort: float) -> float:
        """Score a candidate; its makespan, or infinity if it does not work."""
        self.effort -= effort * self.p.size
        found = score(self.p, lists, heads)
        if found is None or len(found.last) + sum(map(len, lists[:-1])) < self.p.size:
            return float("inf")
        self.fastest = min(self.fastest, found.makespan)
        if found.makespan <= self.fastest * _NEARLY:
            lists = [*lists[:-1], found.last]
            self.candidates.append(_Candidate(name, found.makespan, max(found.peaks), lists))
        return found.makespan

    def best(self) -> _Candidate:
        """The least memory among the plans that are (nearly) the fastest.

        What is given away for memory never makes a plan slower than one with flushes.
        """
        chosen = self._least(self.limit if self.done else self.fastest * _NEARLY)
        if chosen.makespan > self.fastest and chosen.makespan > problem_flush(self.p):
            chosen = self._least(self.fastest)
        return chosen

    def _least(self, most: float) -> _Candidate:
        fast = [c for c in self.candidates if c.makespan <= most]
        return min(fast, key=lambda c: (c.peak, c.makespan))


def best_lists(
    stages: int,
    chunks: int,
    passes: tuple[int, ...],
    costs: Costs,
    cap: int | None,
    forward_only: bool,
) -> tuple[str, tuple[tuple[Action, ...], ...]]:
    """Name of the winning strategy and each rank's actions, for `passes` in descending order."""
    p = Problem(stages, chunks, passes, costs, cap, forward_only)
    name, lists = search(p)
    # One object for each action, shared by all ranks.
    known: dict[int, Action] = {}
    for code in lists[-1]:
        m, v = divmod(code >> 2, p.width)
        known[code] = Action("FBH"[code & 3], m, v // chunks + 1, v % chunks)
    return name, tuple(tuple([known[code] for code in codes]) for codes in lists)


def search(p: Problem) -> tuple[str, list[list[int]]]:
    """Name and lists of the best plan found."""
    pool = _Pool(p)
    if p.stages == 1 or len(p.lengths) == 1:
        pool.offer("one by one", one_by_one(p), "given", _FIXED)
    else:
        _woven(p, pool)
        if not pool.done:
            _greedy(p, pool)
        fits = p.cap is None or sum(p.lengths) <= p.cap
        if fits and not pool.done and pool.fastest > problem_flush(p):
            pool.offer("pass by pass", pass_by_pass(p), "given", _FIXED)
        if not pool.candidates:
            pool.offer("one by one", one_by_one(p), "given", _FIXED)
    chosen = pool.best()
    return chosen.name, chosen.lists


def _greedy(p: Problem, pool: _Pool) -> None:
    for rule, share in _GREEDY_CAPPED if p.cap is not None else _GREEDY_FREE:
        if pool.effort <= 0 or pool.done:
            return
        admit = None if share is None or p.cap is None else share * p.cap
        pool.offer(f"greedy, {rule} first", greedy(p, rule, admit=admit), "given", _GREEDY)
    seed = 0
    while pool.effort > 0 and not pool.done:
        admit = None if p.cap is None else 1.25 * p.cap
        lists = greedy(p, "tail", seed=seed, admit=admit)
        pool.offer("greedy, blurred", lists, "given", _GREEDY)
        seed += 1


def _woven(p: Problem, pool: _Pool) -> None:
    """Woven plans: one at the bound, then one with less memory; else what looks fastest."""
    half = pool.effort / 2  # the rest is left for the greedy strategies
    reached = 0
    for recipe in _sure(p):
        if recipe.target <= reached:
            continue  # the rank had as many in flight without being asked to
        woven = _model(p, pool, recipe)
        if woven is None or woven.makespan > pool.limit:
            continue
        reached = woven.in_flight
        _offer(p, pool, woven)
        if pool.done:
            if not _even(p):
                _lighten(p, pool, half)
            return
        if pool.effort < half:
            return
    for woven in _fastest(p, pool):
        if pool.effort < half or pool.done:
            return
        _offer(p, pool, woven)


def _sure(p: Problem) -> Iterator[Recipe]:
    """Recipes that reach the bound in most cases, with little memory first."""
    last, stages = p.stages - 1, p.stages
    most = p.cap if p.cap is not None else sum(p.lengths)
    targets = [1, stages // 2, stages, 2 * stages, 3 * stages, p.width * stages]
    group = 0
    if _uniform(p):
        # Interleaved 1F1B over groups: when the first group is through, its backwards begin.
        group = group_size(p)
        groups = max(1, len(p.lengths) // group)
        targets[0] = (p.width - 1) * -(-len(p.lengths) // groups) + 1
    for target in sorted({min(max(1, n), most) for n in targets if n >= targets[0]}):
        yield Recipe(last, "longest", group, target=target)


def _lighten(p: Problem, pool: _Pool, until: float) -> None:
    """Look for a plan at the bound with less memory than the one there is."""
    model_until = (pool.effort + until) / 2
    found: list[Weave] = []
    peak = float(pool.best().peak)
    for recipe in _recipes(p):
        slope = slack_of(p, recipe.in_slots).slope
        for target in _targets(p, pool, recipe.rank):
            if target + slope >= peak or pool.effort < model_until:
                break
            woven = _model(p, pool, replace(recipe, target=target))
            if woven is not None and woven.makespan <= pool.limit and woven.peak < peak:
                found.append(woven)
                peak = woven.peak
                break
    best = pool.best().peak
    for woven in reversed(found):
        if pool.effort < until or pool.best().peak < best:
            return
        _offer(p, pool, woven)


def _fastest(p: Problem, pool: _Pool) -> list[Weave]:
    """Weaves in the order of the makespan that the model expects."""
    until = pool.effort * 0.7
    shares = (1.0, 1.3, 1.6, 2.0, None) if p.cap is not None else (None,)
    found = []
    for recipe in _recipes(p):
        targets = _targets(p, pool, recipe.rank)[::3] if p.cap is None else [1]
        for target in targets:
            for share in shares:
                if pool.effort < until:
                    break
                admit = None if share is None or p.cap is None else share * p.cap
                woven = _model(p, pool, replace(recipe, target=target, admit=admit))
                if woven is not None:
                    found.append(woven)
    return sorted(found, key=lambda woven: (woven.makespan, woven.peak))


def _model(p: Problem, pool: _Pool, recipe: Recipe) -> Weave | None:
    pool.effort -= _MODEL * 2 * sum(p.lengths)
    return weave(p, recipe)


def _offer(p: Problem, pool: _Pool, woven: Weave) -> float:
    recipe = woven.recipe
    name = f"woven, {recipe.starts} first" if recipe.starts == "longest" else "woven, spread"
    if _uniform(p) and recipe.group:
        name = "1F1B" if p.width == 1 else "grouped interleave"
    lists = project(p, woven)
    if recipe.eager_heads or not p.head:
        return pool.offer(name, lists, "early", _WOVEN)
    made = pool.offer(name, lists, "busy", _WOVEN)
    if made > woven.makespan * _AT_BOUND:
        made = min(made, pool.offer(name, lists, "gap", _FIXED))
    return made


def _uniform(p: Problem) -> bool:
    return p.lengths[0] == p.lengths[-1]


def _even(p: Problem) -> bool:
    """Whether all micro-batches and all stages are alike and nothing else takes time."""
    alike = {
        (f, b)
        for fr, br in zip(p.forward, p.backward, strict=True)
        for f, b in zip(fr, br, strict=True)
    }
    return _uniform(p) and len(alike) == 1 and not p.head and not any(p.hops)


def _recipes(p: Problem) -> Iterator[Recipe]:
    uniform = _uniform(p)
    last = p.stages - 1
    busiest = max(range(p.stages), key=lambda r: (p.work[r], r))
    # Where slots leave no slack, both ways are the same.
    ways = (True, False) if any(slack_of(p, True).forward + slack_of(p, True).backward) else (True,)
    for deep in (True, False):
        for rank in sorted({last, busiest}, reverse=True):
            for in_slots in ways:
                for eager in (False, True) if p.head and rank == last else (False,):
                    for group in (group_size(p), 0) if uniform else (0, p.stages):
                        for starts in ("longest",) if uniform else ("spread", "longest"):
                            yield Recipe(rank, starts, group, deep, eager, 1, in_slots)


def _targets(p: Problem, pool: _Pool, rank: int) -> list[int]:
    """Activations in flight on the modelled rank that are worth a try, ascending.

    None below the mean that a plan at the bound must have in flight, none far above what fills the
    ring once with whole micro-batches, except all.
    """
    most = p.cap if p.cap is not None else sum(p.lengths)
    full = p.width * p.stages
    target = max(1.0, pool.held[rank] / pool.bound) if pool.bound else 1.0
    wanted = [full, 2 * full, most]
    while target < full:
        wanted.append(int(target))
        target = max(target + 1, target * 1.12)
    return sorted({n for n in wanted if 1 <= n <= most})
