"""Reading a configuration file and the `--set` overrides into plain mappings.

YAML 1.2 scalars: `1e-4` is a number and `on`, `no`, `1:30` are strings. PyYAML's own rules
(YAML 1.1) turn the first into a string and the others into booleans and base-60 numbers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from megalatent.errors import UserError

__all__ = ["read_yaml", "parse_scalar", "apply_overrides"]


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars that refuses a key given twice."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                "the text has a null or half of a character (a lone surrogate) in it",
                node.start_mark,
            )
        return text

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # PyYAML's constructors take it on trust that `!!int x` is a number.
            kind = node.tag.rpartition(":")[2]
            problem = f"{_shortened(str(node.value))!r} is no {kind} that can be read"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or mapping cannot be a key", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice: keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML would copy its own resolvers into the first subclass that adds one.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in [
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
]:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


# YAML 1.2 integers are decimal: `010` is ten. PyYAML's constructor would read it as octal.
def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{problem}"


def _load(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: not YAML, a value that is not of the type it is marked with, or nested too
            deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: no such file, not readable, not YAML, or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: give the path of a config file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason}): give a YAML config file") from None
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {_one_line(error)}") from None
    if not isinstance(value, dict):
        given = "nothing" if value is None else f"a {type(value).__name__}"
        raise UserError(
            f"{path}: holds {given} at the top: write the sections `latent:` and `megatron:`"
        )
    return value


def parse_scalar(text: str) -> Any:
    """The value that `text` would have in a config file (`1e-4`, `true`, `[1, 2]`, `{1: 1.0}`).

    Raises:
        yaml.YAMLError: not a YAML value.
    """
    return _load(text)


def apply_overrides(config: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `config` with each `section.key=value` applied in order, the last one winning.

    Numbers in a path index lists (`latent.passes.schedule.0.start=10`).

    Raises:
        UserError: no `=`, an empty path, a value that is not YAML, or a path through a scalar.
    """
    result = config
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UserError(
                f"--set {override}: not of the form section.key=value:"
                " write for example --set megatron.lr=1e-3"
            )
        try:
            value = parse_scalar(text)
        except yaml.YAMLError as error:
            raise UserError(
                f"--set {_shortened(override)}: the value is not valid YAML ({_one_line(error)}):"
                " quote it"
            ) from None
        result = _with_value(result, keys, value, override)
    return result


def _with_value(node: Any, keys: list[str], value: Any, override: str) -> Any:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if node is None:
        node = {}
    if isinstance(node, list):
        if not _is_number(key) or int(key) >= len(node):
            raise UserError(
                f"--set {override}: {key!r} is no index of a list of {len(node)}:"
                f" give a number from 0 to {len(node) - 1}"
            )
        index = int(key)
        return [*node[:index], _with_value(node[index], rest, value, override), *node[index + 1 :]]
    if not isinstance(node, dict):
        raise UserError(
            f"--set {override}: {key!r} is inside {node!r}, which is not a section:"
            " set the section itself, or shorten the path"
        )
    # Passes are numbers in the file: `recompute.3` must find the key 3.
    found: Any = int(key) if _is_number(key) else key
    return {**node, found: _with_value(node.get(found), rest, value, override)}


def _is_number(key: str) -> bool:
    """Whether it is written in ASCII digits; a longer number than any list or K is none."""
    return key.isascii() and key.isdigit() and len(key) < 10
