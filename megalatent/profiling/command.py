"""`profile`: what passes cost on each pipeline stage, measured; or two profiles compared."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalatent.errors import UserError
from megalatent.passes.plan import check_sizes
from megalatent.passes.plan_options import apportion
from megalatent.profiling.cases import CasePlan, Cases, left_out, profile_overrides, read_cases
from megalatent.profiling.output import Targets, publish, write_json
from megalatent.training.output_files import Staging

if TYPE_CHECKING:
    from megalatent.config import Config
    from megalatent.launch.placement import Joined
    from megalatent.profiling.records import Recording

__all__ = ["add_profile_parser", "run_profile_command"]

_DESCRIPTION = """\
Runs some steps of a training run with 1, 2, … passes in turn, on the data and the layout of its
config, and reports what each pass costs on each pipeline stage, where the rest of a step goes, what
is slow, and which settings would be faster. Nothing is saved, and no weight is kept.
"""
_EXAMPLES = """\
examples:
  megalatent profile run.yaml --passes 1,2,3 --html profile.html
  megalatent profile run.yaml --mixture 1:0.75,2:0.22,3:0.03 --json new.json --costs costs.json
  megalatent profile --compare old.json new.json
"""

# What a rank needs to know besides the config and its overrides.
_OPTIONS = ("steps", "warmup", "passes", "mixture", "replicas", "json", "trace", "html", "costs")

# Of steps: beyond, neither the recording nor the data for it would fit anywhere.
_MOST = 10_000


def add_profile_parser(subparsers: Any) -> None:
    """Add `profile` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profile",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file of the run")
    add = parser.add_argument_group("what to run").add_argument
    add("--steps", type=int, default=10, metavar="N", help="steps of each case (default 10)")
    add("--warmup", type=int, default=2, metavar="N", help="steps of each before (default 2)")
    add("--passes", metavar="K,…", help="cases with K passes (default: 1 to the largest K trained)")
    add("--mixture", metavar="K:SHARE,…", help="a case that mixes K within the step")
    add("--nproc", type=int, metavar="N", help="local processes to start, as for train")
    add(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel replicas to record (default 1)",
    )
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the config; may be repeated",
    )
    add("--start-method", choices=("auto", "fork", "fresh"), default="auto", help="as for train")
    add("--verbose", action="store_true", help="show what Megatron prints; compare all figures")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="all figures and the recording itself")
    add("--trace", metavar="FILE", help="for chrome://tracing, or FILE.pftrace for Perfetto")
    add("--html", metavar="FILE", help="one page with a timeline, to be opened in a browser")
    add("--costs", metavar="FILE", help="measured costs for latent.passes.costs")
    add(
        "--compare",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="instead: what differs between two files of --json, and what of it is noise",
    )


def run_profile_command(args: argparse.Namespace) -> int:
    """Run `profile`; returns the exit status.

    Raises:
        UserError: a mistake in the config or on the command line.
        RankFailure: a rank failed.
        Stopped: stopped by a signal.
    """
    if args.compare is not None:
        return _compare(args)
    if args.config is None:
        raise UserError("what is to be profiled? give a CONFIG, or --compare BEFORE AFTER")
    _check_numbers(args)
    targets = _targets(args)
    from megalatent.launch.placement import find_place
    from megalatent.launch.train_command import join, start

    place = None if args.nproc is not None else find_place(os.environ)
    try:
        if place is None or place.rank == 0:
            targets.check(args.config)
        config, cases, world_size = _load(args, place)
        notes = _check_steps(config, cases, world_size, args.replicas)
    except UserError:
        if place is not None and place.local_rank != 0:
            return 2  # every rank finds the same mistake: one a node says so
        raise

    if place is None or place.rank == 0:
        for note in notes:
            print(f"megalatent: note: {note}", file=sys.stderr, flush=True)

    def profile(own: Config) -> None:
        _profile(own, cases, args, targets)

    if place is None:
        again = _same_command(args)
        start(config, world_size, again=again, method=args.start_method, train=profile)
    else:
        join(config, place, profile)
    return 0


