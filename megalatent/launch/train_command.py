"""`train`: check a configuration, then train, in processes of our own or as one of many."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megalatent.errors import UserError

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = ["add_train_parser", "run_train_command", "start"]

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
        "--dry-run",
        action="store_true",
        help="show the resolved config and Megatron's command line, and stop",
    )


def run_train_command(args: argparse.Namespace) -> int:
    """Run `train`; returns the exit status.

    Raises:
        UserError: a mistake in the config or on the command line.
        RankFailure: a rank failed.
        Stopped: stopped by a signal.
    """
    from megalatent.launch.placement import find_place

    place = None if args.nproc is not None else find_place(os.environ)
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc: {args.nproc} starts no process: give 1 or more")
    _prepare_imports()
    from megalatent.config import Config

    config = Config.load(args.config, args.overrides)
    world_size = place.world_size if place else args.nproc or _default_nproc(config)
    try:
        config.check(world_size)
    except UserError as error:
        raise UserError(f"{args.config}: {error}") from None
    if args.dry_run:
        if place is None or place.rank == 0:
            print(describe_run(config, world_size), end="")
        return 0
    if place is None:
        start(config, world_size)
    else:
        for name, value in place.environment.items():
            os.environ.setdefault(name, value)
        _train(config)
    return 0


def _prepare_imports() -> None:
    """What must be said before torch is imported."""
    # Counting devices through NVML opens no CUDA context, which the forks below would not survive.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def _default_nproc(config: Config) -> int:
    import torch

    from megalatent.config_megatron import parse
    from megalatent.config_parallel import smallest_world_size

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return smallest_world_size(parse(config.megatron_argv()))


def describe_run(config: Config, world_size: int) -> str:
    """The resolved config as YAML, what was filled in, and Megatron's command line."""
    import yaml

    text = yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True)
    lines = [f"# {world_size} process{'es' if world_size > 1 else ''}", text.rstrip()]
    if config.filled_in:
        lines += ["", "# filled in, because the config does not say:"]
        lines += [
            f"#   megatron.{name}: {config.megatron[name]} ({reason})"
            for name, reason in config.filled_in.items()
        ]
    lines += ["", "# Megatron's command line:", shlex.join(config.megatron_argv())]
    return "\n".join(lines) + "\n"


def start(config: Config, nproc: int, *, train: Callable[[Config], None] | None = None) -> None:
    """Train in `nproc` local processes forked from this one.

    Args:
        train: what each rank does; the default trains.

    Raises:
        RankFailure, Stopped: see `run_local`.
    """
    import torch

    from megalatent.config_megatron import parse
    from megalatent.launch.local import run_local

    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is open in the launcher, and does not survive a fork")
    threads = _threads_per_rank(os.environ, nproc)
    args = parse(config.megatron_argv())
    # Megatron saves and ends well at this signal, whichever one the launcher gets.
    exit_signal = args.exit_signal if args.exit_signal_handler else signal.SIGTERM

    def worker(rank: int) -> None:
        torch.set_num_threads(threads)
        (train or _train)(config)

    run_local(
        worker,
        nproc,
        environment={"OMP_NUM_THREADS": str(threads), **_connections(args)},
        forward_as=exit_signal,
        signals=tuple({signal.SIGTERM, signal.SIGINT, exit_signal}),
    )


def _threads_per_rank(environ: Mapping[str, str], nproc: int) -> int:
    """Threads for torch's operators: the user's choice, or an equal share of the cores."""
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def _connections(args: argparse.Namespace) -> dict[str, str]:
    """Megatron requires one hardware queue before Blackwell, so that communication comes first."""
    if args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}
    return {}


def _train(config: Config) -> None:
    from megalatent.training.pretrain import run

    # Megatron reads its options from the command line, in several places.
    sys.argv = ["megalatent", *config.megatron_argv()]
    run(config)
