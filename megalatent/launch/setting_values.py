"""What the settings of a submission may be: each function takes a text and gives the value.

A `ValueError` says what is wrong with the text, as the end of a sentence that begins with it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable

__all__ = [
    "amount",
    "array",
    "array_tasks",
    "choice",
    "count",
    "count_or_none",
    "dependency",
    "duration",
    "line",
    "minutes_of",
    "name",
    "option_lines",
    "options",
    "path",
    "positive",
    "word",
    "words",
]

_MAX_TASKS = 10_000


def count(text: str) -> int:
    return _number(text, 1)


def count_or_none(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ValueError(f"is not a whole number of {least} or more")
    return int(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not 0 <= value < float("inf"):
        raise ValueError("is not a number of 0 or more")
    return value


def positive(text: str) -> float:
    if amount(text) == 0:
        raise ValueError("is not a number above 0")
    return float(text)


def duration(text: str) -> str:
    minutes_of(text)
    return text


def minutes_of(text: str) -> float:
    """Minutes of a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not found:
        raise ValueError("is no time: write minutes, hours:minutes:seconds or days-hours")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    total = int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60
    if total <= 0:
        raise ValueError("is no time above zero")
    return total


def array_tasks(text: str) -> list[int]:
    """`0-3:2,7%2` -> 0, 2, 7."""
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", text, re.ASCII):
        raise ValueError("is no list of array tasks: write 0-3, 1,2,5 or 0-15%4")
    tasks: set[int] = set()
    for part in text.split("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if step and int(step) == 0:
            raise ValueError("counts in steps of 0: give a step of 1 or more")
        numbers = range(int(first), int(last or first) + 1, int(step or 1))
        if not numbers:
            raise ValueError(f"counts down from {first} to {last}: give the smaller number first")
        if int(last or first) >= _MAX_TASKS:
            raise ValueError(
                f"has a task {last or first}: the highest that can be is {_MAX_TASKS - 1}"
            )
        tasks.update(numbers)
    return sorted(tasks)


def array(text: str) -> str:
    array_tasks(text)
    return text


def dependency(text: str) -> str:
    kind = r"(after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)(:\d+(_\d+)?(\+\d+)?)+"
    if not re.fullmatch(rf"({kind}|singleton)([,?]({kind}|singleton))*", text, re.ASCII):
        raise ValueError("is no dependency: write afterany:JOB or afterok:JOB")
    return text


def line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has a line break or another character that cannot be printed in it")
    return text


def word(text: str) -> str:
    if not text or re.search(r"\s", line(text)):
        raise ValueError("is not one word")
    return text


def words(text: str) -> str:
    return line(" ".join(text.split()))


def path(text: str) -> str:
    """The shell leaves `--venv=~/venv` as it is, and so does YAML."""
    return os.path.expanduser(word(text))


def name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", text):
        raise ValueError(
            "is no name: use up to 100 letters, digits, dots, dashes and underscores, and begin"
            " with one of the first two"
        )
    return text


def option_lines(text: str) -> list[str]:
    """`--exclusive -w "node[0-1]"` -> one line per option, quoted for the job script."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be taken apart: {str(error).lower()}") from None
    lines: list[str] = []
    for part in parts:
        if part.startswith("-"):
            lines.append(shlex.quote(line(part)))
        elif lines:
            lines[-1] += f" {shlex.quote(line(part))}"
        else:
            raise ValueError(f"begins with {part!r}, which is no option")
    return lines


def options(text: str) -> str:
    option_lines(text)
    return text


def choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"is none of {', '.join(names)}")
        return text

    return parse
