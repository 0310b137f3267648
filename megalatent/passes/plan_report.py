"""What `megalatent plan` tells of a plan: a table and the same as JSON values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalatent.passes.bounds import flush_makespan, lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan
from megalatent.passes.simulate import Simulation, simulate

__all__ = ["Report", "report", "table", "to_json"]


@dataclass(frozen=True)
class Report:
    """A plan with all that is told of it; times in the unit of the costs."""

    plan: Plan
    costs: Costs
    simulation: Simulation
    lower_bound: float
    flush_makespan: float
    planning_seconds: float
    max_in_flight: int | None

    @property
    def bound_bubble_fraction(self) -> float:
        """The bubble that a plan at the lower bound would have."""
        total = self.plan.stages * self.lower_bound
        return max(0.0, 1 - sum(self.simulation.busy) / total) if total else 0.0


def report(plan: Plan, costs: Costs, *, seconds: float, max_in_flight: int | None = None) -> Report:
    """Simulate a valid plan and compute what it is compared with."""
    sizes = (plan.stages, plan.chunks, plan.passes, costs)
    return Report(
        plan,
        costs,
        simulate(plan, costs),
        lower_bound(*sizes, max_in_flight=max_in_flight, forward_only=plan.forward_only),
        flush_makespan(*sizes, forward_only=plan.forward_only),
        seconds,
        max_in_flight,
    )


def to_json(r: Report) -> dict[str, Any]:
    """Plain values by name."""
    return {
        "stages": r.plan.stages,
        "chunks": r.plan.chunks,
        "micro_batches": len(r.plan.passes),
        "passes": list(r.plan.passes),
        "forward_only": r.plan.forward_only,
        "costs": r.costs.to_dict(),
        "max_in_flight": r.max_in_flight,
        "strategy": r.plan.strategy,
        "makespan": r.simulation.makespan,
        "lower_bound": r.lower_bound,
        "flush_makespan": r.flush_makespan,
        "bubble_fraction": r.simulation.bubble_fraction,
        "lower_bound_bubble_fraction": r.bound_bubble_fraction,
        "peak_in_flight": list(r.simulation.peak_in_flight),
        "busy": list(r.simulation.busy),
        "planning_seconds": r.planning_seconds,
    }


def table(r: Report) -> str:
    """The plan in a few lines."""
    plan, makespan = r.plan, r.simulation.makespan
    cap = f" (cap {r.max_in_flight})" if r.max_in_flight is not None else ""
    rows = [
        ("plan", _sizes(plan)),
        ("costs", _costs(r.costs)),
        ("strategy", plan.strategy),
        ("makespan", f"{makespan:.6g}"),
        (
            "lower bound",
            f"{r.lower_bound:.6g}   makespan is {_ratio(makespan, r.lower_bound)} of it",
        ),
        (
            "with flushes",
            f"{r.flush_makespan:.6g}   makespan is {_ratio(makespan, r.flush_makespan)} of it",
        ),
        (
            "bubble",
            f"{r.simulation.bubble_fraction:.1%} of the stages' time   "
            f"({r.bound_bubble_fraction:.1%} at the lower bound)",
        ),
    ]
    if not plan.forward_only:
        peaks = " ".join(map(str, _shortened(r.simulation.peak_in_flight)))
        rows.append(("peak in flight", f"{peaks}   activations per stage{cap}"))
    rows.append(("planned in", f"{1000 * r.planning_seconds:.1f} ms"))
    return "\n".join(f"{name:<15} {text}" for name, text in rows)


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "1.000"


def _shortened(values: tuple[int, ...]) -> list[object]:
    return list(values) if len(values) <= 32 else [*values[:16], "…", *values[-15:]]


def _sizes(plan: Plan) -> str:
    kinds = ", ".join(f"{plan.passes.count(k)} with K = {k}" for k in sorted(set(plan.passes)))
    chunks = f" of {plan.chunks} chunks" if plan.chunks > 1 else ""
    only = ", forward only" if plan.forward_only else ""
    return f"{plan.stages} stages{chunks}, {len(plan.passes)} micro-batches ({kinds}){only}"


def _costs(costs: Costs) -> str:
    def text(value: float | list[float]) -> str:
        if not isinstance(value, list):
            return f"{value:g}"
        if len(set(value)) == 1:
            return f"{value[0]:g}"
        return f"{min(value):g} to {max(value):g}"

    always = ("forward", "backward", "head", "hand_over")
    return ", ".join(
        f"{name.replace('_', '-')} {text(value)}"
        for name, value in costs.to_dict().items()
        if name in always or (any(value) if isinstance(value, list) else value)
    )
