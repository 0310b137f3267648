"""The command line itself: finding commands, exit codes, and how fast light commands start."""

from __future__ import annotations

import argparse
import importlib
import io
import subprocess
import sys

import pytest

from megalatent import __version__
from megalatent.cli import COMMANDS, Command, main
from megalatent.errors import UserError
from megalatent.launch.local import RankFailure, Stopped


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"megalatent {__version__}\n"


def test_output_that_the_terminal_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("megalatent.cli._run", lambda arguments: print("3 µs → 1") or 0)
    assert main(["plan"]) == 0
    assert raw.getvalue() == b"3 \\xb5s \\u2192 1\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command.name} " in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "arguments are required: COMMAND"),
        (["trian"], "did you mean 'train'"),
        (["xyz"], "one of data, train"),
        (["--vresion"], "arguments are required: COMMAND"),
        (["train"], "arguments are required: CONFIG"),
    ],
)
def test_mistakes(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("megalatent: error: ")
    assert printed.err.count("\n") == 1
    assert expected in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_its_two_functions(command: Command) -> None:
    module = importlib.import_module(command.module)
    subparsers = argparse.ArgumentParser().add_subparsers()
    getattr(module, f"add_{command.name}_parser")(subparsers)
    assert command.name in subparsers.choices
    assert callable(getattr(module, f"run_{command.name}_command"))


def test_help_of_commands_imports_nothing_heavy() -> None:
    """Torch alone takes seconds to import: building the parsers must not touch it."""
    script = """
import sys
from megalatent.cli import COMMANDS, main
for command in COMMANDS:
    try:
        main([command.name, "--help"])
    except SystemExit as ended:
        assert ended.code == 0, command
heavy = {"torch", "megatron", "transformers", "tokenizers", "numpy", "yaml", "rich", "matplotlib"}
print("heavy:", sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (UserError("a: wrong\nin two lines"), 2, ["megalatent: error: a: wrong in two lines"]),
        (RankFailure(3, "no file x", "", True), 2, ["megalatent: error: no file x"]),
        (
            RankFailure(3, "ValueError: bad", "Traceback …\nValueError: bad\n", False),
            1,
            ["Traceback …", "ValueError: bad", "megalatent: error: rank 3 failed: ValueError: bad"],
        ),
        (Stopped(15), 143, ["megalatent: error: stopped by SIGTERM"]),
        (KeyboardInterrupt(), 130, ["megalatent: error: stopped by SIGINT"]),
    ],
)
def test_exit_codes(
    error: BaseException,
    status: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("megalatent.launch.train_command.run_train_command", run)
    assert main(["train", "some.yaml"]) == status
    assert capsys.readouterr().err.splitlines() == lines


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr("megalatent.launch.train_command.run_train_command", run)
    with pytest.raises(RuntimeError, match="ours"):
        main(["train", "some.yaml"])


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `megalatent --help | head -1`."""
    command = f"{sys.executable} -m megalatent.cli --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), 2, "/x/y: permission denied: "),
        (OSError(36, "File name too long", "/x/long"), 2, "/x/long: file name too long: "),
        (OSError(28, "No space left on device"), 1, "no space left on device: make room"),
        (OSError(5, "Input/output error", b"/x"), 1, "/x: input/output error: "),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: OSError,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("megalatent.launch.train_command.run_train_command", run)
    assert main(["train", "some.yaml"]) == status
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"megalatent: error: {line}")


@pytest.mark.parametrize("error", [TimeoutError(), OSError(22, "Invalid argument")])
def test_an_error_that_says_too_little_keeps_its_traceback(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("megalatent.launch.train_command.run_train_command", run)
    with pytest.raises(type(error)):
        main(["train", "some.yaml"])