def _load(args: argparse.Namespace, place: Joined | None) -> tuple[Config, Cases, int]:
    """The config, checked, with what profiling changes; the cases; the number of processes."""
    from megalatent.launch.train_command import load_config

    # Files are looked at once it is settled which are used: nothing is saved.
    config, _ = load_config(args, place, [])
    cases = read_cases(config, args.passes, args.mixture)
    changes = profile_overrides(config, CasePlan(cases, args.warmup, args.steps).iterations)
    given = argparse.Namespace(**{**vars(args), "overrides": [*args.overrides, *changes]})
    config, world_size = load_config(given, place)
    return config, cases, world_size


def _check_steps(config: Config, cases: Cases, world_size: int, replicas: int) -> list[str]:
    """What the steps of the cases cannot be as they were asked for, a line each.

    Raises:
        UserError: a step cannot be planned, or there are not so many replicas.
    """
    from megalatent.config_costs import virtual_chunks
    from megalatent.config_megatron import parse
    from megalatent.config_parallel import model_parallel_size

    args = parse(config.megatron_argv())
    there = world_size // model_parallel_size(args)
    if replicas > there:
        raise UserError(
            f"--replicas: {replicas} are to be recorded, and {world_size} processes of this layout"
            f" make {there}: give {there} or fewer"
        )
    together = args.micro_batch_size * there
    count = max(1, (args.global_batch_size or together) // together)
    sizes = args.pipeline_model_parallel_size, virtual_chunks(args)
    for case in cases:
        try:
            check_sizes(*sizes, apportion(case, count), config.latent.passes.max_in_flight)
        except UserError as error:
            raise UserError(f"K = {max(case)}: {error}") from None
    return [
        f"--mixture: none of the {count} micro-batches of a step has K = {k}: too small a share"
        for k in left_out(cases, count)
    ]


def _same_command(args: argparse.Namespace) -> list[str]:
    """The command for a fresh interpreter that is to be one rank of what this one was asked for."""
    command = [sys.executable, "-m", "megalatent.cli", "profile", args.config]
    for override in args.overrides:
        command += ["--set", override]
    for name in _OPTIONS:
        value = getattr(args, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    return [*command, "--verbose"] if args.verbose else command


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("steps", "warmup", "replicas"):
        value = getattr(args, name)
        if value < 1:
            raise UserError(f"--{name}: {value} is too few: give 1 or more")
        if value > _MOST:
            raise UserError(f"--{name}: {value} is too many: give {_MOST} at most")


def _targets(args: argparse.Namespace) -> Targets:
    return Targets(json=args.json, trace=args.trace, html=args.html, costs=args.costs)


def _profile(config: Config, cases: Cases, args: argparse.Namespace, to: Targets) -> None:
    """On every rank: run the steps; the first one publishes what came out."""
    from megalatent.launch.train_command import prepare_rank
    from megalatent.profiling.run import RunProfiler
    from megalatent.training.pretrain import run

    plan = CasePlan(cases, args.warmup, args.steps)
    kept: list[Recording] = []
    missed: list[bool] = []
    profiler = RunProfiler(
        steps=plan.recorded,
        count=plan.counted,
        replicas=args.replicas,
        passes=plan.passes,
        done=kept.append,
        missed=lambda: missed.append(True),
    )
    prepare_rank(config)
    with contextlib.nullcontext() if args.verbose else _quiet():
        try:
            run(config, profiler)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    for recording in kept:
        facts = {**recording.facts, "warmup_steps": args.warmup}
        publish(replace(recording, facts=facts), to)
    if missed:
        raise UserError(
            f"nothing was recorded: the run ended in its first {plan.recorded.start} steps, which"
            " warm up: show why with --verbose"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Standard output is for the report. What Megatron prints comes when it fails."""
    import io
    import logging

    logging.getLogger("megatron").setLevel(logging.ERROR)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except BaseException:
        sys.stderr.write(said.getvalue()[-4000:])
        raise


def _compare(args: argparse.Namespace) -> int:
    from megalatent.profiling.compare import compare_files, table, to_json

    if args.config is not None:
        raise UserError("--compare reads files and runs nothing: leave CONFIG out")
    for name in ("trace", "html", "costs"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name}: goes with a CONFIG, not with --compare: leave it out")
    Targets(json=args.json).check()
    try:
        found = compare_files(*args.compare)
    except OSError as error:
        raise UserError(f"--compare: {error.filename}: {error.strerror}") from None
    print(table(found, every=args.verbose))
    if args.json is not None:
        with Staging() as staging:
            write_json(to_json(found), staging.path(Path(args.json).resolve()), indent=1)
    return 0
