"""The doctor: a row for everything, causes of what does not run, exit status, formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalatent import doctor, doctor_torch
from megalatent.cli import main
from megalatent.kernels import extension
from tests.waiting import HANG

ROWS = [
    "Python",
    "torch",
    "GPU",
    "NCCL",
    "C++ compiler",
    "CUDA toolkit",
    "megatron-core",
    "platform shim",
    "kernels: C++",
    "kernels: CUDA",
    "kernels: Triton",
    "kernels: choice",
    "Transformer Engine",
    "flash-attn",
    "apex",
    "modelopt",
]


def test_every_row(capsys):
    """On this machine, through the command line, in both formats' source."""
    assert main(["doctor", "--json"]) == 0
    findings = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(ROWS) <= set(findings)
    assert findings["torch"]["detail"].startswith(torch.__version__)
    assert findings["megatron-core"]["status"] == "ok"
    assert "all" in findings["platform shim"]["detail"]
    assert all(row["detail"] for row in findings.values())


def test_a_broken_torch_is_a_row(tmp_path):
    """Through the command line, with a torch that does not load, and tools that do not run."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").write_text("no program")
    root = str(Path(doctor.__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{root}",
        "CUDA_HOME": str(tmp_path / "cuda"),
    }
    command = [sys.executable, "-m", "megalatent.cli", "doctor", "--json"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=HANG
    )
    assert (done.returncode, done.stderr) == (1, "")
    findings = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(findings)[: len(ROWS)] == ROWS
    assert findings["torch"]["status"] == "broken"
    assert "libcudart.so.13" in findings["torch"]["detail"]
    assert "torch does not import" in findings["kernels: C++"]["detail"]
    assert findings["platform shim"]["status"] == "broken"
    assert findings["CUDA toolkit"]["status"] == "broken"
    assert "cannot be run: Permission denied" in findings["CUDA toolkit"]["detail"]


def test_a_look_that_raises_is_a_row():
    def look() -> doctor.Finding:
        raise KeyError("half a package")

    finding = doctor._looked_at("torch", look)
    assert (finding.status, finding.needed) == ("broken", True)
    assert "KeyError: 'half a package'" in finding.detail


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "status 3"), ("echo bad >&2; exit 1", "bad"), ("true", "does not say")],
)
def test_a_tool_that_fails_is_broken(tmp_path, script, said):
    tool = tmp_path / "nvcc"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    finding = doctor._says("CUDA toolkit", [str(tool), "--version"], containing="release")
    assert (finding.status, said in finding.detail) == ("broken", True)


def test_the_compiler_behind_a_launcher_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "env g++ -O1")
    finding = doctor._compiler()
    assert finding.status == "ok"
    assert "g++" in finding.detail


def test_table_and_status(monkeypatch, capsys):
    rows = [
        doctor.Finding("one", "ok", "1.2 [gpu]", needed=True),
        doctor.Finding("two", "absent", "not installed"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: rows)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["one", "ok", "1.2", "[gpu]"],
        ["two", "absent", "not", "installed"],
    ]
    rows.append(doctor.Finding("three", "broken", "optional"))
    assert main(["doctor"]) == 0
    rows.append(doctor.Finding("four", "broken", "needed", needed=True))
    assert main(["doctor"]) == 1


def test_broken_package_is_named_with_its_error(monkeypatch):
    """As a half-installed Transformer Engine is: metadata there, import failing."""
    package = doctor._Package("json5", ("torch",), "megalatent.no_such_module", "no matter")
    finding = doctor._package(package)
    assert finding.status == "broken"
    assert "No module named 'megalatent.no_such_module'" in finding.detail


def test_crashing_package_is_survived(monkeypatch):
    crashed = subprocess.CompletedProcess([], -11, "", "")
    monkeypatch.setattr(doctor, "_python", lambda code: crashed)
    finding = doctor._package(doctor._Package("torch", ("torch",), "torch", ""))
    assert (finding.status, "status -11" in finding.detail) == ("broken", True)
    assert doctor._platform_shim().status == "broken"


def test_absent_package():
    finding = doctor._package(doctor._Package("x", ("no-such-distribution",), "x", "a pity"))
    assert finding == doctor.Finding("x", "absent", "not installed; a pity")


def test_wrong_megatron(monkeypatch):
    monkeypatch.setattr(doctor, "_required", lambda name: "~=0.1.0")
    finding = doctor._megatron()
    assert finding.status == "broken"
    assert "pip install 'megatron-core~=0.1.0'" in finding.detail


def test_unbuilt_kernels_say_how_to_build_them(monkeypatch):
    missing = extension.LibraryState(False, "not built (no C++ compiler); run `make kernels`", {})
    monkeypatch.setattr(extension, "cpu_library", lambda: missing)
    finding = doctor_torch.compiled_cpu()
    assert (finding.status, finding.detail) == ("absent", missing.reason)


def test_kernel_that_computes_wrongly_is_broken(monkeypatch):
    """`ok` means that a fusion ran and gave PyTorch's results."""
    from megalatent import kernels

    real = kernels.select

    def select(setting, device, dtype):
        backend = real("torch", device, dtype)
        if setting == "torch":
            return backend
        return SimpleNamespace(gated=lambda u, g, e, mask, weight, eps: u * g + e)

    monkeypatch.setattr("megalatent.kernels.choice.select", select)
    finding = doctor_torch.tried("kernels: C++", "cuda", "cpu", "built")
    assert (finding.status, "differ" in finding.detail) == ("broken", True)
