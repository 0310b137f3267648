"""The script for machines with a GPU, as far as it runs without one."""

from __future__ import annotations

import json

import pytest
import torch

from megalatent.kernels import choice
from megalatent.kernels.reference import ReferenceBackend
from tools import gpu_check, gpu_check_kernels


class Wrong(ReferenceBackend):
    """Off by a part in a hundred, and never twice the same."""

    def _gated(self, u, g, e, fused_mask, norm_weight, eps):
        x = super()._gated(u, g, e, fused_mask, norm_weight, eps)
        return x * (1 + 0.01 * torch.rand(()))

    def _shift_jitter(self, h, boundary, source, position, sample, k, seed, sigma):
        return super()._shift_jitter(h, boundary, source, position, sample, k, seed + 1, sigma)


@pytest.fixture(autouse=True)
def _as_for_a_user(monkeypatch):
    """Few widths, and no interpreted Triton: it is slow, and rounds bfloat16 as no card does."""
    monkeypatch.setattr(gpu_check_kernels, "WIDTHS", (64, 101))
    monkeypatch.delenv("TRITON_INTERPRET")
    choice._select.cache_clear()
    yield
    choice._select.cache_clear()


def run_main(monkeypatch, tmp_path, *arguments):
    report = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["gpu_check", "--json", str(report), *arguments])
    status = gpu_check.main()
    return status, json.loads(report.read_text())


def test_without_a_gpu_everything_is_skipped_and_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, report = run_main(monkeypatch, tmp_path)
    assert status == 77
    assert report["device"] is None
    assert [row["check"] for row in report["rows"]] == list(gpu_check.CHECKS)
    assert {row["status"] for row in report["rows"]} == {"skipped"}
    assert "there is no CUDA device here" in capsys.readouterr().out


def test_rehearsal(monkeypatch, tmp_path, compiled):
    names = ["kernels", "noise", "large", "graph", "bandwidth", "share", "fp8"]
    status, report = run_main(monkeypatch, tmp_path, "--rehearse", "--only", *names)
    assert status == 0
    assert report["device"] == "cpu"
    statuses = {row["check"]: row["status"] for row in report["rows"]}
    assert statuses == {
        name: "passed" if name in ("kernels", "noise") else "skipped" for name in names
    }


def test_a_wrong_kernel_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check_kernels, "_backends", lambda device: [Wrong("for the test")])
    only = ("--rehearse", "--only", "kernels", "noise")
    status, report = run_main(monkeypatch, tmp_path, *only)
    assert status == 1
    assert {row["status"] for row in report["rows"]} == {"failed"}


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch, tmp_path, compiled):
    def broken(device):
        raise RuntimeError("no memory left\nmore lines")
        yield

    monkeypatch.setitem(gpu_check.CHECKS, "kernels", (broken, 1))
    status, report = run_main(monkeypatch, tmp_path, "--rehearse", "--only", "kernels", "noise")
    assert status == 1
    first, *rest = report["rows"]
    assert (first["status"], first["detail"]) == ("failed", "RuntimeError: no memory left")
    assert {row["status"] for row in rest} == {"passed"}


def test_the_time_budget_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "BUDGET_SECONDS", 5.0)
    status, report = run_main(monkeypatch, tmp_path, "--rehearse", "--only", "training")
    assert status == 0
    (row,) = report["rows"]
    assert row["status"] == "skipped"
    assert "--only training" in row["detail"]


@pytest.mark.full
def test_training_rehearsal(monkeypatch, tmp_path, compiled):
    """Both sides on the CPU: the same losses, one for each pass."""
    status, report = run_main(monkeypatch, tmp_path, "--rehearse", "--only", "training")
    assert status == 0
    assert [row["status"] for row in report["rows"]] == ["passed"] * 3
