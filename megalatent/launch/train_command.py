"""`train`: check a configuration, then train, in processes of our own or as one of many."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megalatent.errors import UserError
from megalatent.launch.placement import Joined, find_place
from megalatent.launch.rank import LAST_WORDS, work

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = [
    "add_train_parser",
    "default_nproc",
    "join",
    "load_config",
    "prepare_rank",
    "run_train_command",
    "start",
]

_DESCRIPTION = """\
Trains from a config file. Without a launcher it starts its own local processes; started by
torchrun or srun it joins as one of theirs. Everything in the config is checked before any process
starts or any file is written.
"""


def add_train_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the command line."""
    parser = subparsers.add_parser("train", description=_DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", help="YAML file with `latent:` and `megatron:`")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="local processes to start (default: one per GPU; without a GPU as few as the layout"
        " needs)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the config, for example --set megatron.lr=1e-3; may be repeated",
    )
    parser.add_argument(
        "--profile-steps",
        metavar="FIRST-LAST",
        help="profile these steps, for example 100-109, and write PROFILE.json, .html and"
        " .trace.json (latent.profile says where); `megalatent profile` compares passes",
    )
    parser.add_argument(
        "--start-method",
        choices=("auto", "fork", "fresh"),
        default="auto",
        help="fork: ranks come from this process, ready in milliseconds; fresh: each rank imports"
        " everything anew; auto: fork, unless something here has opened CUDA",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the resolved config, an estimate of memory for each number of passes, and"
        " Megatron's command line, and stop",
    )


def run_train_command(args: argparse.Namespace) -> int:
    """Run `train`; returns the exit status.

    Raises:
        UserError: a mistake in the config or on the command line.
        RankFailure: a rank failed.
        Stopped: stopped by a signal.
    """
    if args.profile_steps is not None:
        args.overrides = [*args.overrides, f"latent.profile.steps={args.profile_steps}"]
    place = None if args.nproc is not None else find_place(os.environ)
    try:
        missing: list[str] | None = [] if args.dry_run else None
        config, world_size = load_config(args, place, missing)
    except UserError:
        if place is not None and place.local_rank != 0:
            return 2  # every rank finds the same mistake: one a node says so
        raise
    if not args.dry_run and (place is None or place.rank == 0):
        from megalatent.config_passes import notes

        for note in notes(config):
            print(f"megalatent: note: {note}", file=sys.stderr, flush=True)
    if args.dry_run:
        if place is None or place.rank == 0:
            print(describe_run(config, world_size, missing or ()), end="")
    elif place is None:
        from megalatent.launch.local_lock import folder_for_one_run

        with folder_for_one_run(config.megatron, os.environ):
            start(config, world_size, again=_same_command(args), method=args.start_method)
    else:
        join(config, place)
    return 0


def load_config(
    args: argparse.Namespace, place: Joined | None, missing: list[str] | None = None
) -> tuple[Config, int]:
    """The checked configuration and the number of processes it was checked for.

    Args:
        args: `config` (the path), `overrides` and `nproc`.
        place: in a run that something else has started.
        missing: as for `Config.check`.

    Raises:
        UserError: a mistake in the config or on the command line.
    """
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc: {args.nproc} starts no process: give 1 or more")
    _prepare_imports()
    from megalatent.config import Config

    config = Config.load(args.config, args.overrides)
    try:
        world_size = place.world_size if place else args.nproc or default_nproc(config)
        config.check(world_size, missing=missing)
    except UserError as error:
        raise UserError(f"{args.config}: {error}") from None
    return config, world_size


def _same_command(args: argparse.Namespace) -> list[str]:
    """The command for a fresh interpreter that does what this one was asked to."""
    overrides = [part for override in args.overrides for part in ("--set", override)]
    return [sys.executable, "-m", "megalatent.cli", "train", args.config, *overrides]


def join(config: Config, place: Joined, train: Callable[[Config], None] | None = None) -> None:
    """Do what this rank of a run that something else has started is to do; by default, train."""
    for name, value in {**_connections(config), **place.environment}.items():
        os.environ.setdefault(name, value)
    words_fd = os.environ.pop(LAST_WORDS, None)
    if words_fd is None:
        (train or _train)(config)
    else:
        work(lambda: (train or _train)(config), int(words_fd))


def _prepare_imports() -> None:
    """What must be said before torch is imported."""
    # Counting devices through NVML opens no CUDA context, which the forks below would not survive.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def default_nproc(config: Config) -> int:
    """One process per GPU; without a GPU as few as the layout needs."""
    import torch

    from megalatent.config_megatron import parse
    from megalatent.config_parallel import smallest_world_size

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return smallest_world_size(parse(config.megatron_argv()))


def describe_run(config: Config, world_size: int, missing: Sequence[str] = ()) -> str:
    """The resolved config as YAML, what was filled in, memory, and Megatron's command line.

    Args:
        missing: what must be mended before the run can start.
    """
    import yaml

    text = yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True)
    lines = [f"# {world_size} process{'es' if world_size > 1 else ''}", text.rstrip()]
    if config.filled_in:
        lines += ["", "# filled in, because the config does not say:"]
        lines += [
            f"#   megatron.{name}: {config.megatron[name]} ({reason})"
            for name, reason in config.filled_in.items()
        ]
    from megalatent.config_passes import notes
    from megalatent.training.estimate import describe

    lines += [f"# note: {note}" for note in notes(config)]
    lines += [f"# before it can run: {problem}" for problem in missing]
    lines += ["", *(f"# {line}" for line in describe(config, world_size))]
    lines += ["", "# Megatron's command line:", shlex.join(config.megatron_argv())]
    return "\n".join(lines) + "\n"


