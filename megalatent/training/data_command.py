"""`data`: text, JSON lines and source trees to Megatron's indexed datasets."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalatent.errors import UserError

if TYPE_CHECKING:
    from megalatent.training.corpus import Corpus
    from megalatent.training.indexed_writer import IndexedOutput
    from megalatent.training.text_tokenizer import TextTokenizer

__all__ = ["add_data_parser", "run_data_command"]

_DESCRIPTION = """\
Turns text into PREFIX.bin and PREFIX.idx, which Megatron reads as data_path: PREFIX. A text file is
one document, a line of JSON lines (.jsonl, .ndjson, or .json with an object on each line) is one
document, a folder gives its files in order of their paths, and the word python-stdlib stands for
the sources and docstrings of Python's own library. The same input gives the same output, byte for
byte.
"""

# Characters that are tokenized in one call: enough for all threads, little memory.
_BATCH = 4_000_000
_SPLIT_NAMES = ("train", "valid", "test")
# More threads than any machine has; far more could not be started.
_MOST_WORKERS = 1024


def add_data_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `data` to the command line."""
    parser = subparsers.add_parser("data", description=_DESCRIPTION)
    add = parser.add_argument
    add("text", metavar="TEXT", nargs="+", help="text file, .jsonl file, folder or python-stdlib")
    add(
        "--tokenizer",
        required=True,
        metavar="T",
        help="tokenizer.json, a folder with one, or the name of a downloaded tokenizer; with"
        " --train-tokenizer the folder to write",
    )
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    add(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="first train a byte-level BPE of N tokens on the same text and write it to T",
    )
    add("--append-eod", action="store_true", help="end every document with the end token")
    add("--text-key", default="text", metavar="KEY", help="key of the text in .jsonl (text)")
    add(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="files of folders to read, for example '*.py'; may be repeated (all text files)",
    )
    add(
        "--split",
        metavar="SHARES",
        help="write PREFIX_train, PREFIX_valid and, for three shares, PREFIX_test, for example"
        " 0.98,0.02",
    )
    add("--workers", type=int, metavar="N", help="threads (all cores)")
    add("--overwrite", action="store_true", help="replace files that exist")


def run_data_command(args: argparse.Namespace) -> int:
    """Run `data`; returns the exit status.

    Raises:
        UserError: a mistake in what was given; nothing is written then.
    """
    from megalatent.training.corpus import Corpus
    from megalatent.training.indexed_writer import indexed_outputs
    from megalatent.training.output_files import Staging
    from megalatent.training.text_tokenizer import TextTokenizer, train_tokenizer, use_workers

    workers = args.workers if args.workers is not None else len(os.sched_getaffinity(0))
    if not 1 <= workers <= _MOST_WORKERS:
        raise UserError(f"--workers: {workers}: give a number from 1 to {_MOST_WORKERS}")
    shares = _read_shares(args.split)
    prefixes = (
        [f"{args.output}_{name}" for name in _SPLIT_NAMES[: len(shares)]]
        if args.split
        else [args.output]
    )
    for option, name in (("--output", args.output), ("--tokenizer", args.tokenizer)):
        if not name.isprintable():
            raise UserError(
                f"{option} {name!a}: has characters that no line can show: give another name"
            )
    written = _check_outputs(args, prefixes)
    learned = _check_tokenizer(args, written) if args.train_tokenizer is not None else []
    corpus = Corpus(
        sources=args.text,
        text_key=args.text_key,
        include=args.include,
        leave_out=[*written, *learned],
    )
    size = corpus.size()
    use_workers(workers)
    with Staging() as staging:
        if args.train_tokenizer is None:
            tokenizer = TextTokenizer.load(args.tokenizer)
            _check_end(tokenizer, args)
        else:
            with _Advance("training the tokenizer", size) as advance:
                texts = _texts(corpus, advance)
                files = [staging.path(file) for file in learned]
                tokenizer = train_tokenizer(texts, args.train_tokenizer, files)
        with indexed_outputs(prefixes, shares, tokenizer.vocabulary, staging) as outputs:
            empty = _write(corpus, tokenizer, outputs, args.append_eod, size)
            _check_written(outputs)
    _report(outputs, tokenizer, empty, corpus, args)
    return 0


def _write(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    outputs: Sequence[IndexedOutput],
    append_eod: bool,
    size: int,
) -> int:
    """Write every document that has a token; returns the number of those that have none."""
    empty = 0
    with _Advance("tokenizing", size) as advance:
        for ids in _encoded(corpus, tokenizer, advance):
            if not ids:
                empty += 1
                continue
            if append_eod:
                assert tokenizer.end is not None
                ids.append(tokenizer.end)
            _neediest(outputs, len(ids)).add(ids)
    return empty


def _read_shares(text: str | None) -> list[float]:
    if text is None:
        return [1.0]
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--split {text}: not numbers: write for example 0.98,0.02") from None
    if not 2 <= len(shares) <= len(_SPLIT_NAMES):
        raise UserError(
            f"--split {text}: {len(shares)} shares: give two (train,valid) or three"
            " (train,valid,test)"
        )
    if not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UserError(
            f"--split {text}: must be positive and sum to 1: write for example 0.98,0.02"
        )
    return shares


