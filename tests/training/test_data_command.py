"""`megalatent data`: what it writes is read back with Megatron's own reader."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megalatent.cli import main


@pytest.fixture(scope="module", autouse=True)
def _install() -> None:
    from megalatent.platform import install

    install()


def indexed(prefix: Path) -> list[list[int]]:
    """Documents as Megatron reads them; every document must be one sequence."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix), mmap=False)
    count = len(dataset)
    assert dataset.document_indices.tolist() == list(range(count + 1))
    return [dataset[i].tolist() for i in range(count)]


WORDS = "the state of a pass is fed back into the next one while gradients flow".split()


def text(seed: int, words: int = 200) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + str(draw.randrange(50)) for _ in range(words))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A tree with text in two folders, a hidden file, a binary file and an empty one."""
    root = tmp_path / "corpus"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "z.txt").write_text(text(1))
    (root / "b" / "a.py").write_text(text(2) + " äöü <|endoftext|>\n")
    (root / "b" / "c.txt").write_text(text(3))
    (root / "empty.txt").write_text("")
    (root / "image.png").write_bytes(b"\x89PNG\0\xff")
    (root / ".git" / "config").write_text(text(4))
    return root


@pytest.fixture
def tokenizer(tmp_path: Path, corpus: Path) -> Path:
    folder = tmp_path / "tokenizer"
    arguments = ["--tokenizer", str(folder), "--output", str(tmp_path / "first")]
    assert main(["data", str(corpus), *arguments, "--train-tokenizer", "300"]) == 0
    return folder


def test_folder_round_trip(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "set"
    arguments = ["--tokenizer", str(tokenizer), "--output", str(out), "--append-eod"]
    assert main(["data", str(corpus), *arguments]) == 0
    documents = indexed(out)
    # An independent reading: the library's own encoding of each text, in order of the paths.
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = reference.token_to_id("<|endoftext|>")
    texts = [(corpus / name).read_text() for name in ("b/a.py", "b/c.txt", "z.txt")]
    assert [document[-1] for document in documents] == [end] * 3
    # Byte-level BPE loses nothing; the name of the end token inside a text is text.
    assert [reference.decode(document[:-1]) for document in documents] == texts
    assert all(end not in document[:-1] for document in documents)
    for document, one in zip(documents[1:], texts[1:], strict=True):
        assert document[:-1] == reference.encode(one).ids
    output = capsys.readouterr().out
    tokens = sum(map(len, documents))
    assert f"{out}: 3 documents, {tokens:,} tokens" in output
    assert "left out 1 empty documents" in output
    assert "left out 1 files that are not text" in output
    assert sorted(p.name for p in out.parent.iterdir()) == ["set.bin", "set.idx"]


def test_smallest_type_that_holds_the_vocabulary(tmp_path: Path, tokenizer: Path) -> None:
    documents = indexed(tmp_path / "first")
    size = (tmp_path / "first.bin").stat().st_size
    assert size == sum(map(len, documents)) * np.dtype(np.uint16).itemsize


def test_include_reads_matching_files_only(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    out = tmp_path / "py"
    arguments = ["--tokenizer", str(tokenizer), "--output", str(out), "--include", "*.py"]
    assert main(["data", str(corpus), *arguments]) == 0
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    (document,) = indexed(out)
    assert reference.decode(document) == (corpus / "b" / "a.py").read_text()


def test_json_lines_and_text_key(tmp_path: Path, tokenizer: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    texts = ["one line", "zwei Zeilen\nmit Umbruch", "drei"]
    lines.write_text("\n".join(json.dumps({"body": t, "id": i}) for i, t in enumerate(texts)))
    out = tmp_path / "lines"
    arguments = ["--tokenizer", str(tokenizer / "tokenizer.json"), "--output", str(out)]
    assert main(["data", str(lines), *arguments, "--text-key", "body"]) == 0
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert [reference.decode(document) for document in indexed(out)] == texts


def test_same_input_same_bytes(tmp_path: Path, corpus: Path) -> None:
    for name, workers in (("one", "1"), ("two", "2")):
        arguments = ["--tokenizer", str(tmp_path / f"{name}-tok"), "--train-tokenizer", "320"]
        arguments += ["--output", str(tmp_path / name), "--workers", workers, "--append-eod"]
        assert main(["data", str(corpus), *arguments]) == 0
    for ending in (".bin", ".idx", "-tok/tokenizer.json", "-tok/tokenizer_config.json"):
        first, second = (Path(f"{tmp_path}/{name}{ending}") for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()


def test_split_by_tokens(tmp_path: Path, tokenizer: Path) -> None:
    lines = tmp_path / "many.jsonl"
    # Documents of very different length: shares hold for tokens, not for documents.
    texts = [text(i, words=20 + 37 * i % 400) for i in range(200)]
    lines.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    out = tmp_path / "parts"
    arguments = ["--tokenizer", str(tokenizer), "--output", str(out), "--split", "0.8,0.15,0.05"]
    assert main(["data", str(lines), *arguments]) == 0
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    parts = {name: indexed(Path(f"{out}_{name}")) for name in ("train", "valid", "test")}
    tokens = {name: sum(map(len, documents)) for name, documents in parts.items()}
    total = sum(tokens.values())
    longest = max(len(d) for documents in parts.values() for d in documents)
    for name, share in (("train", 0.8), ("valid", 0.15), ("test", 0.05)):
        # Each part is off by one document at most.
        assert abs(tokens[name] - share * total) <= longest
    found = sorted(reference.decode(d) for documents in parts.values() for d in documents)
    assert found == sorted(texts)


def test_megatron_reads_the_trained_tokenizer(tokenizer: Path) -> None:
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    theirs = HuggingFaceTokenizer(str(tokenizer))
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert theirs.vocab_size == reference.get_vocab_size() == 300
    assert theirs.eod == reference.token_to_id("<|endoftext|>")


def test_standard_library_is_ordered_text() -> None:
    from megalatent.training.corpus import PYTHON_STDLIB, Corpus

    corpus = Corpus(sources=[PYTHON_STDLIB])
    files = [path for path, _ in corpus.files()]
    assert files == sorted(files, key=lambda path: path.as_posix())
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts for path in files)
    texts = [document.text for document in corpus.documents()]
    source = next(p for p in files if p.name == "dataclasses.py").read_text()
    assert source in texts
    # Modules without a source file give their docstrings.
    assert any(t.startswith(("math\n\n", "time\n\n")) for t in texts)
    assert len(texts) > len(files) - len(corpus.unreadable)


def mistakes(tmp_path: Path, corpus: Path, tokenizer: Path) -> dict[str, tuple[list[str], str]]:
    """Arguments after TEXT and --output, and what the message must contain."""
    bad_line, bad_key, binary = (tmp_path / n for n in ("bad.jsonl", "key.jsonl", "bin.txt"))
    bad_line.write_text('{"text": "a"}\n{"text": }\n')
    bad_key.write_text('{"txt": "a"}\n')
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "nothing.txt"
    empty.write_text("")
    no_end = tmp_path / "no_end"
    no_end.mkdir()
    (no_end / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (no_end / "tokenizer_config.json").write_text("{}")
    broken = tmp_path / "tokenizer-broken.json"
    broken.write_text("{}")
    half, deep, pipe = (tmp_path / n for n in ("half.jsonl", "deep.jsonl", "pipe.txt"))
    half.write_text('{"text": "a"}\n{"text": "b\\ud800"}\n')
    deep.write_text("[" * 100_000 + "\n")
    os.mkfifo(pipe)
    configs = {"no json": "{", "a list": "[1]", "odd end": '{"eos_token": 7}'}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes(
            (tokenizer / "tokenizer.json").read_bytes()
        )
        (tmp_path / name / "tokenizer_config.json").write_text(config)
    text_, good = str(corpus), ["--tokenizer", str(tokenizer)]
    new = ["--tokenizer", str(tmp_path / "new-tok")]
    return {
        "no such text": (["missing.txt", *good], "missing.txt: no such file"),
        "binary text": ([str(binary), *good], "is not UTF-8 text"),
        "json": ([str(bad_line), *good], "line 2: is not JSON"),
        "half a character": ([str(half), *good], r"line 2: the text has \ud800"),
        "deep json": ([str(deep), *good], "line 1: is not JSON"),
        "a pipe": ([str(pipe), *good], "pipe.txt: is no regular file"),
        "no name": (["", *good], "'': no such file"),
        "no tokenizer name": ([text_, "--tokenizer", ""], "name is empty"),
        "config is no json": (
            [text_, "--tokenizer", str(tmp_path / "no json")],
            "tokenizer_config.json is not JSON",
        ),
        "config is a list": ([text_, "--tokenizer", str(tmp_path / "a list")], "no JSON object"),
        "odd end": ([text_, "--tokenizer", str(tmp_path / "odd end")], "eos_token is 7"),
        "threads": ([text_, *good, "--workers", "1000000"], "from 1 to 1024"),
        "endless vocabulary": ([text_, *new, "--train-tokenizer", "1" + "0" * 30], "or less"),
        "json key": ([str(bad_key), *good], "did you mean 'txt'"),
        "pattern": ([text_, *good, "--include", "*.rs"], "no file that matches *.rs"),
        "no tokenizer": ([text_, "--tokenizer", "no/such-tok"], "no downloaded tokenizer"),
        "broken tokenizer": ([text_, "--tokenizer", str(broken)], "is no tokenizer"),
        "no end token": ([text_, "--tokenizer", str(no_end), "--append-eod"], "no end token"),
        "tokenizer exists": ([text_, *good, "--train-tokenizer", "300"], "would replace it"),
        "tiny vocabulary": ([text_, *new, "--train-tokenizer", "200"], "257 or more"),
        "huge vocabulary": ([text_, *new, "--train-tokenizer", "90000"], "different tokens"),
        "workers": ([text_, *good, "--workers", "0"], "from 1 to"),
        "split text": ([text_, *good, "--split", "a,b"], "not numbers"),
        "split sum": ([text_, *good, "--split", "0.9,0.2"], "sum to 1"),
        "split count": ([text_, *good, "--split", "1.0"], "1 shares"),
        "empty part": ([str(corpus / "z.txt"), *good, "--split", "0.5,0.5"], "no document is left"),
        "nothing": ([str(empty), *good], "no document is left"),
        "no arguments": ([], "required"),
    }


def test_mistakes_are_one_line_and_write_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = mistakes(tmp_path, corpus, tokenizer)
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    for name, (arguments, expected) in cases.items():
        output = ["--output", str(tmp_path / "wrong")] if arguments else []
        assert main(["data", *arguments, *output]) == 2, name
        printed = capsys.readouterr()
        assert printed.err.startswith("megalatent: error: "), name
        assert printed.err.count("\n") == 1, name
        assert expected in printed.err, (name, printed.err)
        assert printed.out == "", name
        assert sorted(tmp_path.rglob("*")) == before, name


def test_existing_output_needs_overwrite(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "first"
    before = (tmp_path / "first.bin").read_bytes()
    arguments = ["data", str(corpus / "z.txt"), "--tokenizer", str(tokenizer), "--output", str(out)]
    assert main(arguments) == 2
    assert "first.bin exists" in capsys.readouterr().err
    assert (tmp_path / "first.bin").read_bytes() == before
    assert main([*arguments, "--overwrite"]) == 0
    assert len(indexed(out)) == 1


def test_output_folder_is_a_file(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    out = str(blocker / "x")
    assert main(["data", str(corpus), "--tokenizer", str(tokenizer), "--output", out]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err
