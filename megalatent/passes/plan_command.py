"""`megalatent plan`: show the schedule of a multi-pass step, its bubble, memory and bound."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megalatent.errors import UserError, describe_os_error
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

#: Every way to divide them is looked at.
_MOST_LAYERS = 10_000


def run_plan_command(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises UserError for a mistake in `args`."""
    try:
        return _run(args)
    except BrokenPipeError:
        raise  # the reader of our output has had enough: no mistake
    except OSError as error:
        raise UserError(f"cannot use {describe_os_error(error) or error}") from None


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
    timeline = ""
    if width != 0 and args.json != "-":
        color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
        timeline = render_timeline(shown.plan, shown.simulation, width=width, color=color)
    values = to_json(shown) | ({} if split is None else {"split": _split_json(*split)})
    in_json = json.dumps(values, indent=2) + "\n"
    _write_files(args, shown, in_json)
    if args.json == "-":
        sys.stdout.write(in_json)
        return 0
    print(table(shown))
    if split is not None:
        print(_split_table(*split))
    if timeline:
        print(f"\n{timeline}")
    return 0


def _write_files(args: argparse.Namespace, shown: Report, in_json: str) -> None:
    from megalatent.passes.plan_files import write_files

    texts: dict[str, tuple[str, str]] = {}
    if args.svg is not None:
        from megalatent.passes.render_svg import render_svg

        title = f"{shown.plan.strategy}: makespan {shown.simulation.makespan:g}"
        svg = render_svg(shown.plan, shown.simulation, title=title, lower_bound=shown.lower_bound)
        texts["--svg"] = args.svg, svg
    if args.csv is not None:
        from megalatent.passes.plan_csv import csv_text

        texts["--csv"] = args.csv, csv_text(shown.plan, shown.simulation)
    if args.json not in (None, "-"):
        texts["--json"] = args.json, in_json
    write_files(texts)


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
    for name in ("seed", "iteration", "draw"):
        if getattr(args, name) is not None:
            raise UserError(f"--check takes the passes from the file; leave --{name} out")
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
    if not 1 <= layers <= _MOST_LAYERS:
        raise UserError(f"--layers is {layers}; give a number from 1 to {_MOST_LAYERS}")
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
        lines.append(f"{'':<15} {_gain(equal, best)}; to use it:")
        lines.append(f"{'':<15} megatron.pipeline_model_parallel_layout: {layout(best.layers)}")
    return "\n".join(lines)


def _gain(equal: Split, best: Split) -> str:
    """What the best split is better at: time, or memory at much the same time."""
    gain = 1 - best.simulation.makespan / equal.simulation.makespan
    if round(gain, 3) > 0:
        return f"{gain:.1%} less time"
    most = (max(split.simulation.peak_in_flight) for split in (best, equal))
    return "the same time, and {} activations at most, not {}".format(*most)
