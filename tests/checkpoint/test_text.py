"""The tokenizer and what goes with it: ends of texts and documents, settings of generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megalatent import platform

platform.install()

from megalatent.checkpoint.convert import from_hf, to_hf  # noqa: E402
from megalatent.errors import UserError  # noqa: E402
from tests.checkpoint import models  # noqa: E402


def add_tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(models.VOCAB - 1)}
    tokenizer = Tokenizer(WordLevel({**words, "<end>": len(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An own model, with a tokenizer and settings of generation, in both forms."""
    folder = tmp_path_factory.mktemp("models")
    models.save_own(folder / "hf", fusion="gated", eos_token_id=5)
    add_tokenizer(folder / "hf")
    settings = {"mode": "fused", "prefill_passes": 3, "eos_token_id": [5, 7], "temperature": 0.6}
    (folder / "hf" / "generation_config.json").write_text(json.dumps(settings))
    from_hf(folder / "hf", folder / "megatron")
    return folder


def test_all_that_belongs_to_text_comes_back(made: Path, tmp_path: Path) -> None:
    to_hf(made / "megatron", tmp_path / "back")
    before, after = (read(folder / "config.json") for folder in (made / "hf", tmp_path / "back"))
    for name in ("document_end_token_id", "eos_token_id", "bos_token_id", "pad_token_id"):
        assert after.get(name) == before.get(name), name  # the tokenizer would say otherwise
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (made / "hf" / name).read_bytes()


def test_the_end_of_documents_is_said_once(made: Path, tmp_path: Path) -> None:
    """An export that knows none can be told one; one that knows another cannot."""
    to_hf(made / "megatron", tmp_path / "told", document_end=9)
    assert read(tmp_path / "told" / "config.json")["document_end_token_id"] == 9
    from_hf(tmp_path / "told", tmp_path / "again")
    with pytest.raises(UserError, match="in the checkpoint it is 9"):
        to_hf(tmp_path / "again", tmp_path / "out", document_end=8)


def test_a_damaged_tokenizer(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "hf", tmp_path / "tokenizer"))
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=f"the tokenizer {folder} cannot be loaded"):
        to_hf(made / "megatron", tmp_path / "out", tokenizer=folder)


def test_a_tokenizer_of_a_list_of_words(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{number}" for number in range(len(words), models.VOCAB)]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    to_hf(made / "megatron", tmp_path / "out", tokenizer=folder)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w7 w9", add_special_tokens=False)["input_ids"] == [7, 9]
