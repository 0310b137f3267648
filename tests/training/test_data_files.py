"""`megalatent data` and the file system: what may be a source, what is replaced, what is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megalatent.cli import main
from megalatent.training.corpus import Corpus
from megalatent.training.output_files import Staging
from tests.unprivileged import open_folder, run_as_nobody

TEXT = "".join(
    f"state {i} of pass {i * i % 97} is fed back into position {i + 5}\n" for i in range(80)
)
TRAIN = ["--train-tokenizer", "280", "--workers", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one text, `a.txt`, and a folder `corpus` with another."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "b.txt").write_text(TEXT[:900])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def data(*arguments: str) -> int:
    return main(["data", *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert data(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("megalatent: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    return printed.err


def texts(*sources: str) -> list[str]:
    return [document.text for document in Corpus(sources=sources).documents()]


def test_outputs_in_the_folder_of_the_new_tokenizer(folder: Path) -> None:
    arguments = ["a.txt", "--tokenizer", "out", *TRAIN, "--output", "out/corpus", "--append-eod"]
    assert data(*arguments) == 0
    names = {"corpus.bin", "corpus.idx", "tokenizer.json", "tokenizer_config.json"}
    first = contents(folder / "out")
    assert set(first) == names
    # The tokenizer there is the one of the tokens: twice the same files.
    assert data(*arguments, "--overwrite") == 0
    assert contents(folder / "out") == first
    reference = Tokenizer.from_file("out/tokenizer.json")
    assert (folder / "out" / "corpus.bin").stat().st_size == 2 * (len(reference.encode(TEXT)) + 1)


@pytest.mark.parametrize("tokenizer", ["corpus", "corpus/", ".", "..", "link"])
def test_a_folder_with_anything_else_is_no_place_for_a_tokenizer(
    folder: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "link").symlink_to("corpus")
    (folder / "corpus" / "a").symlink_to("a")
    before = contents(folder.parent)
    arguments = ["--tokenizer", tokenizer, *TRAIN, "--output", "o", "--overwrite"]
    said = refused(capsys, "corpus", *arguments)
    assert "a folder of its own" in said
    assert contents(folder.parent) == before


def test_an_empty_folder_may_become_a_tokenizer(folder: Path) -> None:
    (folder / "new").mkdir()
    assert data("a.txt", "--tokenizer", "new", *TRAIN, "--output", "o") == 0
    assert sorted(contents(folder / "new")) == ["tokenizer.json", "tokenizer_config.json"]


def test_what_is_written_is_no_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs inside a source folder do not change the next run's; a source is never replaced."""
    arguments = ["--tokenizer", "corpus/tok", *TRAIN, "--output", "corpus/o"]
    assert data("corpus", *arguments) == 0
    assert "left out" not in capsys.readouterr().out
    first = contents(folder)
    assert data("corpus", *arguments, "--overwrite") == 0
    assert "left out" not in capsys.readouterr().out
    assert contents(folder) == first
    (folder / "t.bin").write_text(TEXT)
    (folder / "same.txt").symlink_to("t.bin")
    before = contents(folder)
    for source in ("t.bin", "same.txt"):
        arguments = ["--tokenizer", "tok", *TRAIN, "--output", "t", "--overwrite"]
        assert "would be overwritten" in refused(capsys, source, *arguments)
    arguments = ["--tokenizer", "corpus/o.bin/tok", *TRAIN, "--output", "corpus/o"]
    assert "give another" in refused(capsys, "a.txt", *arguments, "--overwrite")
    assert contents(folder) == before


