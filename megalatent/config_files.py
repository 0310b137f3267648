"""Files and folders that a configuration names: those to read exist, those to write can be made."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megalatent.config_checkpoint import check_checkpoints
from megalatent.config_paths import check_writable, looking_at
from megalatent.config_ranges import read_split
from megalatent.errors import UserError

__all__ = ["check_files", "missing_files"]


def check_files(
    args: argparse.Namespace, costs: str | None, *, checkpoints_repaired: bool = False
) -> None:
    """Raise a `UserError` for the first file that is missing or folder that cannot be written.

    Args:
        costs: `latent.passes.costs`.
        checkpoints_repaired: whether something else mends the run's own checkpoints before it
            starts.
    """
    for check in _checks(args, costs, checkpoints_repaired):
        check()


def missing_files(args: argparse.Namespace, costs: str | None) -> list[str]:
    """What `check_files` would refuse, a line each: a plan can be looked at before its data is."""
    found = []
    for check in _checks(args, costs, False):
        try:
            check()
        except UserError as error:
            found.append(str(error))
    return found


def _checks(
    args: argparse.Namespace, costs: str | None, repaired: bool
) -> Iterator[Callable[[], None]]:
    yield lambda: _check_data(args)
    yield lambda: _check_tokenizer(args)
    yield lambda: check_checkpoints(args, repaired=repaired)
    yield lambda: _check_folders(args)
    yield lambda: _check_costs(costs)


def _check_folders(args: argparse.Namespace) -> None:
    for name in ("save", "tensorboard_dir", "data_cache_path", "wandb_save_dir"):
        folder = getattr(args, name)
        if folder is not None:
            check_writable(f"megatron.{name}", folder)


def _check_costs(costs: str | None) -> None:
    if costs is not None and not _is_file("latent.passes.costs", costs):
        raise UserError(
            f"latent.passes.costs: {costs}: no such file: give a file of measured costs, or null"
        )


def _is_file(where: str, path: str) -> bool:
    with looking_at(where, path):
        return Path(path).is_file()


def _check_data(args: argparse.Namespace) -> None:
    sources = [
        name
        for name in (
            "data_path",
            "data_args_path",
            "train_data_path",
            "per_split_data_args_path",
            "mock_data",
        )
        if getattr(args, name)
    ]
    if not sources:
        raise UserError(
            "megatron.data_path: missing: give the prefix of a .bin/.idx pair (made by"
            " `megalatent data`), or mock_data: true"
        )
    if len(sources) > 1:
        raise UserError(
            f"megatron.{sources[1]}: is given besides {sources[0]}: a run reads one source: keep"
            " one"
        )
    apart = ("valid", "valid_data_path") if args.multiple_validation_sets else ()
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        given = getattr(args, name) or []
        prefixes = _check_blend(f"megatron.{name}", given, blended=name not in apart)
        if name == "data_path" and not args.sft:
            _check_shares(args.split, prefixes)
    if args.data_args_path:
        where = "megatron.data_args_path"
        _check_blend(where, _read(where, args.data_args_path).split())
    if args.per_split_data_args_path:
        where = "megatron.per_split_data_args_path"
        try:
            splits = json.loads(_read(where, args.per_split_data_args_path))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: {args.per_split_data_args_path}: not JSON ({error}): correct the file"
            ) from None
        for split in ("train", "valid", "test"):
            found = splits.get(split) if isinstance(splits, dict) else None
            if found is None:
                raise UserError(
                    f"{where}: {args.per_split_data_args_path}: has no {split!r}: give a list of"
                    " prefixes for train, valid and test"
                )
            found = found.split() if isinstance(found, str) else found
            _check_blend(f"{where}.{split}", found, blended=split not in apart)


def _read(where: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UserError(f"{where}: {path}: cannot be read: give an existing text file") from None


# What Megatron takes where the config says nothing.
_SPLIT = "969, 30, 1"
# Of Megatron's .idx files: mark and version, then kind of number, sequences and documents.
_IDX = struct.Struct("<9sQBQQ")


def _check_shares(split: str | None, prefixes: Iterable[str]) -> None:
    """Every part that is asked for gets a document; Megatron never ends looking for one."""
    parts = read_split(split or _SPLIT)
    for prefix in prefixes:
        with looking_at("megatron.data_path", prefix), open(f"{prefix}.idx", "rb") as file:
            head = file.read(_IDX.size)
        if len(head) < _IDX.size or not head.startswith(b"MMIDIDX"):
            continue  # Megatron says what is wrong with it
        documents = _IDX.unpack(head)[3]
        begin = 0.0
        for name, share in zip(("training", "validation", "test"), parts, strict=False):
            end = begin + share / sum(parts)
            if share > 0 and round(end * documents) <= round(begin * documents):
                given = f"{split!r}" if split else f"'{_SPLIT}' (Megatron's, if none is given)"
                raise UserError(
                    f"megatron.split: {given} leaves none of the {documents} documents of {prefix}"
                    f' for the {name} set: give it more, or 0 for no such set, as in "98,2,0"'
                )
            begin = end


def _check_blend(where: str, entries: Iterable[str], *, blended: bool = True) -> list[str]:
    """One prefix, or weights and prefixes in turn; the prefixes.

    Without weights Megatron would go through each set once at most, and then stop.

    Args:
        blended: sets are mixed into one; else each is a set of its own and has no weight.
    """
    items = [str(entry) for entry in entries]
    if len(items) > 1 and blended:
        if len(items) % 2:
            raise UserError(
                f"{where}: {len(items)} entries: write one prefix, or weight, prefix, weight,"
                " prefix, …"
            )
        for weight in items[0::2]:
            try:
                float(weight)
            except ValueError:
                raise UserError(
                    f"{where}: {weight!r} is no weight: write weight, prefix, weight, prefix, …"
                ) from None
        items = items[1::2]
    for prefix in items:
        for ending in (".bin", ".idx"):
            if not _is_file(where, prefix + ending):
                hint = (
                    " (give the prefix without the ending)"
                    if prefix.endswith((".bin", ".idx"))
                    else ""
                )
                raise UserError(
                    f"{where}: {prefix}{ending}: no such file{hint}: make it with `megalatent data`"
                )
    return items


# Tokenizer type -> the option with its file. A Hugging Face tokenizer is a folder, or the name of
# one that an earlier download left on this machine.
_TOKENIZER_FILES = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
}


def _check_tokenizer(args: argparse.Namespace) -> None:
    kind = args.tokenizer_type
    if kind in ("NullTokenizer", "NullMultimodalTokenizer") and args.vocab_size is None:
        raise UserError(f"megatron.vocab_size: missing: {kind} needs the size of the vocabulary")
    for name in _TOKENIZER_FILES.get(kind, ()):
        path = getattr(args, name)
        if path is None:
            raise UserError(f"megatron.{name}: missing: {kind} needs this file")
        if not _is_file(f"megatron.{name}", path):
            raise UserError(f"megatron.{name}: {path}: no such file: give the tokenizer's file")
    if kind in ("HuggingFaceTokenizer", "SFTTokenizer"):
        _check_hf_tokenizer(args.tokenizer_model)


_HF_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _check_hf_tokenizer(model: str | None) -> None:
    where = "megatron.tokenizer_model"
    if model is None:
        raise UserError(f"{where}: missing: give a folder with tokenizer.json")
    with looking_at(where, model):
        folder = Path(model)
        if folder.is_dir():
            if not any((folder / name).is_file() for name in _HF_TOKENIZER_FILES):
                raise UserError(
                    f"{where}: {model}: the folder holds no tokenizer.json: give one that does"
                )
            return
    if not _is_downloaded(model):
        raise UserError(
            f"{where}: {model}: no such folder, and no downloaded tokenizer of that name: give a"
            " folder with tokenizer.json (`megalatent data --train-tokenizer` makes one)"
        )


def _is_downloaded(model: str) -> bool:
    """Whether the tokenizer `owner/model` is in the local cache; training downloads nothing."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(
            isinstance(try_to_load_from_cache(model, name), str)
            for name in ("tokenizer.json", "tokenizer_config.json")
        )
    except HFValidationError:
        return False
