"""The script for machines with a GPU, as far as it runs without one."""

from __future__ import annotations

import json

import pytest
import torch

from megalatent.kernels import choice
from megalatent.kernels.reference import ReferenceBackend
from tools import gpu_check, gpu_check_kernels, gpu_check_training


class Empty(ReferenceBackend):
    """Forgets to write one element."""

    def _additive(self, a, e, fused_mask):
        x = super()._additive(a, e, fused_mask)
        return x + x.new_tensor([float("nan")] + [0.0] * (x.shape[-1] - 1))


class Wrong(ReferenceBackend):
    """Off by a part in a hundred, and never twice the same."""

    def _gated(self, u, g, e, fused_mask, norm_weight, eps):
        x = super()._gated(u, g, e, fused_mask, norm_weight, eps)
        return x * (1 + 0.01 * torch.rand(()))

    def _shift_jitter(self, h, boundary, source, position, sample, k, seed, sigma):
        return super()._shift_jitter(h, boundary, source, position, sample, k, seed + 1, sigma)


@pytest.fixture(autouse=True)
def _as_for_a_user(monkeypatch, tmp_path):
    """Few widths, and no interpreted Triton: it is slow, and rounds bfloat16 as no card does."""
    monkeypatch.setattr(gpu_check_training, "LOGS", tmp_path / "logs")
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


def test_an_element_that_is_not_a_number_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check_kernels, "_backends", lambda device: [Empty("for the test")])
    status, report = run_main(monkeypatch, tmp_path, "--rehearse", "--only", "kernels")
    assert status == 1
    precision = [row for row in report["rows"] if row["what"].endswith("precision")]
    assert {row["status"] for row in precision} == {"failed"}


def test_the_last_rows_are_those_of_the_whole(compiled):
    """What the check of 2^31 elements compares, on few."""
    u, mask = torch.randn(9, 1, 16), torch.ones(9, 1, dtype=torch.bool)
    weight, position = torch.ones(16), torch.arange(9).unsqueeze(1)
    whole, alone = (
        gpu_check_kernels._last_rows(compiled, u[part], mask[part], weight, position[part])
        for part in (slice(None), slice(-4, None))
    )
    assert all(rows.shape == (3, 1, 16) for rows in whole)
    assert all(torch.equal(one, other) for one, other in zip(whole, alone, strict=True))


def test_nothing_compiled_is_not_a_pass(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    (outcome,) = gpu_check_kernels.torch_compile("cpu")
    assert outcome.status == "skipped"


def test_losses_that_are_not_numbers_fail():
    nan = float("nan")
    assert gpu_check_training._worst([[1.0], [2.0, nan]], [[1.0], [2.0, 2.0]]) == float("inf")
    assert gpu_check_training._worst([[1.0], [2.0, 2.5]], [[1.0], [2.0, 2.0]]) == 0.5


def interpreter(path, *lines):
    """Stands for Python, and so for a training run."""
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


def test_a_failed_run_is_told_by_its_own_words(monkeypatch, tmp_path):
    """torch's remark about the process group comes after them; the log stays."""
    run = interpreter(
        tmp_path / "python",
        'echo "$@"',
        "echo 'megalatent: error: no memory left'",
        "echo '[rank0]:[W1130 15:02:26.1 ProcessGroupNCCL.cpp:1538] Warning: destroy' >&2",
        "exit 1",
    )
    monkeypatch.setattr(gpu_check_training.sys, "executable", run)
    with pytest.raises(RuntimeError, match=r"no memory left; see .*logs/card1\.log"):
        gpu_check_training._train(tmp_path / "card1", 1, "cpu", {})
    # One process, also where there are eight cards.
    assert "--nproc 1" in (tmp_path / "logs" / "card1.log").read_text()


def test_a_number_of_passes_that_fails_does_not_hide_the_others(monkeypatch):
    def train(folder, passes, device, options):
        if folder.name == "card2":
            raise RuntimeError("training with K = 2 on cuda: out of memory")
        return [[6.0] * passes] * 3, "max allocated: 12.5"

    monkeypatch.setattr(gpu_check_training, "_train", train)
    outcomes = {o.what: o for o in gpu_check_training.against_cpu("cuda")}
    assert {name: o.status for name, o in outcomes.items()} == {
        "K = 1, bf16 against CPU float32": "passed",
        "K = 1, memory": "measured",
        "K = 2, bf16 against CPU float32": "failed",
        "K = 3, bf16 against CPU float32": "passed",
        "K = 3, memory": "measured",
    }
    assert "out of memory" in outcomes["K = 2, bf16 against CPU float32"].detail


def test_a_run_ends_when_the_time_is_over(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check_training, "_deadline", 0.0)
    run = interpreter(tmp_path / "python", "exec sleep 60")
    monkeypatch.setattr(gpu_check_training.sys, "executable", run)
    with pytest.raises(RuntimeError, match="took more than 1 s"):
        gpu_check_training._train(tmp_path / "card1", 1, "cpu", {})


def test_there_is_time_for_every_check():
    assert sum(needed for _, needed in gpu_check.CHECKS.values()) <= gpu_check.BUDGET_SECONDS


@pytest.mark.parametrize(("capability", "said"), [((8, 0), "sm_80, FP8 needs sm_89")])
def test_fp8_is_skipped_on_cards_without_it(monkeypatch, capability, said):
    monkeypatch.setattr(gpu_check_training.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    (outcome,) = gpu_check_training.fp8("cuda")
    assert outcome.status == "skipped"
    assert said in outcome.detail


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