def start(
    config: Config,
    nproc: int,
    *,
    again: Sequence[str] = (),
    method: str = "auto",
    train: Callable[[Config], None] | None = None,
) -> None:
    """Train in `nproc` local processes.

    Args:
        again: command of a fresh rank; without it ranks are always forked.
        method: `fork`, `fresh`, or `auto`: CUDA does not survive a fork, so fresh where it is open.
        train: what each forked rank does; the default trains.

    Raises:
        RankFailure, Stopped: see `run_local`.
    """
    import torch

    from megalatent.config_megatron import parse
    from megalatent.launch.local import run_local

    if method != "fresh":
        _preload()
    if method == "auto" and torch.cuda.is_initialized():
        print("megalatent: CUDA is open already: ranks start afresh", file=sys.stderr)
        method = "fresh"
    threads = _threads_per_rank(os.environ, nproc)
    args = parse(config.megatron_argv())
    # Megatron saves and ends well at this signal, whichever one the launcher gets.
    exit_signal = args.exit_signal if args.exit_signal_handler else signal.SIGTERM

    def worker(rank: int) -> None:
        if method == "fresh" and again:
            os.set_inheritable(int(os.environ[LAST_WORDS]), True)
            os.execv(again[0], list(again))
        torch.set_num_threads(threads)
        (train or _train)(config)

    run_local(
        worker,
        nproc,
        environment={"OMP_NUM_THREADS": str(threads), **_connections(config)},
        forward_as=exit_signal,
        signals=tuple({signal.SIGTERM, signal.SIGINT, exit_signal}),
    )


def _preload() -> None:
    """Import what every rank will need, once, before the fork."""
    names = [
        "megalatent.training.setup",
        "megalatent.model.build",
        "megalatent.model.layers",
        "megalatent.checkpoint.fresh",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.models.mimo",
        "megatron.training.datasets.sft_dataset",
    ]
    if importlib.util.find_spec("transformers"):
        names.append("transformers.models.auto.tokenization_auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron's experimental parts, which we do not use
        for name in names:
            importlib.import_module(name)


def _threads_per_rank(environ: Mapping[str, str], nproc: int) -> int:
    """Threads for torch's operators: the user's choice, or an equal share of the cores."""
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def _connections(config: Config) -> dict[str, str]:
    """Megatron requires one hardware queue before Blackwell, so that communication comes first."""
    from megalatent.config_megatron import value_of

    sizes = ("tensor_model_parallel_size", "context_parallel_size")
    if all(value_of(config.megatron, size) == 1 for size in sizes):
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}


def _train(config: Config) -> None:
    from megalatent.profiling.in_training import step_profiler
    from megalatent.training.pretrain import run

    prepare_rank(config)
    run(config, step_profiler(config))


def prepare_rank(config: Config) -> None:
    """What a rank does before its run begins."""
    if os.environ.get("RANK") != "0" and not sys.warnoptions:
        warnings.simplefilter("ignore")  # rank 0 has the same ones
    # Megatron reads its options from the command line, in several places.
    sys.argv = ["megalatent", *config.megatron_argv()]