def _check_outputs(args: argparse.Namespace, prefixes: Sequence[str]) -> list[Path]:
    """The files of the pairs, which may all be written."""
    from megalatent.training.indexed_writer import pair
    from megalatent.training.output_files import check_file

    if os.path.basename(args.output) in ("", ".", ".."):
        example = os.path.join(args.output, "corpus")
        raise UserError(
            f"--output {args.output!r}: names a folder, and the files need a name: give for example"
            f" {example}"
        )
    files = [file for prefix in prefixes for file in pair(prefix)]
    for file in files:
        check_file(f"--output {args.output}", file, args.overwrite)
    return files


def _check_tokenizer(args: argparse.Namespace, outputs: Sequence[Path]) -> list[Path]:
    """The files of the tokenizer to train, which may be written.

    What its folder holds besides would be taken for parts of the tokenizer, or lost.
    """
    from megalatent.training.output_files import ASIDE, check_file, check_folder
    from megalatent.training.text_tokenizer import (
        LARGEST_VOCABULARY,
        SMALLEST_VOCABULARY,
        TOKENIZER_FILES,
    )

    size, where = args.train_tokenizer, f"--tokenizer {args.tokenizer}"
    if size < SMALLEST_VOCABULARY:
        raise UserError(
            f"--train-tokenizer {size}: a byte-level vocabulary has all 256 bytes and an end token:"
            f" give {SMALLEST_VOCABULARY} or more"
        )
    if size > LARGEST_VOCABULARY:
        raise UserError(f"--train-tokenizer {size}: give {LARGEST_VOCABULARY} or less")
    if not args.tokenizer:
        raise UserError("--tokenizer: the name is empty: give the folder to write")
    folder = Path(args.tokenizer)
    check_folder(where, folder)
    files = [folder / name for name in TOKENIZER_FILES]
    if folder.exists():
        known = {os.path.realpath(file) for file in (*files, *outputs)}
        others = (one for one in sorted(folder.iterdir()) if os.path.realpath(one) not in known)
        other = next((one for one in others if not one.name.startswith(ASIDE)), None)
        if other is not None:
            raise UserError(
                f"{where}: the folder holds {other.name}, which is no part of a tokenizer that"
                " --train-tokenizer writes: give a folder of its own"
            )
    for file in files:
        if file.exists() and not args.overwrite:
            raise UserError(
                f"{where}: exists, and --train-tokenizer would replace it: give another folder, or"
                " --overwrite"
            )
        check_file(where, file, args.overwrite)
    for output in outputs:
        if output.absolute() in (folder.absolute(), *folder.absolute().parents):
            raise UserError(f"{where}: --output writes a file {output}: give another folder")
    return files


def _check_end(tokenizer: TextTokenizer, args: argparse.Namespace) -> None:
    if args.append_eod and tokenizer.end is None:
        raise UserError(
            f"--append-eod: the tokenizer {args.tokenizer} names no end token: give a folder whose"
            " tokenizer_config.json has eos_token"
        )


def _check_written(outputs: Sequence[IndexedOutput]) -> None:
    for output in outputs:
        if output.documents == 0:
            remedy = "give larger shares or more text" if len(outputs) > 1 else "give more text"
            raise UserError(f"{output.prefix}: no document is left for it: {remedy}")


def _texts(corpus: Corpus, advance: _Advance) -> Iterator[str]:
    for document in corpus.documents():
        advance(document.size)
        yield document.text


def _encoded(corpus: Corpus, tokenizer: TextTokenizer, advance: _Advance) -> Iterator[list[int]]:
    batch: list[str] = []
    characters = size = 0
    for document in corpus.documents():
        batch.append(document.text)
        characters += len(document.text)
        size += document.size
        if characters >= _BATCH:
            yield from tokenizer.encode(batch)
            advance(size)
            batch, characters, size = [], 0, 0
    yield from tokenizer.encode(batch)
    advance(size)


def _neediest(outputs: Sequence[IndexedOutput], tokens: int) -> IndexedOutput:
    """The output that lags most behind its share of the tokens, this document included."""
    total = sum(output.tokens for output in outputs) + tokens
    return max(outputs, key=lambda output: output.share * total - output.tokens)


def _report(
    outputs: Sequence[IndexedOutput],
    tokenizer: TextTokenizer,
    empty: int,
    corpus: Corpus,
    args: argparse.Namespace,
) -> None:
    if args.train_tokenizer is not None:
        print(f"{args.tokenizer}: byte-level BPE of {tokenizer.vocabulary:,} tokens")
    for output in outputs:
        print(
            f"{output.prefix}: {output.documents:,} documents, {output.tokens:,} tokens"
            f" (vocabulary {tokenizer.vocabulary:,})"
        )
    if empty:
        print(f"left out {empty:,} empty documents")
    if corpus.unreadable:
        print(f"left out {len(corpus.unreadable):,} files that are not text")


class _Advance:
    """Shows how many bytes are done, on standard error where that is a terminal."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> _Advance:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, size: int) -> None:
        self._bar.advance(self._task, size)