def test_nothing_is_left_of_a_command_that_fails(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.txt").write_text("")
    assert data("a.txt", "--tokenizer", "tok", *TRAIN, "--output", "o") == 0
    before = contents(folder)
    nowhere = ["--tokenizer", "tok", "--output", "new/dir/o"]
    assert "no document is left" in refused(capsys, "empty.txt", *nowhere)
    deep = ["--tokenizer", "x/y/tok", *TRAIN, "--output", "new/dir/o"]
    assert "different tokens" in refused(capsys, "empty.txt", *deep)
    # Trained and then too little text for two parts: the new tokenizer goes too.
    assert "no document" in refused(capsys, "a.txt", *deep, "--split", "0.5,0.5")
    assert contents(folder) == before


def test_an_interrupted_staging_leaves_what_was_there(folder: Path) -> None:
    def interrupted() -> None:
        with Staging() as staging:
            staging.path(folder / "a.txt").write_text("new")
            staging.path(folder / "p" / "q" / "r.txt").write_text("new")
            assert contents(folder) != before
            raise KeyboardInterrupt

    before = contents(folder)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert contents(folder) == before


@pytest.mark.parametrize("output", ["new/", "", ".", "corpus/..", "corpus/"])
def test_an_output_without_a_name(
    folder: Path, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    arguments = ["a.txt", "--tokenizer", "tok", *TRAIN, "--output", output]
    assert "names a folder" in refused(capsys, *arguments)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["caf\udce9", "a\nb", "a\x1b[2J"])
def test_names_that_cannot_be_shown(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["a.txt", "--tokenizer", "tok", *TRAIN, "--output", name]
    assert "no line can show" in refused(capsys, *arguments)
    arguments = ["a.txt", "--tokenizer", name, *TRAIN, "--output", "o"]
    assert "no line can show" in refused(capsys, *arguments)


def test_outputs_that_cannot_be_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "o.idx").mkdir()
    os.mkfifo(folder / "p.bin")
    (folder / "circle.bin").symlink_to("circle.bin")
    before = sorted(folder.rglob("*"))
    for output, expected in (
        ("o", "o.idx is a folder"),
        ("p", "p.bin is no regular file"),
        ("circle", "links lead back"),
        ("x" * 300, "shorter path"),
        ("a.txt/o", "is a file"),
    ):
        arguments = ["a.txt", "--tokenizer", "tok", *TRAIN, "--output", output, "--overwrite"]
        assert expected in refused(capsys, *arguments)
    assert "shorter path" in refused(capsys, "y" * 300, "--tokenizer", "tok", "--output", "o2")
    assert sorted(folder.rglob("*")) == before


def test_odd_files_of_a_folder_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = folder / "corpus"
    os.mkfifo(corpus / "pipe.txt")
    (corpus / "gone.txt").symlink_to("nothing")
    (corpus / "circle.txt").symlink_to("circle.txt")
    for name in ("hex", "undefined", "no_such", "rot13"):
        (corpus / f"{name}.py").write_text(f"# coding: {name}\nprint()\n")
    (corpus / "half.py").write_text("# coding: unicode_escape\nx = '\\ud800'\n")
    (corpus / "binary.py").write_bytes(b"x = '\0'\n")
    (corpus / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    assert data("corpus", "--tokenizer", "tok", *TRAIN, "--output", "o") == 0
    assert "left out 9 files that are not text" in capsys.readouterr().out
    assert texts("corpus") == [TEXT[:900], "# coding: latin-1\nx = 'é'\n"]


def test_names_of_json_lines(folder: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))
    for name in ("A.JSONL", "b.NdJson", "c.json"):
        (folder / name).write_text(lines)
        assert texts(name) == ["one", "two"]
    (folder / "one.json").write_text('\n{"text": "one"}\n')
    assert texts("one.json") == ["one"]
    # JSON that is no JSON lines is a text like any other.
    for text in ('{"name": "x"}\n', '{\n "text": "x"\n}\n', "[1,\n2]\n", "[" * 10_000):
        (folder / "text.json").write_text(text)
        assert texts("text.json") == [text]


def test_texts_are_read_as_they_are_but_for_the_byte_order_mark(folder: Path) -> None:
    for name in ("x.txt", "x.py"):
        (folder / name).write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\n")
        assert texts(name) == ["a = 1\r\nb = 2\n"]
    (folder / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n')
    assert texts("x.jsonl") == ["one"]


def test_what_permissions_forbid_is_one_line() -> None:
    with open_folder() as folder:
        (folder / "a.txt").write_text(TEXT)
        (folder / "o").mkdir()
        (folder / "o").chmod(0o777)
        good, output = ["--tokenizer", str(folder / "tok")], ["--output", str(folder / "o" / "o")]
        # As root, so that everything is imported.
        assert data(str(folder / "a.txt"), *good, *TRAIN, "--output", str(folder / "first")) == 0
        (folder / "mixed" / "sub").mkdir(parents=True)
        (folder / "closed").mkdir()
        for name in ("mixed/a.txt", "mixed/secret.txt", "secret.jsonl", "mixed/sub/a.txt"):
            (folder / name).write_text(TEXT)
        (folder / "secret").mkdir()
        (folder / "secret" / "tokenizer.json").write_text("{}")
        (folder / "mixed" / "secret.txt").chmod(0)
        (folder / "secret.jsonl").chmod(0)
        before = sorted(folder.rglob("*"))
        for name in ("closed", "secret"):
            (folder / name).chmod(0)

        def forbidden(named: str, *arguments: str) -> None:
            status, said = run_as_nobody(["data", *arguments, "--workers", "1"])
            assert status == 2, said
            assert said.startswith("megalatent: error: "), said
            assert said.count("\n") == 1, said
            assert named in said
            assert "permission denied" in said or "not writable" in said

        text = str(folder / "a.txt")
        forbidden("closed/x.txt", str(folder / "closed" / "x.txt"), *good, *output)
        forbidden("secret.jsonl", str(folder / "secret.jsonl"), *good, *output)
        forbidden("mixed/secret.txt", str(folder / "mixed"), *good, *output)
        forbidden("closed/x", text, *good, "--output", str(folder / "closed" / "x"))
        forbidden(str(folder), text, *good, "--output", str(folder / "o2"))
        forbidden("secret", text, "--tokenizer", str(folder / "secret"), *output)
        new = str(folder / "closed" / "tok")
        forbidden("closed/tok", text, "--tokenizer", new, *TRAIN, *output)
        (folder / "mixed" / "secret.txt").unlink()
        (folder / "mixed" / "sub").chmod(0)
        forbidden("mixed/sub", str(folder / "mixed"), *good, *output)
        for name in ("closed", "secret", "mixed/sub"):
            (folder / name).chmod(0o755)
        (folder / "mixed" / "secret.txt").touch()
        assert sorted(folder.rglob("*")) == before
