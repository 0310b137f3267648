"""Documents for training: text files, JSON lines, source trees, and Python's standard library.

The order is the same on every run: sources as given, the files of a folder by path.
"""

from __future__ import annotations

import errno
import fnmatch
import importlib
import inspect
import io
import json
import os
import stat
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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


class _File(NamedTuple):
    path: Path
    in_folder: bool
    size: int


@dataclass(kw_only=True)
class Corpus:
    """What the sources hold.

    Attributes:
        sources: files, folders, or `PYTHON_STDLIB`.
        text_key: key of the text in JSON lines.
        include: patterns for the files of folders, for example `*.py`; none: all text files.
        leave_out: files that the same command writes, and which are no sources therefore.
        unreadable: files of folders that are not UTF-8 text, filled in while reading.
    """

    sources: Sequence[str]
    text_key: str = "text"
    include: Sequence[str] = ()
    leave_out: Sequence[Path] = ()
    unreadable: list[Path] = field(default_factory=list)
    _found: list[_File] | None = field(default=None, init=False, repr=False)
    _irregular: list[Path] = field(default_factory=list, init=False, repr=False)

    def files(self) -> list[tuple[Path, bool]]:
        """The files to read, in order, and whether each was found in a folder.

        They are looked for once, so that what is written later cannot become a source.

        Raises:
            UserError: a source that does not exist, that cannot be read or that will be
                overwritten, or a folder without any matching file.
            OSError: a folder cannot be read.
        """
        return [(file.path, file.in_folder) for file in self._files()]

    def size(self) -> int:
        """Bytes of all files, for the display of progress."""
        return sum(file.size for file in self._files())

    def documents(self) -> Iterator[Document]:
        """Every document in order: one per text file, one per line of JSON lines.

        Raises:
            UserError: a file named by the user is not UTF-8 text, or a line is not what is asked.
            OSError: a file cannot be read.
        """
        files = self._files()
        self.unreadable[:] = self._irregular
        for file in files:
            if self._holds_lines(file.path):
                yield from self._lines(file.path)
                continue
            try:
                text = _read_text(file.path)
            # Python files may name an encoding that does not exist or is not one of text.
            except (UnicodeError, SyntaxError, LookupError):
                if not file.in_folder:
                    raise UserError(
                        f"{file.path}: is not UTF-8 text: convert it, or leave it out"
                    ) from None
                self.unreadable.append(file.path)
                continue
            yield Document(text=text, size=file.size)
        if PYTHON_STDLIB in self.sources:
            for text in _builtin_docstrings():
                yield Document(text=text, size=0)

    def _files(self) -> list[_File]:
        if self._found is None:
            self._irregular.clear()
            written = {_identity(os.stat(path)) for path in self.leave_out if path.exists()}
            self._found = [file for source in self.sources for file in self._of(source, written)]
        return self._found

    def _of(self, source: str, written: set[tuple[int, int]]) -> Iterator[_File]:
        if source == PYTHON_STDLIB:
            yield from self._checked(_stdlib_files(), written)
            return
        try:
            status = os.stat(source)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{source or repr(source)}: no such file or folder: give text files, .jsonl files,"
                f" folders, or {PYTHON_STDLIB}"
            ) from None
        path = Path(source)
        if stat.S_ISDIR(status.st_mode):
            found = list(self._checked(self._files_of(path), written))
            if not found:
                patterns = " ".join(self.include) or "any name"
                raise UserError(
                    f"{source}: the folder holds no file that matches {patterns}:"
                    " change --include, or name another folder"
                )
            yield from found
            return
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{source}: is no regular file, and is read more than once: copy it")
        if _identity(status) in written:
            raise UserError(f"{source}: would be overwritten by the output: give another --output")
        yield _File(path, False, status.st_size)

    def _checked(self, paths: Sequence[Path], written: set[tuple[int, int]]) -> Iterator[_File]:
        """Those files of a folder that are to be read; all of them must be readable."""
        for path in paths:
            try:
                status = path.stat()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                self._irregular.append(path)  # a link to nothing
                continue
            if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for a writer
                self._irregular.append(path)
            elif _identity(status) not in written:
                if not os.access(path, os.R_OK):
                    raise UserError(
                        f"{path}: permission denied: make it readable, or choose files with"
                        " --include"
                    )
                yield _File(path, True, status.st_size)

    def _files_of(self, folder: Path) -> list[Path]:
        found = []
        for parent, folders, names in os.walk(folder, onerror=_raise):
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

    def _holds_lines(self, path: Path) -> bool:
        """JSON lines by name; a .json file if it could be nothing else, or has the key."""
        suffix = path.suffix.lower()
        if suffix != ".json":
            return suffix in _JSON_LINES
        with path.open("rb") as file:
            lines = (line for line in file if line.strip())
            try:
                record = json.loads(next(lines, b""))
            except (ValueError, RecursionError):
                return False
            more = next(lines, None) is not None
        return isinstance(record, dict) and (more or self.text_key in record)

    def _lines(self, path: Path) -> Iterator[Document]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                yield Document(text=self._text_of(line, f"{path}: line {number}"), size=len(line))

    def _text_of(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: is not JSON ({error}): correct the file") from None
        if not isinstance(record, dict):
            raise UserError(f'{where}: is no JSON object: write {{"{self.text_key}": …}}')
        text = record.get(self.text_key)
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ascii(text[error.start])[1:-1]
                raise UserError(
                    f"{where}: the text has {half}, half of a character: correct the file"
                ) from None
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
    """The text as it is, without a byte-order mark."""
    data = path.read_bytes()
    # A NUL is valid UTF-8, but no text has one.
    if b"\0" in data:
        raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "binary file")
    encoding = "utf-8-sig"
    if path.suffix == ".py":
        # Python files may declare another encoding.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    text.encode()  # some encodings have characters that UTF-8 lacks
    return text


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _raise(error: OSError) -> None:
    raise error


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
