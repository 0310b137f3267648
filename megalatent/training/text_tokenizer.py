"""Text to token ids, by `tokenizers`; and training of a byte-level BPE.

Text is data: the name of a special token inside it is encoded letter by letter, never as the token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalatent.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "LARGEST_VOCABULARY",
    "SMALLEST_VOCABULARY",
    "TOKENIZER_FILES",
    "TextTokenizer",
    "train_tokenizer",
    "use_workers",
]

END_OF_DOCUMENT = "<|endoftext|>"
# All bytes, and the end of a document.
SMALLEST_VOCABULARY = 257
# The trainer reserves memory for all tokens at once; the largest vocabularies have about a million.
LARGEST_VOCABULARY = 10_000_000
# What a trained tokenizer consists of.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Where a bare tokenizer.json does not say which token ends a document.
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>")


class TextTokenizer:
    """A tokenizer found on this machine.

    Attributes:
        vocabulary: number of ids, special tokens included.
        end: id of the end of a document, or None where the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer, end: int | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocabulary: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.end = end

    @classmethod
    def load(cls, name: str) -> TextTokenizer:
        """From a tokenizer.json, a folder with one, or the name of a downloaded tokenizer.

        Raises:
            UserError: nothing of the kind is on this machine.
        """
        if not name:
            raise UserError("--tokenizer: the name is empty: give a tokenizer.json or a folder")
        path = Path(name)
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            return cls._from_file(name, file)
        return cls._from_transformers(name)

    @classmethod
    def _from_file(cls, name: str, file: Path) -> TextTokenizer:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"--tokenizer {name}: {file.name} is no tokenizer ({error}): give a tokenizer.json"
            ) from None
        for end in _end_tokens(name, file.with_name("tokenizer_config.json")):
            if tokenizer.token_to_id(end) is not None:
                return cls(tokenizer, tokenizer.token_to_id(end))
        return cls(tokenizer, None)

    @classmethod
    def _from_transformers(cls, name: str) -> TextTokenizer:
        missing = (
            f"--tokenizer {name}: no such file or folder, and no downloaded tokenizer of that name:"
            " give a tokenizer.json or a folder with one, or --train-tokenizer to make it"
        )
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError(missing + " (names need the package transformers)") from None
        try:
            loaded = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError):
            raise UserError(missing) from None
        except Exception as error:  # of a folder with broken files: anything
            raise UserError(
                f"--tokenizer {name}: cannot be loaded ({type(error).__name__}: {error}): give a"
                " tokenizer.json or a folder with one"
            ) from None
        if not loaded.is_fast:
            raise UserError(
                f"--tokenizer {name}: has no tokenizer.json (a slow tokenizer): give one with it"
            )
        return cls(loaded.backend_tokenizer, loaded.eos_token_id)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any special token."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]


def _end_tokens(name: str, config: Path) -> Sequence[str]:
    """Names that the end of a document may have, by tokenizer_config.json where there is one."""
    if not config.is_file():
        return _KNOWN_ENDS
    where = f"--tokenizer {name}: {config.name}"
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}): correct it, or remove it") from None
    if not isinstance(settings, dict):
        raise UserError(f"{where} holds no JSON object: correct it, or remove it")
    end: Any = settings.get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    if end is None:
        return ()
    if not isinstance(end, str):
        raise UserError(f"{where}: eos_token is {end!r}, not a text: correct it, or remove it")
    return (end,)


def use_workers(workers: int) -> None:
    """Let the tokenizers of this process use `workers` threads. Before the first encoding."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"


def train_tokenizer(texts: Iterator[str], vocabulary: int, files: Sequence[Path]) -> TextTokenizer:
    """Train a byte-level BPE, which transformers and Megatron read. It depends on the texts alone.

    Args:
        files: where to write `TOKENIZER_FILES`, in one folder.

    Raises:
        UserError: the texts have too few different pairs for the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocabulary:
        raise UserError(
            f"--train-tokenizer {vocabulary}: the text has only {reached} different tokens:"
            f" give {reached} or less, or more text"
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    file, config = files
    file.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return TextTokenizer.load(str(file.parent))
