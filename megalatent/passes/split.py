"""How to divide the layers among the stages when the head makes the last one slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalatent.errors import UserError
from megalatent.passes.bounds import lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan, check_sizes, make_plan
from megalatent.passes.simulate import Simulation, simulate

__all__ = ["Split", "equal_split", "layout", "split_candidates", "split_costs", "suggest_split"]

#: Splits that are planned in full; the others are sorted out by their lower bound.
_PLANNED = 6
#: Splits whose plans differ by less are alike; the one with less memory wins.
_LEVEL = 1.002


@dataclass(frozen=True)
class Split:
    """Layers of each virtual stage, in the order in which a micro-batch visits them.

    Attributes:
        layers: index `chunk * stages + rank`.
        lower_bound: of any plan for this split.
        plan, simulation: the best plan found for it.
    """

    layers: tuple[int, ...]
    costs: Costs
    lower_bound: float
    plan: Plan
    simulation: Simulation


def split_costs(layers: Sequence[int], layer: Costs) -> Costs:
    """Costs of stages with so many layers; `forward` and `backward` of `layer` are one layer's."""
    for name in ("forward", "backward", "extra_forward", "extra_backward"):
        if isinstance(getattr(layer, name), tuple):
            raise UserError(
                f"cost {name} is a list; to divide layers among stages give one number, for all "
                "stages of the equal split"
            )

    def times(value: float | tuple[float, ...]) -> tuple[float, ...]:
        assert isinstance(value, float)
        return tuple(n * value for n in layers)

    return replace(
        layer,
        forward=times(layer.forward),
        backward=times(layer.backward),
        extra_forward=times(layer.extra_forward),
        extra_backward=times(layer.extra_backward),
    )


def equal_split(stages: int, chunks: int, layers: int) -> tuple[int, ...]:
    """Layers as even as possible, the first virtual stages taking what is left over."""
    parts = stages * chunks
    if layers < 1:
        raise UserError(f"{layers} layers cannot be divided; give at least 1")
    size, larger = divmod(layers, parts)
    return tuple(size + (i < larger) for i in range(parts))


def suggest_split(
    stages: int,
    chunks: int,
    passes: Sequence[int],
    layers: int,
    layer: Costs,
    *,
    max_in_flight: int | None = None,
) -> tuple[Split, Split]:
    """The equal split and the best one found; they are the same where nothing beats it.

    Args:
        layers: of the whole model.
        layer: `forward` and `backward` of one layer; `head`, `fusion`, … as they are.
        max_in_flight: as for `make_plan`.
    """

    check_sizes(stages, chunks, passes, max_in_flight)

    def planned(split: tuple[int, ...]) -> Split:
        costs = split_costs(split, layer)
        plan = make_plan(stages, chunks, passes, costs=costs, max_in_flight=max_in_flight)
        return Split(split, costs, bound(split), plan, simulate(plan, costs))

    def bound(split: tuple[int, ...]) -> float:
        costs = split_costs(split, layer)
        return lower_bound(stages, chunks, passes, costs, max_in_flight=max_in_flight)

    equal = equal_split(stages, chunks, layers)
    # Among splits with the same bound, the most even one leaves the most room for a good plan.
    candidates = sorted(
        {s for s in split_candidates(stages, chunks, layers) if s != equal},
        key=lambda s: (round(bound(s), 9), sum(n * n for n in s), s),
    )
    plans = [planned(split) for split in [equal, *candidates[:_PLANNED]]]
    fastest = min(split.simulation.makespan for split in plans)
    level = [split for split in plans if split.simulation.makespan <= fastest * _LEVEL]
    return plans[0], min(level, key=lambda split: max(split.simulation.peak_in_flight))


def split_candidates(stages: int, chunks: int, layers: int) -> list[tuple[int, ...]]:
    """Fewer layers on the last virtual stage, and perhaps on the first, the rest divided evenly."""
    parts = stages * chunks
    if parts == 1:
        return []
    size = -(-layers // parts)
    found: list[tuple[int, ...]] = []
    for last in range(size + 1):
        if parts == 2:
            found.append((layers - last, last))
            continue
        for first in range(max(0, size - 2), size + 1):
            inner, larger = divmod(layers - last - first, parts - 2)
            if inner < 0:
                continue
            middle = [inner + (i < larger) for i in range(parts - 2)]
            found.append((first, *middle, last))
            evenly, larger = divmod(layers - last, parts - 1)
            found.append((*(evenly + (i < larger) for i in range(parts - 1)), last))
    return found


def layout(layers: Sequence[int]) -> str:
    """The split as Megatron's `pipeline_model_parallel_layout`: E embedding, t layer, L loss."""
    parts = ["t" * count if count < 4 else f"t*{count}" for count in layers]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)
