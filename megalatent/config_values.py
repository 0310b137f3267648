"""Mappings <-> frozen dataclasses, with errors that say what to write instead.

A field may carry metadata: `key`, its name in the file where that is no Python name, and `read`,
a function `(value, where) -> value` for what a type annotation cannot say.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from megalatent.errors import UserError

__all__ = ["choose", "describe", "nearest", "read_dataclass", "require", "write_dataclass"]

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a mistyped one, or None where nothing is close."""
    names = {_plain(one): one for one in valid}
    close = difflib.get_close_matches(_plain(name), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def _plain(name: str) -> str:
    """Without what people mistake: case, and the dashes of a command line."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def choose(name: object, valid: Iterable[str], where: str, what: str) -> str:
    """`name` if it is one of `valid`.

    Raises:
        UserError: it is not; names the nearest valid one, and all of them where there are few.
    """
    names = list(valid)
    if isinstance(name, str) and name in names:
        return name
    close = nearest(name, names) if isinstance(name, str) else None
    hint = f"did you mean {close!r}? " if close else ""
    known = f"one of {', '.join(names)}" if len(names) <= 12 else "see the documentation"
    raise UserError(f"{where}: {describe(name)} is no {what}: {hint}({known})")


def describe(value: object) -> str:
    """A value as the user wrote it, with its type where that is the mistake."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        text = repr(value)
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"the {kind} {text if len(text) <= 60 else text[:57] + '…'}"
    return repr(value)


def require(condition: bool, where: str, value: object, wrong: str, remedy: str) -> None:
    """Raise a `UserError` that names the key, the value, what is wrong and what to write."""
    if not condition:
        raise UserError(f"{where}: {describe(value)} {wrong}: {remedy}")


def read_dataclass[T](cls: type[T], given: object, where: str) -> T:
    """Build `cls` from a mapping of the file; a missing key takes the field's default.

    Raises:
        UserError: not a mapping, an unknown key, or a value of the wrong type.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise UserError(
            f"{where}: {describe(given)} is not a section: write keys below it, one a line"
        )
    fields = {f.metadata.get("key", f.name): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            close = nearest(str(key), fields)
            hint = f"did you mean {close!r}? " if close else ""
            raise UserError(f"{where}.{key}: unknown key: {hint}(valid here: {', '.join(fields)})")
        field = fields[key]
        here = f"{where}.{key}"
        read = field.metadata.get("read")
        values[field.name] = (
            read(value, here) if read else _read_value(hints[field.name], value, here)
        )
    return cls(**values)


def _read_value(hint: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return read_dataclass(hint, value, where)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [a for a in arguments if a is not type(None)]
        return _read_value(inner, value, where)
    if origin is typing.Literal:
        return choose(value, arguments, where, "choice here")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int in Python, not for a user.
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{where}: {describe(value)} is not {_NAMES[hint]}: write {_NAMES[hint]}")


def write_dataclass(value: object) -> Any:
    """The plain mapping that `read_dataclass` reads back to an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.metadata.get("key", f.name): write_dataclass(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {k: write_dataclass(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [write_dataclass(v) for v in value]
    return value
