"""The `megalatent` command: finds the subcommand, runs it, and turns errors into one line.

A subcommand is a row of `COMMANDS`. Its module is imported only when it is asked for, so that
light commands start at once; building its parser must not import torch or Megatron.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from megalatent import __version__
from megalatent.errors import UserError, describe_os_error, is_mistake

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand.

    Attributes:
        name: as on the command line.
        help: one line for `megalatent --help`.
        module: holds `add_<name>_parser(subparsers)` and `run_<name>_command(args) -> int`.
    """

    name: str
    help: str
    module: str


COMMANDS = (
    Command(
        name="data",
        help="turn text, jsonl or source trees into Megatron's .bin/.idx",
        module="megalatent.training.data_command",
    ),
    Command(
        name="train",
        help="train from a config file",
        module="megalatent.launch.train_command",
    ),
    Command(
        name="submit",
        help="check a run, write its Slurm job script and submit it",
        module="megalatent.launch.submit",
    ),
    Command(
        name="status",
        help="show where a run stands, across all its restarts",
        module="megalatent.launch.status",
    ),
    Command(
        name="plan",
        help="show a pipeline schedule with several passes, its bubble and memory",
        module="megalatent.passes.plan_command",
    ),
    Command(
        name="profile",
        help="measure what passes cost on each pipeline stage, and what would be faster",
        module="megalatent.profiling.command",
    ),
    Command(
        name="generate",
        help="generate text from an exported model",
        module="megalatent.generate_command",
    ),
    Command(
        name="convert",
        help="convert checkpoints between Megatron and Hugging Face",
        module="megalatent.checkpoint.convert_command",
    ),
    Command(
        name="doctor",
        help="show what is installed, built and running here, and why not",
        module="megalatent.doctor",
    ),
)


class _Parser(argparse.ArgumentParser):
    """Raises in one line what argparse would print in several."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: done. 1: the run failed. 2: a mistake in what was given. 130 and others above 128: stopped
    by a signal.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What it cannot encode comes as an escape, as on standard error, and not as an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except UserError as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        _complain("stopped by SIGINT")
        return 130
    except BrokenPipeError:
        # The reader of our output has had enough (`| head`): no error, and nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        said = describe_os_error(error)
        if said is None:
            raise
        _complain(said)
        return 2 if is_mistake(error) else 1
    except RuntimeError as error:
        return _end_of_run(error)


def _end_of_run(error: RuntimeError) -> int:
    """The status of a run whose ranks did not all end well; other errors are raised again."""
    from megalatent.launch.local import RankFailure, Stopped
    from megalatent.training.exits import TrainingStopped

    if isinstance(error, TrainingStopped):
        _complain(str(error))
        return error.status
    if isinstance(error, Stopped):
        _complain(str(error))
        return 128 + error.number
    if not isinstance(error, RankFailure):
        raise error
    if error.is_user_error:
        _complain(error.summary)
        return 2
    if error.trace:
        print(error.trace, file=sys.stderr, end="" if error.trace.endswith("\n") else "\n")
    _complain(str(error))
    return 1


def _complain(message: str) -> None:
    print(f"megalatent: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _run(arguments: list[str]) -> int:
    top = _Parser(
        prog="megalatent",
        description="Latent-feedback training of transformers on Megatron-Core.",
        epilog="`megalatent COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"megalatent {__version__}")
    command = _find_command(arguments)
    if command is None:
        listed = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for row in COMMANDS:
            listed.add_parser(row.name, help=row.help)
        top.parse_args(arguments)
        raise AssertionError("a known command was not found")
    module = importlib.import_module(command.module)
    subparsers = top.add_subparsers(dest="command", required=True)
    getattr(module, f"add_{command.name}_parser")(subparsers)
    args = top.parse_args(arguments)
    status: int | None = getattr(module, f"run_{command.name}_command")(args)
    return status or 0


def _find_command(arguments: list[str]) -> Command | None:
    """The row of the first argument; None for none, or for an option of the command itself.

    Raises:
        UserError: not the name of a command.
    """
    if not arguments or arguments[0].startswith("-"):
        return None
    for row in COMMANDS:
        if row.name == arguments[0]:
            return row
    from megalatent.config_values import choose

    choose(arguments[0], [row.name for row in COMMANDS], "megalatent", "command")
    raise AssertionError("choose() raises for an unknown name")


if __name__ == "__main__":
    sys.exit(main())
