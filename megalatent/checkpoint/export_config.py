"""The configuration of an export: from Megatron's arguments, the tokenizer and the options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalatent.checkpoint.arguments import config_from_args
from megalatent.checkpoint.reader import CheckpointReader
from megalatent.errors import UserError

__all__ = ["export_config", "named_tokenizer"]


def named_tokenizer(args: Any, iteration: Path) -> Path | None:
    """The tokenizer that the run was given, if it is a folder that is still there.

    Args:
        iteration: folder of the checkpoint. A converted one has its tokenizer beside that.
    """
    name = getattr(args, "tokenizer_model", None)
    path = Path(name) if name else iteration.parent / "tokenizer"
    return path if path.is_dir() else None


def export_config(
    args: Any,
    reader: CheckpointReader,
    tokenizer: Path | None,
    vocab_size: int | None,
    document_end: int | None,
    dtype: torch.dtype | None,
) -> Any:
    from megalatent.hf.configuration_megalatent import MegalatentConfig

    words = _TokenizerFacts.load(tokenizer)
    table = reader.tensors.get("embedding.word_embeddings.weight")
    if table is None:
        raise UserError(f"{reader.folder} has no word embeddings: it is no language model")
    known = _vocab_size(args, words)
    if vocab_size is not None and known is not None and vocab_size < known:
        raise UserError(
            f"--vocab-size {vocab_size} would cut off tokens, of which there are {known}: leave the"
            " option out"
        )
    vocab_size = vocab_size or known
    if vocab_size is None:
        raise UserError(
            f"{reader.folder} does not say how many of its {table.size[0]} embedding rows are"
            " tokens and how many padding: give --tokenizer DIR or --vocab-size N"
        )
    if not 0 < vocab_size <= table.size[0]:
        raise UserError(
            f"the vocabulary has {vocab_size} tokens and the checkpoint {table.size[0]} embedding"
            " rows: give the tokenizer that it was trained with"
        )
    fields = config_from_args(args, vocab_size)
    if document_end is not None:
        _check_document_end(document_end, fields)
        fields["document_end_token_id"] = document_end
    elif "document_end_token_id" not in fields:
        ends = _document_end(args, words)
        trained = getattr(args, "latent_config", None) is not None
        if ends is None and trained and fields["fusion"] != "none":
            raise UserError(
                f"{reader.folder} does not say which token ends a document, and the model was"
                " trained to read no state after it: give --tokenizer DIR or --document-end-token"
                " ID"
            )
        fields["document_end_token_id"] = ends
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(name, getattr(words, name))
    fields["dtype"] = str(dtype or table.properties.dtype).removeprefix("torch.")
    return MegalatentConfig(**fields)


def _check_document_end(token: int, fields: Mapping[str, Any]) -> None:
    known = fields.get("document_end_token_id")
    if known not in (None, token):
        raise UserError(
            f"--document-end-token {token}: in the checkpoint it is {known}: leave the option out"
        )
    if token >= fields["vocab_size"]:
        raise UserError(
            f"--document-end-token {token}: the vocabulary has {fields['vocab_size']} tokens,"
            " counted from 0: give one of them"
        )


class _TokenizerFacts:
    """What a tokenizer says of the vocabulary."""

    def __init__(self) -> None:
        self.size: int | None = None
        self.bos_token_id: int | None = None
        self.eos_token_id: int | None = None
        self.pad_token_id: int | None = None

    @classmethod
    def load(cls, folder: Path | None) -> _TokenizerFacts:
        facts = cls()
        if folder is None:
            return facts
        if not folder.is_dir():
            raise UserError(f"--tokenizer {folder} is not a folder: give one with a tokenizer")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the tokenizers package raises no other kind
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
            raise UserError(f"the tokenizer {folder} cannot be loaded: {reason}") from None
        facts.size = len(tokenizer)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(facts, name, getattr(tokenizer, name))
        return facts


def _vocab_size(args: Any, words: _TokenizerFacts) -> int | None:
    # With a tokenizer of its own, Megatron takes the size from there and leaves the option alone.
    by_option = getattr(args, "tokenizer_type", None) in (None, "NullTokenizer", "TikTokenizer")
    given = getattr(args, "vocab_size", None)
    return given if by_option and given else words.size


def _document_end(args: Any, words: _TokenizerFacts) -> int | None:
    if getattr(args, "tokenizer_type", None) == "NullTokenizer":
        end = getattr(args, "null_tokenizer_eod_id", None)
        return args.vocab_size - 1 if end is None else int(end)
    return words.eos_token_id
