"""Plans of multi-pass steps on a ring of pipeline stages: what each rank does, in which order.

A micro-batch with K passes is one chain of forward visits, for k in 1..K, for chunk in 0..V-1, for
rank in 0..P-1, and its backward is the same chain reversed. The head of a pass (logits, loss and
their backward at once) is an action of its own on the last rank, so that the state of the pass
leaves before the head runs. The rules of the chain are written once, here: the validator, the
simulator and the executor ask `next_forward`, `next_backward` and `dependencies`.

Nothing here imports torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megalatent.errors import UserError
from megalatent.passes.costs import Costs

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = [
    "MOST_ACTIONS",
    "Action",
    "Costs",
    "Plan",
    "Planner",
    "check_sizes",
    "dependencies",
    "make_plan",
    "next_backward",
    "next_forward",
    "previous_backward",
    "previous_forward",
]

#: Beyond this a plan would take minutes and gigabytes; the largest in use are far below.
MOST_ACTIONS = 10_000_000


class Action(NamedTuple):
    """One entry of a rank's list.

    Attributes:
        kind: "F" forward, "B" backward, "H" head (last rank and last chunk only).
        micro_batch: 0-based.
        k: pass, 1-based.
        chunk: virtual chunk of the rank, 0-based.
    """

    kind: str
    micro_batch: int
    k: int
    chunk: int

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind}(micro-batch {self.micro_batch}, pass {self.k}{chunk})"


@dataclass(frozen=True)
class Plan:
    """The lists of actions of all ranks of a ring for one step.

    Attributes:
        stages: ranks of the ring, P.
        chunks: virtual chunks of each rank, V.
        passes: K of each micro-batch.
        strategy: how the plan was found.
        actions: one tuple per rank, in execution order.
        forward_only: the plan has no backward and holds no activations.
    """

    stages: int
    chunks: int
    passes: tuple[int, ...]
    strategy: str
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def maker(self, action: Action, rank: int) -> tuple[int, Action] | None:
        """The (rank, action) that makes the input of `action` on `rank`; None if nobody does."""
        if action.kind == "H":
            return None
        before = previous_forward if action.kind == "F" else previous_backward
        return before(action, rank, self)

    def source(self, action: Action, rank: int) -> int | None:
        """The rank that hands over the input of `action` on `rank`; None if nobody does."""
        found = self.maker(action, rank)
        return None if found is None else found[0]


def next_forward(action: Action, rank: int, plan: Plan) -> tuple[int, Action] | None:
    """Where the output of forward `action` on `rank` goes: (rank, action); None at the end."""
    if rank + 1 < plan.stages:
        return rank + 1, action
    if action.chunk + 1 < plan.chunks:
        return 0, action._replace(chunk=action.chunk + 1)
    if action.k < plan.passes[action.micro_batch]:
        return 0, action._replace(k=action.k + 1, chunk=0)
    return None


def previous_forward(action: Action, rank: int, plan: Plan) -> tuple[int, Action] | None:
    """Where the input of forward `action` on `rank` comes from; None for a micro-batch's first."""
    if rank > 0:
        return rank - 1, action
    if action.chunk > 0:
        return plan.stages - 1, action._replace(chunk=action.chunk - 1)
    if action.k > 1:
        return plan.stages - 1, action._replace(k=action.k - 1, chunk=plan.chunks - 1)
    return None


def next_backward(action: Action, rank: int, plan: Plan) -> tuple[int, Action] | None:
    """Where the gradient that backward `action` makes on `rank` goes; None at the chain's start."""
    return previous_forward(action, rank, plan)


def previous_backward(action: Action, rank: int, plan: Plan) -> tuple[int, Action] | None:
    """Where the gradient for backward `action` on `rank` comes from; None for the deepest visit."""
    return next_forward(action, rank, plan)


def dependencies(action: Action, rank: int, plan: Plan) -> list[tuple[int, Action]]:
    """All (rank, action) that must be done before `action` may run on `rank`."""
    if action.kind == "F":
        before = previous_forward(action, rank, plan)
        return [] if before is None else [before]
    needed = [(rank, action._replace(kind="F"))]
    if action.kind == "B":
        if rank == plan.stages - 1 and action.chunk == plan.chunks - 1:
            needed.append((rank, action._replace(kind="H")))
        after = previous_backward(action, rank, plan)
        if after is not None:
            needed.append(after)
    return needed


