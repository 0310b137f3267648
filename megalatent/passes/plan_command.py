"""`megalatent plan`: show the schedule of a multi-pass step, its bubble, memory and bound."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.passes.plan import Plan, make_plan
from megalatent.passes.plan_options import add_plan_parser, read_costs, read_sizes, read_width
from megalatent.passes.plan_report import Report, report, table, to_json
from megalatent.passes.render import render_timeline
from megalatent.passes.strategies import search as _search  # noqa: F401  # its import takes time
from megalatent.passes.validate import PlanError, validate

if TYPE_CHECKING:
    from megalatent.passes.split import Split

__all__ = ["add_plan_parser", "run_plan_command"]


def run_plan_command(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises UserError for a mistake in `args`."""
    try:
        return _run(args)
    except BrokenPipeError:
        raise  # the reader of our output has had enough: no mistake
    except OSError as error:
        raise UserError(f"cannot use {error.filename}: {error.strerror}") from None


def _run(args: argparse.Namespace) -> int:
    columns = shutil.get_terminal_size((120, 24)).columns - 22
    width = read_width(args.width, max(40, columns))
    costs = read_costs(args)
    if not args.suggest_split and (args.layers is not None or args.head_layers is not None):
        raise UserError("--layers and --head-layers go with --suggest-split; add it")
    split = None
    if args.suggest_split:
        split, shown = _split(args, costs)
    elif args.check is not None:
        shown = _checked(args, costs)
    else:
        shown = _planned(args, costs)
    if args.svg is not None:
        from megalatent.passes.render_svg import render_svg

        title = f"{shown.plan.strategy}: makespan {shown.simulation.makespan:g}"
        svg = render_svg(shown.plan, shown.simulation, title=title, lower_bound=shown.lower_bound)
        Path(args.svg).write_text(svg, encoding="utf-8")
    if args.csv is not None:
        from megalatent.passes.plan_csv import write_csv

        write_csv(args.csv, shown.plan, shown.simulation)
    if args.json is not None:
        values = to_json(shown) | ({} if split is None else {"split": _split_json(*split)})
        text = json.dumps(values, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
            return 0
        Path(args.json).write_text(text, encoding="utf-8")
    print(table(shown))
    if split is not None:
        print(_split_table(*split))
    if width != 0:
        color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
        print()
        print(render_timeline(shown.plan, shown.simulation, width=width, color=color))
    return 0


def _planned(args: argparse.Namespace, costs: Costs) -> Report:
    stages, chunks, passes = read_sizes(args)
    start = time.perf_counter()
    plan = make_plan(
        stages,
        chunks,
        passes,
        costs=costs,
        max_in_flight=args.max_in_flight,
        forward_only=args.forward_only,
    )
    seconds = time.perf_counter() - start
    validate(plan, max_in_flight=args.max_in_flight)
    return report(plan, costs, seconds=seconds, max_in_flight=args.max_in_flight)


def _checked(args: argparse.Namespace, costs: Costs) -> Report:
    from megalatent.passes.plan_csv import read_csv

    start = time.perf_counter()
    plan = read_csv(args.check)
    _agree(args, plan)
    try:
        validate(plan, max_in_flight=args.max_in_flight)
    except PlanError as error:
        raise UserError(f"{args.check}: {error}") from None
    seconds = time.perf_counter() - start
    return report(plan, costs, seconds=seconds, max_in_flight=args.max_in_flight)


def _agree(args: argparse.Namespace, plan: Plan) -> None:
    """What is given besides the file must be what the file holds."""
    if args.passes is not None or args.mixture is not None:
        raise UserError("--check takes the passes from the file; leave --passes and --mixture out")
    if args.forward_only and not plan.forward_only:
        raise UserError(f"--forward-only is given, but the plan in {args.check} has backwards")
    for name, value in (
        ("stages", plan.stages),
        ("chunks", plan.chunks),
        ("micro_batches", len(plan.passes)),
    ):
        given = getattr(args, name)
        if given is not None and given != value:
            raise UserError(
                f"--{name.replace('_', '-')} is {given}, but the plan in {args.check} has {value}"
            )


def _split(args: argparse.Namespace, costs: Costs) -> tuple[tuple[Split, Split], Report]:
    from megalatent.passes.split import suggest_split

    if args.check is not None or args.forward_only:
        raise UserError(
            "--suggest-split makes training plans; leave --check and --forward-only out"
        )
    if args.layers is None:
        raise UserError("how many layers? give --layers L with --suggest-split")
    stages, chunks, passes = read_sizes(args)
    layer = _one_layer(costs, stages * chunks, args.layers)
    if args.head_layers is not None:
        if args.head is not None:
            raise UserError("--head and --head-layers both set the cost of the head; give one")
        assert isinstance(layer.forward, float)
        assert isinstance(layer.backward, float)
        head = Costs(head=args.head_layers).head  # refuses what is no cost
        layer = replace(layer, head=head * (layer.forward + layer.backward))
    start = time.perf_counter()
    equal, best = suggest_split(
        stages, chunks, passes, args.layers, layer, max_in_flight=args.max_in_flight
    )
    seconds = time.perf_counter() - start
    shown = report(best.plan, best.costs, seconds=seconds, max_in_flight=args.max_in_flight)
    return (equal, best), shown


def _one_layer(costs: Costs, parts: int, layers: int) -> Costs:
    """Stage costs are those of a virtual stage with `layers / parts` layers."""
    if layers < 1:
        raise UserError(f"--layers is {layers}; it must be at least 1")
    named = ("forward", "backward", "extra_forward", "extra_backward")
    values: dict[str, Any] = {}
    for name in named:
        value = getattr(costs, name)
        if isinstance(value, tuple):
            raise UserError(
                f"the cost {name} is a list; --suggest-split needs one number, for a stage of the "
                "equal split"
            )
        values[name] = value * parts / layers
    return replace(costs, **values)


def _split_json(equal: Split, best: Split) -> dict[str, Any]:
    from megalatent.passes.split import layout

    return {
        name: {
            "layers": list(split.layers),
            "makespan": split.simulation.makespan,
            "lower_bound": split.lower_bound,
            "peak_in_flight": list(split.simulation.peak_in_flight),
            "pipeline_model_parallel_layout": layout(split.layers),
        }
        for name, split in (("equal", equal), ("suggested", best))
    }


def _split_table(equal: Split, best: Split) -> str:
    from megalatent.passes.split import layout

    lines = []
    for name, split in (("equal split", equal), ("suggested split", best)):
        counts = " ".join(map(str, split.layers))
        lines.append(f"{name:<15} {counts}   makespan {split.simulation.makespan:.6g}")
    if best.layers == equal.layers:
        lines.append(f"{'':<15} nothing beats the equal split")
    else:
        gain = 1 - best.simulation.makespan / equal.simulation.makespan
        lines.append(f"{'':<15} {gain:.1%} less time; to use it:")
        lines.append(f"{'':<15} megatron.pipeline_model_parallel_layout: {layout(best.layers)}")
    return "\n".join(lines)
