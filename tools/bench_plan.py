"""How good the planner's plans are, as Markdown tables: against the lower bound and the flush.

    python tools/bench_plan.py            # all tables, some minutes
    python tools/bench_plan.py --quick    # fewer sizes

Makespans, bounds and activations are exact and the same on every machine; only planning times are
measured (processor time, so that other work on the machine counts little).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Sequence

from megalatent.passes.bounds import flush_makespan, lower_bound
from megalatent.passes.costs import Costs
from megalatent.passes.plan import make_plan
from megalatent.passes.plan_options import apportion
from megalatent.passes.simulate import simulate
from megalatent.passes.split import suggest_split

MIXTURES = {
    "K = 1": {1: 1.0},
    "K = 2": {2: 1.0},
    "K = 3": {3: 1.0},
    "75/22/3": {1: 0.75, 2: 0.22, 3: 0.03},
    "34/33/33": {1: 0.34, 2: 0.33, 3: 0.33},
    "90/0/10": {1: 0.9, 3: 0.1},
    "50/0/50": {1: 0.5, 3: 0.5},
}
UNIFORM = ("K = 1", "K = 2", "K = 3")


class Case:
    """One plan and what it is compared with."""

    def __init__(
        self,
        stages: int,
        passes: Sequence[int],
        *,
        chunks: int = 1,
        costs: Costs | None = None,
        cap: int | None = None,
    ) -> None:
        costs = costs or Costs()
        start = time.process_time()
        plan = make_plan(stages, chunks, passes, costs=costs, max_in_flight=cap)
        self.seconds = time.process_time() - start
        found = simulate(plan, costs)
        self.passes = passes
        self.strategy = plan.strategy
        self.makespan = found.makespan
        self.peak = max(found.peak_in_flight)
        self.bubble = found.bubble_fraction
        self.over_bound = found.makespan / lower_bound(
            stages, chunks, passes, costs, max_in_flight=cap
        )
        self.over_flush = found.makespan / flush_makespan(stages, chunks, passes, costs)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def uniform(stages: Sequence[int]) -> None:
    rows = []
    for name in UNIFORM:
        passes = next(iter(MIXTURES[name]))
        for p in stages:
            sizes = [*range(p, 2 * p + 2), 3 * p - 1, 4 * p + 1, 8 * p]
            cases = [Case(p, (passes,) * m) for m in sizes]
            group = -(-sizes[-2] // (sizes[-2] // p))
            rows.append(
                (
                    name,
                    p,
                    f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)",
                    f"{min(c.over_bound for c in cases):.4f}",
                    f"{max(c.over_bound for c in cases):.4f}",
                    f"{cases[-1].peak} ({passes * p})",
                    f"{cases[-2].peak} ({(passes - 1) * group + p})",
                    f"{cases[-1].over_flush:.3f}",
                )
            )
    table(
        "Uniform K, equal stages, b = 2f, V = 1",
        (
            "passes",
            "P",
            "m",
            "best makespan / bound",
            "worst makespan / bound",
            "peak at m = 8P (K P)",
            "peak at m = 4P+1 ((K-1)g+P)",
            "makespan / flush at m = 8P",
        ),
        rows,
    )


def mixed(stages: Sequence[int]) -> None:
    rows = []
    for name, mixture in MIXTURES.items():
        if name in UNIFORM:
            continue
        for p in stages:
            for m in (2 * p, 4 * p, 8 * p):
                case = Case(p, apportion(mixture, m))
                rows.append(
                    (
                        name,
                        p,
                        m,
                        f"{case.over_bound:.4f}",
                        f"{case.over_flush:.3f}",
                        case.peak,
                        max(case.passes) * p,
                        case.strategy,
                    )
                )
    table(
        "Mixed K, equal stages, b = 2f, V = 1",
        (
            "mixture",
            "P",
            "m",
            "makespan / bound",
            "makespan / flush",
            "peak",
            "max K times P",
            "strategy",
        ),
        rows,
    )


def heads() -> None:
    rows = []
    for name in (*UNIFORM, "75/22/3", "34/33/33"):
        passes = apportion(MIXTURES[name], 32)
        for head in (0.5, 1.4):
            costs = Costs(head=3 * head)
            case = Case(8, passes, costs=costs)
            layer = Costs(forward=1 / 3, backward=2 / 3, head=3 * head)
            equal, best = suggest_split(8, 1, passes, 24, layer)
            gain = 1 - best.simulation.makespan / equal.simulation.makespan
            rows.append(
                (
                    name,
                    head,
                    f"{case.over_bound:.4f}",
                    case.peak,
                    " ".join(map(str, best.layers)),
                    f"{best.simulation.makespan / best.lower_bound:.4f}",
                    max(best.simulation.peak_in_flight),
                    f"{gain:.1%}",
                )
            )
    table(
        "The head on the last stage, P = 8, m = 32, 24 layers",
        (
            "passes",
            "head / stage",
            "makespan / bound",
            "peak",
            "suggested layers",
            "its makespan / bound",
            "its peak",
            "less time than 3 each",
        ),
        rows,
    )


def few() -> None:
    rows = []
    for p, m, k in ((8, 1, 3), (8, 2, 2), (8, 4, 3), (8, 7, 2), (16, 5, 2), (16, 12, 3)):
        case = Case(p, (k,) * m)
        rows.append((p, m, k, case.makespan, f"{case.over_bound:.4f}", f"{case.over_flush:.3f}"))
    table(
        "Fewer micro-batches than stages",
        ("P", "m", "K", "makespan", "makespan / bound", "makespan / flush"),
        rows,
    )


def chunks() -> None:
    rows = []
    for p, v, m, k in ((4, 2, 8, 1), (4, 2, 9, 2), (4, 4, 16, 1), (8, 2, 19, 2), (8, 3, 16, 3)):
        case = Case(p, (k,) * m, chunks=v)
        mixed_case = Case(p, apportion(MIXTURES["34/33/33"], 2 * p), chunks=v)
        rows.append(
            (p, v, m, k, f"{case.over_bound:.4f}", case.peak, f"{mixed_case.over_bound:.4f}")
        )
    table(
        "Virtual chunks, equal stages",
        ("P", "V", "m", "K", "makespan / bound", "peak (chunks)", "34/33/33 at m = 2P"),
        rows,
    )


def caps() -> None:
    rows = []
    for name in ("K = 2", "K = 3", "34/33/33"):
        passes = apportion(MIXTURES[name], 32)
        free = Case(8, passes)
        for cap in (None, 22, 18, 14, 12, 8, 4):
            if cap is not None and cap < max(passes):
                continue
            case = Case(8, passes, cap=cap)
            rows.append(
                (
                    name,
                    "none" if cap is None else cap,
                    case.peak,
                    f"{case.makespan / free.makespan:.3f}",
                    f"{case.over_bound:.3f}",
                    case.strategy,
                )
            )
    table(
        "A cap on activations in flight, P = 8, m = 32, equal stages",
        ("passes", "cap", "peak", "makespan / without cap", "makespan / bound", "strategy"),
        rows,
    )


def hand_overs() -> None:
    rows = []
    for name in (*UNIFORM, "75/22/3"):
        for hand_over in (0.0, 0.02, 0.1, 0.5):
            passes = apportion(MIXTURES[name], 32)
            case = Case(8, passes, costs=Costs(hand_over=hand_over))
            rows.append((name, hand_over, f"{case.over_bound:.4f}", case.peak))
    table(
        "Hand-overs that take time (unit: forward of a stage), P = 8, m = 32",
        ("passes", "hand-over", "makespan / bound", "peak"),
        rows,
    )


def unequal(count: int) -> None:
    rows = []
    for spread in (0.05, 0.2, 0.5):
        rng = random.Random(1)
        ratios = []
        for _ in range(count):
            p = rng.choice((4, 8, 16))
            scale = [rng.uniform(1 - spread, 1 + spread) for _ in range(p)]
            costs = Costs(
                forward=tuple(scale),
                backward=tuple(2 * x * rng.uniform(0.95, 1.05) for x in scale),
                head=rng.choice((0.0, 1.5)),
                hand_over=rng.choice((0.0, 0.05)),
                fusion=0.1,
            )
            passes = apportion(MIXTURES[rng.choice(tuple(MIXTURES))], rng.randint(2 * p, 4 * p))
            ratios.append(Case(p, passes, costs=costs).over_bound)
        rows.append(
            (
                f"±{spread:.0%}",
                count,
                f"{statistics.mean(ratios):.4f}",
                f"{statistics.median(ratios):.4f}",
                f"{max(ratios):.4f}",
            )
        )
    table(
        "Unequal stages at random, P = 4, 8, 16, m = 2P to 4P, any mixture",
        ("stages differ by", "cases", "mean makespan / bound", "median", "worst"),
        rows,
    )


def planning(quick: bool) -> None:
    rows = []
    sizes = [(8, 64, "75/22/3"), (8, 64, "34/33/33"), (16, 128, "75/22/3")]
    if not quick:
        sizes += [(64, 1024, "75/22/3"), (64, 1024, "34/33/33")]
    for p, m, name in sizes:
        for what, costs in (
            ("equal stages", Costs()),
            ("head 1.4", Costs(head=4.2)),
            ("hand-over 0.05", Costs(hand_over=0.05)),
        ):
            cases = [Case(p, apportion(MIXTURES[name], m), costs=costs) for _ in range(3)]
            seconds = min(case.seconds for case in cases)
            rows.append(
                (p, m, name, what, f"{1000 * seconds:.0f} ms", f"{cases[0].over_bound:.4f}")
            )
    table(
        "Planning time on one core",
        ("P", "m", "mixture", "costs", "planning", "makespan / bound"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    quick = parser.parse_args().quick
    stages = (2, 4, 8) if quick else (2, 3, 4, 6, 8, 12, 16)
    uniform(stages)
    mixed((4, 8) if quick else (2, 3, 4, 8, 16))
    heads()
    few()
    chunks()
    caps()
    hand_overs()
    unequal(10 if quick else 60)
    planning(quick)


if __name__ == "__main__":
    main()
