"""Options of `megalatent plan`, and what they say: sizes, passes and costs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from megalatent.config_schedule import read_mixture
from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.passes.plan import MOST_ACTIONS
from megalatent.passes.render import MOST_COLUMNS

__all__ = ["Sizes", "add_plan_parser", "apportion", "read_costs", "read_sizes", "read_width"]

_DESCRIPTION = """\
Plans one step with several passes over a pipeline ring, runs the plan on paper, and compares it
with passes separated by pipeline flushes and with a lower bound that no plan can beat.
"""
_EXAMPLES = """\
examples:
  megalatent plan --stages 8 --micro-batches 32 --passes 2
  megalatent plan --stages 8 --micro-batches 32 --mixture 1:0.75,2:0.22,3:0.03 --svg plan.svg
  megalatent plan --stages 4 --passes 3,2,2,1,1,1,1,1 --head 1.5 --max-in-flight 10
  megalatent plan --stages 8 --micro-batches 32 --passes 2 --head 4.2 --suggest-split --layers 24
  megalatent plan --check plan.csv
"""

Sizes = tuple[int, int, tuple[int, ...]]  # stages, chunks, passes of each micro-batch


def add_plan_parser(subparsers: Any) -> None:
    """Register the command and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="show a pipeline schedule with several passes, its bubble and memory",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what to plan").add_argument
    add("--stages", type=int, metavar="P", help="pipeline stages (ranks of the ring)")
    add("--chunks", type=int, metavar="V", help="virtual chunks of each stage (default 1)")
    add("--micro-batches", type=int, metavar="M", help="micro-batches of the step")
    add("--passes", nargs="+", metavar="K", help="passes: one number, or one per micro-batch")
    add(
        "--mixture",
        metavar="K:SHARE,…",
        help="shares of K, for example 1:0.75,2:0.22,3:0.03; the micro-batches are divided by the "
        "largest remainder",
    )
    add("--seed", type=int, help="instead draw K from the mixture as training with this seed does")
    add("--iteration", type=int, metavar="N", help="… in this iteration (default 0)")
    add(
        "--draw",
        choices=("batch", "micro_batch"),
        help="… one K per batch or one per micro-batch, as latent.passes.draw (default "
        f"{_default_draw()})",
    )
    add("--max-in-flight", type=int, metavar="N", help="most activations a stage may hold")
    add("--forward-only", action="store_true", help="plan an evaluation step")
    add("--check", metavar="FILE.csv", help="check a plan from a CSV file instead of making one")
    _add_costs(parser.add_argument_group("costs, all in one unit of time").add_argument)
    add = parser.add_argument_group("layers").add_argument
    add("--suggest-split", action="store_true", help="compare the equal split with better ones")
    add("--layers", type=int, metavar="L", help="layers of the model, for --suggest-split")
    add("--head-layers", type=float, metavar="N", help="cost of the head in layers (sets --head)")
    add = parser.add_argument_group("output").add_argument
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="JSON, in place of the table or to FILE",
    )
    add("--svg", metavar="FILE", help="draw the timeline")
    add("--csv", metavar="FILE", help="write the actions, one per row")
    add(
        "--width",
        metavar="N",
        help="columns of the timeline in the terminal; 0 leaves it out, `full` shows every action",
    )
    add("--color", choices=("auto", "always", "never"), default="auto", help="(default auto)")


def _add_costs(add: Any) -> None:
    add("--costs", metavar="FILE", help="JSON file with costs by name; options go before it")
    several = "a number, or one per stage (or virtual stage) with commas"
    add("--forward", metavar="T", help=f"forward of a stage: {several} (default 1)")
    add("--backward", metavar="T", help="backward of a stage, likewise (default 2)")
    add("--head", metavar="T", help="logits, loss and their backward (default 0)")
    add("--hand-over", metavar="T", help="from one stage to the next (default 0)")
    add("--embedding", metavar="T", help="first stage, forward of pass 1 (default 0)")
    add("--embedding-backward", metavar="T", help="first stage, backward of pass 1 (default 0)")
    add("--fusion", metavar="T", help="first stage, forward of later passes (default 0)")
    add("--fusion-backward", metavar="T", help="first stage, backward of later passes (default 0)")
    add("--extra-forward", metavar="T", help="each stage, forward of later passes (default 0)")
    add("--extra-backward", metavar="T", help="each stage, backward of later passes (default 0)")


