"""Documents for training: text files, JSON lines, source trees, and Python's standard library.

The order is the same on every run: sources as given, the files of a folder by path.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megalatent.config_values import nearest
from megalatent.errors import UserError

__all__ = ["PYTHON_STDLIB", "Corpus", "Document"]

# Stands for the sources and docstrings of the running Python's standard library.
PYTHON_STDLIB = "python-stdlib"

_JSON_LINES = (".jsonl", ".ndjson")
# Installed packages are not the standard library; its tests are mostly tables of odd characters.
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, and the bytes that were read for it."""

    text: str
    size: int


@dataclass(kw_only=True)
class Corpus:
    """What the sources hold.

    Attributes:
        sources: files, folders, or `PYTHON_STDLIB`.
        text_key: key of the text in JSON lines.
        include: patterns for the files of folders, for example `*.py`; none: all text files.
        unreadable: files of folders that are not UTF-8 text, filled in while reading.
    """

    sources: Sequence[str]
    text_key: str = "text"
    include: Sequence[str] = ()
    unreadable: list[Path] = field(default_factory=list)

    def files(self) -> list[tuple[Path, bool]]:
        """The files to read, in order, and whether each was found in a folder.

        Raises:
            UserError: a source that does not exist, or a folder without any matching file.
        """
        result: list[tuple[Path, bool]] = []
        for source in self.sources:
            path = Path(source)
            if source == PYTHON_STDLIB:
                result += [(file, True) for file in _stdlib_files()]
            elif path.is_dir():
                found = self._files_of(path)
                if not found:
                    patterns = " ".join(self.include) or "any name"
                    raise UserError(
                        f"{source}: the folder holds no file that matches {patterns}:"
                        " change --include, or name another folder"
                    )
                result += [(file, True) for file in found]
            elif path.is_file():
                result.append((path, False))
            else:
                raise UserError(
                    f"{source}: no such file or folder: give text files, .jsonl files, folders, or"
                    f" {PYTHON_STDLIB}"
                )
        return result

    def size(self) -> int:
        """Bytes of all files, for the display of progress."""
        return sum(path.stat().st_size for path, _ in self.files())

    def documents(self) -> Iterator[Document]:
        """Every document in order: one per text file, one per line of JSON lines.

        Raises:
            UserError: a file named by the user is not UTF-8 text, or a line is not what is asked.
        """
        self.unreadable.clear()
        for path, in_folder in self.files():
            if path.suffix in _JSON_LINES:
                yield from self._lines(path)
                continue
            try:
                text = _read_text(path)
            except (UnicodeDecodeError, SyntaxError):
                if not in_folder:
                    raise UserError(
                        f"{path}: is not UTF-8 text: convert it, or leave it out"
                    ) from None
                self.unreadable.append(path)
                continue
            yield Document(text=text, size=path.stat().st_size)
        if PYTHON_STDLIB in self.sources:
            for text in _builtin_docstrings():
                yield Document(text=text, size=0)

    def _files_of(self, folder: Path) -> list[Path]:
        found = []
        for parent, folders, names in os.walk(folder):
            # Hidden folders hold version control and caches.
            folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
            for name in names:
                relative = (Path(parent) / name).relative_to(folder).as_posix()
                if name.startswith(".") or not self._included(name, relative):
                    continue
                found.append(relative)
        return [folder / relative for relative in sorted(found)]

    def _included(self, name: str, relative: str) -> bool:
        return not self.include or any(
            fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(relative, pattern)
            for pattern in self.include
        )

    def _lines(self, path: Path) -> Iterator[Document]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                yield Document(text=self._text_of(line, f"{path}: line {number}"), size=len(line))

    def _text_of(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: is not JSON ({error}): correct the file") from None
        if not isinstance(record, dict):
            raise UserError(f'{where}: is no JSON object: write {{"{self.text_key}": …}}')
        text = record.get(self.text_key)
        if isinstance(text, str):
            return text
        if self.text_key in record:
            raise UserError(f"{where}: the value of {self.text_key!r} is no text: correct the file")
        close = nearest(self.text_key, record)
        hint = f"did you mean {close!r}? " if close else ""
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise UserError(
            f"{where}: has no key {self.text_key!r}: {hint}give --text-key (keys here: {keys})"
        )


def _read_text(path: Path) -> str:
    if path.suffix == ".py":
        # Python files may declare another encoding.
        with tokenize.open(path) as file:
            return file.read()
    # A NUL is valid UTF-8, but no text has one.
    data = path.read_bytes()
    if b"\0" in data:
        raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "binary file")
    return data.decode("utf-8")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)
    ]
    return [root / path for path in sorted(found, key=Path.as_posix)]


def _builtin_docstrings() -> Iterator[str]:
    """Docstrings of the modules that have no source file, one document a module."""
    for name in sorted(sys.builtin_module_names):
        if name.startswith("_"):
            continue
        module = importlib.import_module(name)
        parts = [f"{name}\n\n{inspect.getdoc(module) or ''}"]
        for member_name in sorted(vars(module)):
            doc = inspect.getdoc(getattr(module, member_name))
            if doc and not member_name.startswith("_"):
                parts.append(f"{name}.{member_name}\n\n{doc}")
        yield "\n\n".join(parts) + "\n"
