"""Megatron's options as Megatron's own parser defines them.

A key under `megatron:` is an option's name without its dashes, with underscores: `--norm-epsilon`
is `norm_epsilon`, `--no-rope-fusion` is `no_rope_fusion: true`. There is no second list of options
here: names, types and choices come from the installed parser. Importing Megatron takes seconds,
once per process.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from megalatent.config_paths import expanded
from megalatent.config_refused import refuse
from megalatent.config_values import describe, nearest
from megalatent.errors import UserError

__all__ = ["Option", "options", "parse", "read_options", "to_argv", "value_of"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of Megatron.

    Attributes:
        name: the key under `megatron:`.
        flag: as on the command line.
        off_flag: what says "no", for the few options that have both (`--x/--no-x`).
        action: argparse's own description.
    """

    name: str
    flag: str
    off_flag: str | None
    action: argparse.Action

    @property
    def is_switch(self) -> bool:
        """Takes no value: `true` gives the flag, `false` leaves it out."""
        return self.action.nargs == 0

    @property
    def choices(self) -> list[Any] | None:
        """Allowed values as a user writes them (members of an enum by name)."""
        if self.action.choices is None:
            return None
        return [c.name if isinstance(c, Enum) else c for c in self.action.choices]


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print before it ends the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"megatron: {message}: correct the option")


