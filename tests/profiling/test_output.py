"""Files of a profile: all that can be told before is, each is whole or absent, all are named."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megalatent.config_yaml import apply_overrides
from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.profiling import output
from megalatent.profiling.advice import advise
from megalatent.profiling.output import Targets, publish
from tests.profiling.test_advice import recorded


def published(targets: Targets) -> str:
    stream = io.StringIO()
    publish(recorded(), targets, stream)
    return stream.getvalue()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_file_is_named(tmp_path: Path) -> None:
    def path(name: str) -> str:
        return str(tmp_path / name)

    targets = Targets(
        json=path("p.json"), trace=path("t.json"), html=path("p.html"), costs=path("c.json")
    )
    text = published(targets)
    said = [line.removeprefix("written: ") for line in text.splitlines() if "written: " in line]
    assert sorted(said) == sorted(map(str, tmp_path.iterdir()))
    assert len(said) > 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": "-"}, "--json: '-' is no file"),
        ({"html": ""}, "--html: '' is no file"),
        ({"json": "folder"}, "--json: folder is a folder"),
        ({"costs": "none/c.json"}, "is no folder: make it"),
        ({"trace": "file/t.json"}, "is no folder: make it"),
        ({"trace": "/dev/null"}, "is no regular file"),
        ({"json": "p", "html": "folder/../p"}, "--html: folder/../p is also --json"),
        ({"json": "./run.yaml"}, "--json: ./run.yaml is also CONFIG"),
    ],
)
def test_targets_that_cannot_be_are_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run.yaml").touch()
    with pytest.raises(UserError) as error:
        Targets(**given).check("run.yaml")  # type: ignore[arg-type]
    assert words in str(error.value)
    assert files(tmp_path) == ["file", "folder", "run.yaml"]


def test_a_package_that_is_missing_is_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    Targets(trace="t.json").check()
    with pytest.raises(UserError, match="needs the package perfetto: install"):
        Targets(trace="t.pftrace").check()


def test_a_file_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the middle of a file: what was there stays, the rest is written."""
    old = tmp_path / "p.html"
    old.write_text("old")

    def full(recording: object, path: Path, **options: object) -> None:
        path.write_text("<!DOCTYPE")
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr("megalatent.profiling.html.write_html", full)
    targets = Targets(json=str(tmp_path / "p.json"), html=str(old), trace=str(tmp_path / "t.json"))
    stream = io.StringIO()
    with pytest.raises(UserError, match=r"not written: .*p\.html \(No space left on device\)"):
        publish(recorded(), targets, stream)
    assert "settings, best first" in stream.getvalue()
    assert files(tmp_path) == ["p.html", "p.json", "t.json"]
    assert old.read_text() == "old"
    assert json.loads((tmp_path / "p.json").read_text())["schema"]


def test_links_are_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "latest.json"
    link.symlink_to(target)
    published(Targets(json=str(link)))
    assert link.is_symlink()
    assert json.loads(target.read_text())["schema"]


@pytest.mark.parametrize("name", ["my costs.json", "a: b #c.json", "[x].json", "007", "it's.json"])
def test_any_file_name_can_be_pasted(tmp_path: Path, name: str) -> None:
    for folder in ("", f"{tmp_path}/"):
        for option in advise(recorded(), folder + name).options:
            if option.costs_file:
                read = apply_overrides({}, option.overrides)
                assert read["latent"]["passes"]["costs"] == option.costs_file


def test_later_passes_that_are_cheaper_are_told(tmp_path: Path) -> None:
    made = recorded()
    # Pass 2 is measured at half of pass 1 on stage 1, step for step.
    cases = []
    for case in made.cases:
        steps = []
        for step in case.steps:
            ranks = list(step.ranks)
            spans = tuple(
                span._replace(start=span.end - span.nanoseconds // 2)
                if span.kind == "F" and span.k == 2
                else span
                for span in ranks[1].spans
            )
            ranks[1] = replace(ranks[1], spans=spans)
            steps.append(replace(step, ranks=tuple(ranks)))
        cases.append(replace(case, steps=tuple(steps)))
    path = tmp_path / "c.json"
    stream = io.StringIO()
    publish(replace(made, cases=tuple(cases)), Targets(costs=str(path)), stream)
    assert f"in {path}: forwards of later passes take less than in pass 1: 500 µs on virtual" in (
        stream.getvalue()
    )
    extra = Costs.load(path).extra_forward
    assert isinstance(extra, tuple)
    assert extra[1] == pytest.approx(-0.0005)
