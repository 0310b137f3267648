"""One small recording that was really measured: three stages, in processes of their own."""

from __future__ import annotations

from functools import cache

from megalatent.passes.costs import Costs
from megalatent.passes.plan import make_plan
from megalatent.profiling.records import Recording
from tests.profiling.sleeping import by_costs, record

_COSTS = Costs(forward=0.004, backward=0.006, head=0.002)


@cache
def measured() -> Recording:
    """Two steps each of K = 1 and of mixed passes."""
    plans = [make_plan(3, 1, passes) for passes in ((1, 1, 1), (2, 1, 3))]
    return record(
        plans,
        [by_costs(plan, _COSTS) for plan in plans],
        steps=2,
        parts=True,
        whole_step=True,
        facts={"model": "synthetic"},
    )