@functools.cache
def _parser() -> _Parser:
    from megalatent.platform import install

    install()
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(prog="megatron", allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


@functools.cache
def options() -> Mapping[str, Option]:
    """Every option of the installed Megatron by name; aliases are rows of their own."""
    result: dict[str, Option] = {}
    for action in _parser()._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        off = None
        if isinstance(action, argparse.BooleanOptionalAction):
            (off,) = [flag for flag in flags if flag.startswith("--no-")]
            flags.remove(off)
        for flag in flags:
            name = flag[2:].replace("-", "_")
            result[name] = Option(name=name, flag=flag, off_flag=off, action=action)
    return result


def read_options(given: object) -> dict[str, Any]:
    """The section `megatron:` with names, types and choices checked; null leaves an option out.

    Raises:
        UserError: unknown name, refused option, wrong type, no valid choice, or one setting
            under two names.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UserError(
            f"megatron: {describe(given)} is not a section: write options below it, one a line"
        )
    refuse(given)
    result: dict[str, Any] = {}
    first_name: dict[str, str] = {}
    for name, value in given.items():
        option = options().get(name)
        if option is None:
            raise UserError(_unknown(str(name)))
        if value is None:
            continue
        result[name] = _read_value(option, value)
        before = first_name.setdefault(option.action.dest, name)
        if before != name:
            raise UserError(
                f"megatron.{name}: sets the same as megatron.{before}, given before it: keep one"
            )
    return result


def _unknown(name: str) -> str:
    same_setting = [o for o in options().values() if o.action.dest == name]
    if same_setting:
        # The name inside Megatron: say what the option is called; a switch may be inverted.
        option = same_setting[0]
        value = ": true" if option.is_switch else ""
        meaning = " to turn it off" if isinstance(option.action, argparse._StoreFalseAction) else ""
        return (
            f"megatron.{name}: unknown option: Megatron calls it {option.flag},"
            f" so write {option.name}{value}{meaning}"
        )
    close = nearest(name, options())
    hint = f"did you mean {close!r}?" if close else "see Megatron's own list of arguments"
    return f"megatron.{name}: unknown option of Megatron: {hint}"


def _read_value(option: Option, value: Any) -> Any:
    where = f"megatron.{option.name}"
    if option.is_switch:
        if not isinstance(value, bool):
            raise UserError(
                f"{where}: {describe(value)} is not true or false: {option.flag} takes no value,"
                " write true to give it"
            )
        return value
    nargs = option.action.nargs
    if nargs is None:
        if isinstance(value, list) and option.action.type in (None, str, int, float):
            raise UserError(f"{where}: {describe(value)}: {option.flag} takes one value, no list")
        return _read_item(option, value, where)
    items = value if isinstance(value, list) else [value]
    if isinstance(nargs, int) and len(items) != nargs:
        raise UserError(
            f"{where}: {describe(value)}: {option.flag} takes {nargs} values: write a list of"
            f" {nargs}"
        )
    if nargs == "+" and not items:
        raise UserError(f"{where}: the list is empty: {option.flag} takes one value or more")
    read = [_read_item(option, item, f"{where}.{i}") for i, item in enumerate(items)]
    for i, item in enumerate(read):
        if isinstance(item, str) and re.match(r"-(?![\d.])", item):
            raise UserError(
                f"{where}.{i}: {item!r} begins with a dash, which Megatron takes for an option:"
                f" write ./{item}"
            )
    return read


def _read_item(option: Option, value: Any, where: str) -> Any:
    kind = option.action.type
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        _expect(isinstance(value, int) and number, where, value, "a whole number")
    elif kind is float:
        _expect(number, where, value, "a number")
        value = float(value)
    elif kind is bool:
        _expect(isinstance(value, bool), where, value, "true or false")
    elif kind in (None, str):
        _expect(isinstance(value, str) or number, where, value, "text")
        value = expanded(str(value))
    else:
        return _read_special(option, value, where)
    choices = option.choices
    if choices is not None and value not in choices:
        close = nearest(value, choices) if isinstance(value, str) else None
        hint = f"did you mean {close!r}? " if close else ""
        raise UserError(
            f"{where}: {describe(value)} is no choice of {option.flag}: {hint}"
            f"(one of {', '.join(map(str, choices))})"
        )
    return value


def _read_special(option: Option, value: Any, where: str) -> Any:
    """A value for one of Megatron's own readers: the text of a pattern, a tuple, an enum member."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _expect(isinstance(value, (str, list)) or number, where, value, "text, a number or a list")
    texts = [str(value)]
    if isinstance(value, list):
        # Patterns are written with brackets, tuples without.
        items = ",".join(map(str, value))
        texts = [f"[{items}]", items]
    read = option.action.type
    assert callable(read)
    for text in texts:
        try:
            converted = read(text)
        except (ValueError, KeyError, SyntaxError, TypeError, AssertionError):
            continue
        if option.action.choices is None or converted in option.action.choices:
            return text
    expected = (
        f"one of {', '.join(map(str, option.choices))}"
        if option.choices
        else f"what Megatron reads for {option.flag}"
    )
    raise UserError(f"{where}: {describe(value)} is not {expected}: correct it")


def _expect(ok: bool, where: str, value: object, expected: str) -> None:
    if not ok:
        raise UserError(f"{where}: {describe(value)} is not {expected}: write {expected}")


def to_argv(megatron: Mapping[str, Any]) -> list[str]:
    """The command line for options that `read_options` has read."""
    argv: list[str] = []
    for name, value in megatron.items():
        option = options()[name]
        if option.is_switch:
            if value:
                argv.append(option.flag)
            elif option.off_flag:
                argv.append(option.off_flag)
        elif option.action.nargs is not None:
            argv += [option.flag, *map(str, value)]
        elif str(value).startswith("-"):
            # Else argparse takes the value for an option.
            argv.append(f"{option.flag}={value}")
        else:
            argv += [option.flag, str(value)]
    return argv


def parse(argv: Iterable[str]) -> argparse.Namespace:
    """Megatron's own reading of a command line, without the checks it makes later.

    Raises:
        UserError: what argparse finds wrong.
    """
    return _parser().parse_args(list(argv))


def value_of(megatron: Mapping[str, Any], dest: str) -> Any:
    """The value that Megatron's arguments will have for `args.<dest>` before its own checks."""
    matching = [o for o in options().values() if o.action.dest == dest]
    for option in matching:
        if option.name in megatron:
            value = megatron[option.name]
            if not option.is_switch:
                return value
            if isinstance(option.action, argparse.BooleanOptionalAction):
                return value
            return option.action.const if value else option.action.default
    return matching[0].action.default
