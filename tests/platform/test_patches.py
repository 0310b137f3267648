"""The table of patched names: all exist as expected, and applying it again changes nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalatent import platform
from megalatent.platform import patching
from megalatent.platform.patching import Patch, PatchError
from tests.waiting import HANG

platform.install()
ROWS = platform.patches()


@pytest.mark.parametrize("patch", ROWS, ids=lambda p: p.name)
def test_patched_name_exists_with_the_known_parameters(patch: Patch) -> None:
    before = patching.original(patch)
    assert patch.reason
    if patch.parameters is not None:
        assert tuple(inspect.signature(before).parameters) == patch.parameters
    holder, last = patching.resolve(patch)
    assert getattr(holder, last) is not before


def test_names_are_listed_once() -> None:
    names = [patch.name for patch in ROWS]
    assert len(names) == len(set(names))


def test_installing_again_changes_nothing() -> None:
    def now() -> list[object]:
        return [getattr(*patching.resolve(patch)) for patch in ROWS]

    before = now()
    platform.install()
    assert all(a is b for a, b in zip(before, now(), strict=True))


def test_missing_name_is_an_error() -> None:
    row = Patch("torch.cuda", "no_such_function", "a test", lambda original: original)
    with pytest.raises(PatchError, match="no_such_function does not exist"):
        patching.apply([row])


def test_changed_parameters_are_an_error() -> None:
    row = Patch("torch.cuda", "is_available", "a test", lambda original: original, ("device",))
    with pytest.raises(PatchError, match="not the one this patch was written for"):
        patching.apply([row])
    assert patching.original(row) is torch.cuda.is_available


def test_nothing_but_upstream_fixes_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalatent.platform import upstream

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fixes = upstream.UPSTREAM_FIXES + upstream.TORCH_OPTIMIZER_FIXES
    assert set(platform.patches()) <= set(fixes)
    assert set(upstream.UPSTREAM_FIXES) <= set(platform.patches())


def test_megatron_does_not_import_a_modelopt_that_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "modelopt.py").write_text("print('modelopt imported')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megalatent import platform; platform.install()\n"
        "import megatron.training.training; print('ready'); import modelopt"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout.split("\n")[-3:] == ["ready", "modelopt imported", ""], done.stderr
    assert "modelopt imported" not in done.stdout.split("ready")[0]