def read_sizes(args: argparse.Namespace) -> Sizes:
    """Stages, chunks and the passes of each micro-batch. Raises UserError."""
    if args.stages is None:
        raise UserError("how many stages? give --stages P")
    if (args.passes is None) == (args.mixture is None):
        raise UserError("how many passes? give --passes K or --mixture K:SHARE,… (one of them)")
    if args.micro_batches is not None and args.micro_batches < 1:
        raise UserError(f"--micro-batches is {args.micro_batches}; it must be at least 1")
    if args.micro_batches is not None and args.micro_batches > MOST_ACTIONS:
        raise UserError(
            f"--micro-batches is {args.micro_batches}; a plan has at most {MOST_ACTIONS} "
            "actions; plan a smaller step"
        )
    if args.mixture is None:
        if (args.seed, args.iteration, args.draw) != (None, None, None):
            raise UserError("--seed, --iteration and --draw go with --mixture")
        passes = _listed(args.passes, args.micro_batches)
    else:
        passes = _mixed(args)
    return args.stages, 1 if args.chunks is None else args.chunks, passes


def _listed(given: Sequence[str], micro_batches: int | None) -> tuple[int, ...]:
    words = [word for text in given for word in text.split(",") if word]
    try:
        passes = tuple(int(word) for word in words)
    except ValueError:
        raise UserError(
            f"--passes is {' '.join(given)[:80]}; give whole numbers, for example 2 or 1,1,3"
        ) from None
    if micro_batches is None or len(passes) == micro_batches:
        if micro_batches is None and len(passes) == 1:
            raise UserError("how many micro-batches? give --micro-batches M")
        return passes
    if len(passes) == 1:
        return passes * micro_batches
    raise UserError(
        f"--passes lists {len(passes)} micro-batches, but --micro-batches is {micro_batches}; make "
        "them agree, or leave --micro-batches out"
    )


def _mixed(args: argparse.Namespace) -> tuple[int, ...]:
    if args.micro_batches is None:
        raise UserError("how many micro-batches? give --micro-batches M")
    shares: dict[int, float] = {}
    for part in args.mixture.split(","):
        k, _, share = part.partition(":")
        try:
            number, value = int(k), float(share)
        except ValueError:
            raise UserError(
                f"--mixture has {part!r}; give K:SHARE pairs, for example 1:0.75,2:0.25"
            ) from None
        if number in shares:
            raise UserError(f"--mixture names {number} passes twice; give each K once")
        shares[number] = value
    mixture = read_mixture(shares, "--mixture")
    if args.seed is None:
        if args.iteration is not None or args.draw is not None:
            raise UserError("--iteration and --draw go with --seed")
        return apportion(mixture, args.micro_batches)
    from megalatent.passes.sampling import PassSampler

    iteration = args.iteration or 0
    if not 0 <= iteration < 2**63:
        raise UserError(f"--iteration is {iteration}; it counts from 0 to 2**63 - 1")
    sampler = PassSampler(
        [(0, mixture)],
        train_iters=iteration + 1,
        seed=args.seed,
        draw=args.draw or _default_draw(),
    )
    return tuple(sampler.passes(iteration, args.micro_batches))


def _default_draw() -> Literal["batch", "micro_batch"]:
    """What training does where the config does not say."""
    from megalatent.config_latent import PassesConfig

    return PassesConfig().draw


def apportion(mixture: Mapping[int, float], count: int) -> tuple[int, ...]:
    """K of `count` micro-batches, ascending, in the shares of the mixture (largest remainder)."""
    total = sum(mixture.values())
    quotas = {k: share * count / total for k, share in mixture.items()}
    numbers = {k: int(quota + 1e-9) for k, quota in quotas.items()}
    left = count - sum(numbers.values())
    for k in sorted(quotas, key=lambda k: (numbers[k] - quotas[k], k))[:left]:
        numbers[k] += 1
    return tuple(k for k in sorted(numbers) for _ in range(numbers[k]))


def read_costs(args: argparse.Namespace) -> Costs:
    """The costs of the file with those of the options put in. Raises UserError or OSError."""
    costs = Costs.load(args.costs) if args.costs is not None else Costs()
    given: dict[str, Any] = {}
    for field in fields(Costs):
        text = getattr(args, field.name)
        if text is None:
            continue
        try:
            numbers = tuple(float(word) for word in text.split(","))
        except ValueError:
            option = "--" + field.name.replace("_", "-")
            raise UserError(
                f"{option} is {text!r}; give a number, or several with commas"
            ) from None
        given[field.name] = numbers[0] if len(numbers) == 1 else numbers
    return replace(costs, **given) if given else costs


def read_width(text: str | None, otherwise: int) -> int | None:
    """Columns of the timeline; 0 for no timeline, None for the full one."""
    if text is None:
        return otherwise
    if text == "full":
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"--width is {text!r}; give a number of columns, 0 or full")
    # Leading zeros aside, a number with more digits is larger; Python refuses to read long ones.
    if len(text.lstrip("0")) > len(str(MOST_COLUMNS)) or int(text) > MOST_COLUMNS:
        raise UserError(f"--width is {text[:20]}; give {MOST_COLUMNS} columns at most, or full")
    return int(text)
