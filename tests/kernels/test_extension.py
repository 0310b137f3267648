"""Loading the libraries: stale ones, and what is said of those that are not there."""

from __future__ import annotations

import json

import pytest

from megalatent import doctor_torch
from megalatent.kernels import extension


def test_a_stale_library_is_not_used(compiled, monkeypatch, build_script):
    """Sources that changed since the build, by `git pull` say: the doctor calls it broken."""
    assert extension._checkout_sources() == build_script.source_hash()
    monkeypatch.setattr(extension, "_checkout_sources", lambda: "of later sources")
    state = extension._load("cpu")
    assert not state.loaded
    assert "built from other sources than this checkout's; run `make kernels`" in state.reason
    monkeypatch.setattr(extension, "cpu_library", lambda: state)
    assert doctor_torch.compiled_cpu().status == "broken"


def test_an_installed_package_has_no_sources_to_compare(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "_FOLDER", tmp_path / "site-packages" / "megalatent" / "kernels")
    assert extension._checkout_sources() is None


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"cpu": {"status": "not built", "detail": "no g++"}}, "not built (no g++); run"),
        ({"cpu": {"status": "built", "detail": "g++"}}, "not built; run"),
        (None, "not built; run"),
        ("cut off", "not built; run"),
    ],
)
def test_why_a_library_is_not_there(monkeypatch, tmp_path, report, why):
    monkeypatch.setattr(extension, "_FOLDER", tmp_path)
    if report is not None:
        text = json.dumps(report)
        (tmp_path / extension.REPORT_NAME).write_text(text[: None if "cut" not in report else 4])
    state = extension._load("cpu")
    assert not state.loaded
    assert state.reason.startswith(why)


def test_a_library_that_does_not_load_is_broken(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "_FOLDER", tmp_path)
    (tmp_path / "_kernels_cpu.so").write_bytes(b"\x7fELF")
    state = extension._load("cpu")
    assert (state.loaded, state.built) == (False, True)
    assert state.reason.startswith("_kernels_cpu.so does not load: ")
