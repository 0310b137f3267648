"""The folder that a conversion is made in, until it takes its final name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megalatent.checkpoint.writer import Staging


def convert(out: Path, text: str) -> None:
    staging = Staging(out, {"made": "from this"}, overwrite=True)
    (staging.folder / "state.json").touch()
    (staging.folder / "weights").write_text(text)
    staging.finish({})


def test_an_earlier_conversion_that_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where somebody else's process keeps a file of it open on a network's disk."""
    out, old = tmp_path / "out", tmp_path / ".out.replaced"
    convert(out, "first")
    convert(out, "second")
    assert not old.exists()
    assert capsys.readouterr().err == ""

    def keeps(path: Path, **options: Any) -> None:
        assert options == {"ignore_errors": True}

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", keeps)
        convert(out, "third")
    assert (out / "weights").read_text() == "third"
    assert (old / "weights").read_text() == "second"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{old}, the conversion that stood there before, cannot be deleted" in said
    convert(out, "fourth")  # and it is no obstacle
    assert not old.exists()
