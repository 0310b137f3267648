"""A recording comes back from its file as it was, and other files are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalatent.errors import UserError
from megalatent.profiling.records import SCHEMA, VERSION, Activation, Recording, read_profile
from tests.profiling.synthetic import recording


def written(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def profile(section: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, "version": VERSION, "report": {}, "recording": section}


def test_round_trip(tmp_path: Path) -> None:
    made = recording(((2, 1, 1), (3, 3)), chunks=2, replicas=2, steps=2)
    made = Recording(**{**vars(made), "activations": (Activation(0, 1, 2, 4096),)})
    assert Recording.load(written(tmp_path / "p.json", profile(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "no profile"),
        ({"schema": "other"}, "no profile"),
        ({"schema": SCHEMA, "version": VERSION + 1}, f"reads version {VERSION}"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, values: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_profile(written(tmp_path / "p.json", values))


@pytest.mark.parametrize("text", ["steps: 3", '{"schema": "megalat', "[" * 200_000, "\udcff"])
def test_text_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match="no JSON file"):
        read_profile(path)


def damaged(change: str) -> dict[str, Any]:
    section = recording(((1,) * 4,), steps=1).to_dict()
    step = section["cases"][0]["steps"][0]
    if change == "kind":
        step["ranks"][0]["spans"][0][0] = "Z"
    elif change == "rank":
        del step["ranks"][0]
    elif change == "time":
        step["ranks"][0]["spans"][0][1] = float("nan")
    elif change == "action":
        del step["ranks"][1]["spans"][-3]
    elif change == "stage":
        section["ranks"][0]["stage"] = 7
    elif change == "list":
        section["cases"] = [[]]
    else:
        del section["ranks"]
    return section


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("kind", "unknown kind 'Z'"),
        ("rank", "a step of 3 ranks in a recording of 4"),
        ("time", "NaN"),
        ("action", "a step of rank 1 that is not what its plan says"),
        ("stage", "IndexError"),
        ("list", "TypeError"),
        ("", "ranks"),
    ],
)
def test_damaged_recordings_are_refused(tmp_path: Path, change: str, words: str) -> None:
    path = written(tmp_path / "p.json", profile(damaged(change)))
    with pytest.raises(UserError, match=f"its recording is damaged .*{words}"):
        Recording.load(path)