def make_plan(
    stages: int,
    chunks: int,
    passes: Sequence[int],
    *,
    costs: Costs | None = None,
    max_in_flight: int | None = None,
    forward_only: bool = False,
) -> Plan:
    """The best plan that the strategies find, the same on every rank for the same arguments.

    The search has no time limit that could differ between ranks: its effort is counted in actions.

    Args:
        stages: pipeline ranks P.
        chunks: virtual chunks V of each rank.
        passes: K of each micro-batch.
        costs: durations; by default forward 1, backward 2 and nothing else on every stage.
        max_in_flight: most activations (chunk visits between forward and backward) a rank may hold.
        forward_only: for evaluation: forwards and heads.

    Raises:
        UserError: a number is out of range, or the cap is below one micro-batch's `V * max K`.
    """
    from megalatent.passes.strategies.search import best_lists

    given = check_sizes(stages, chunks, passes, max_in_flight, forward_only)
    ordered = tuple(sorted(given, reverse=True))
    strategy, actions = best_lists(
        stages, chunks, ordered, costs or Costs(), max_in_flight, forward_only
    )
    return _relabel(Plan(stages, chunks, ordered, strategy, actions, forward_only), given)


def check_sizes(
    stages: int,
    chunks: int,
    passes: Sequence[int],
    max_in_flight: int | None = None,
    forward_only: bool = False,
) -> tuple[int, ...]:
    """The passes; raises UserError for what `make_plan` cannot plan."""
    for name, value in (("stages", stages), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    given = tuple(passes)
    if not given:
        raise UserError("no micro-batches to plan; give at least one")
    for micro_batch, count in enumerate(given):
        if count < 1:
            raise UserError(f"micro-batch {micro_batch} has {count} passes; it needs at least 1")
    least = chunks * max(given)
    if max_in_flight is not None and max_in_flight < least and not forward_only:
        raise UserError(
            f"max_in_flight is {max_in_flight}, but one micro-batch with {max(given)} passes "
            f"holds {least} activations on each rank; give at least {least}"
        )
    size = 2 * stages * chunks * sum(given)
    if size > MOST_ACTIONS:
        raise UserError(
            f"a plan for {stages} stages, {chunks} chunk(s) and {sum(given)} passes in all has "
            f"{size} actions, more than {MOST_ACTIONS}; plan a smaller step"
        )
    return given


def _relabel(plan: Plan, passes: tuple[int, ...]) -> Plan:
    """A plan for descending K, with its micro-batches renamed to have the K of `passes`."""
    if plan.passes == passes:
        return plan
    names = sorted(range(len(passes)), key=lambda i: (-passes[i], i))
    renamed: dict[Action, Action] = {}
    for action in plan.actions[-1]:
        renamed[action] = Action(action.kind, names[action.micro_batch], action.k, action.chunk)
    actions = tuple(tuple([renamed[action] for action in rank]) for rank in plan.actions)
    return replace(plan, passes=passes, actions=actions)


class Planner:
    """Plans for the steps of a run: each multiset of K is planned once, if possible ahead of time.

    Micro-batches with the same K are alike to a plan, so the cache is keyed by the sorted list of
    K; a plan is then renamed to the order at hand. All ranks obtain the same plans.

    Args:
        stages, chunks, costs, max_in_flight: as for `make_plan`.
        keep: plans that are kept; the least recently used goes first.
    """

    def __init__(
        self,
        stages: int,
        chunks: int = 1,
        *,
        costs: Costs | None = None,
        max_in_flight: int | None = None,
        keep: int = 16,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.stages = stages
        self.chunks = chunks
        self.costs = costs or Costs()
        self.max_in_flight = max_in_flight
        self.keep = keep
        self._plans: OrderedDict[tuple[bool, tuple[int, ...]], Future[Plan]] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="planner")

    def prefetch(self, passes: Iterable[int], *, forward_only: bool = False) -> None:
        """Begin to plan in a background thread; errors appear in `get`."""
        key = (forward_only, tuple(sorted(passes, reverse=True)))
        if key not in self._plans:
            self._plans[key] = self._worker.submit(self._make, key)
        self._plans.move_to_end(key)
        while len(self._plans) > self.keep:
            self._plans.popitem(last=False)[1].cancel()

    def get(self, passes: Sequence[int], *, forward_only: bool = False) -> Plan:
        """The plan for micro-batches with these K. Raises UserError as `make_plan` does."""
        self.prefetch(passes, forward_only=forward_only)
        key = (forward_only, tuple(sorted(passes, reverse=True)))
        return _relabel(self._plans[key].result(), tuple(passes))

    def close(self) -> None:
        """Stop the background thread; plans that were not begun are dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _make(self, key: tuple[bool, tuple[int, ...]]) -> Plan:
        forward_only, passes = key
        return make_plan(
            self.stages,
            self.chunks,
            passes,
            costs=self.costs,
            max_in_flight=self.max_in_flight,
            forward_only=forward_only,
        )
