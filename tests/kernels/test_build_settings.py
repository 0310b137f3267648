"""What a user may set for the build, rightly and wrongly; nothing is compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.kernels.conftest import ROOT


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def empty_cache(build_script, monkeypatch, tmp_path):
    """Nothing is built yet; what is asked of the compiler then matters."""
    monkeypatch.setattr(build_script, "CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAX_JOBS", "abc", "MAX_JOBS=abc is not a number of compilers"),
        ("MAX_JOBS", "-1", "MAX_JOBS=-1 is not a number of compilers"),
        ("CXX", "g++ '", "CXX=g++ ' is not a command"),
        ("CXX", "env no-such-compiler -O2", "there is no program 'no-such-compiler'"),
    ],
)
def test_wrong_settings_are_named(
    build_script, empty_cache, monkeypatch, tmp_path, name, value, message
):
    """The installation goes on."""
    monkeypatch.setenv(name, value)
    report = build_script.build_all(("cpu",), tmp_path)
    assert report["cpu"]["status"] == "not built"
    assert message in report["cpu"]["detail"]


def test_a_cache_that_cannot_be_written_is_no_crash(build_script, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(build_script, "CACHE", tmp_path / "file" / "kernels")
    report = build_script.build_all(("cpu",), tmp_path)
    assert report["cpu"]["status"] == "not built"
    assert str(tmp_path / "file") in report["cpu"]["detail"]


def test_a_report_that_is_cut_off_is_written_anew(build_script, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / build_script.REPORT_NAME).write_text('{"cuda": {"sta')
    report = build_script.build_all(("cpu",), tmp_path)
    assert json.loads((tmp_path / build_script.REPORT_NAME).read_text()) == report
    assert [path.name for path in tmp_path.iterdir()] == [build_script.REPORT_NAME]


def test_a_compiler_with_a_launcher_and_flags(build_script, monkeypatch, tmp_path):
    """nvcc gets the compiler and its flags, not the launcher; the report names the compiler."""
    monkeypatch.setenv("CXX", "env LC_ALL=C g++ -O1 -g")
    compiler = build_script._compiler()
    assert (compiler.program, compiler.flags) == ("g++", ["-O1", "-g"])
    assert build_script._plan_cpu().detail.startswith("g++, ")
    toolkit = tmp_path / "toolkit"
    program(toolkit / "bin/nvcc", "echo compute_90")
    for name in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (toolkit / name).parent.mkdir()
        (toolkit / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    command = build_script._plan_cuda().compiles["rows"]
    assert command[command.index("-ccbin") + 1] == "g++"
    given = [command[i + 1] for i, word in enumerate(command) if word == "-Xcompiler"]
    assert given == ["-fPIC", "-O1", "-g"]


def test_a_named_toolkit_is_taken_or_refused(build_script, monkeypatch, tmp_path):
    """Another one would not be what was asked for. conda's headers lie under `targets`."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build_script.BuildError, match=f"CUDA_HOME={tmp_path} holds no CUDA"):
        build_script.find_cuda()
    program(tmp_path / "bin/nvcc", "")
    headers = tmp_path / "targets/x86_64-linux/include"
    headers.mkdir(parents=True)
    (headers / "cuda_runtime.h").touch()
    assert build_script.find_cuda() == tmp_path
    assert build_script._cuda_headers(tmp_path) == headers


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", ["90", "100+PTX"]),
        ("9.0 10.0", ["90", "100+PTX"]),
        ("sm_90a, 9.0;10.0+PTX", ["90", "100+PTX"]),
        ("100f", ["100+PTX"]),
    ],
)
def test_architectures_as_others_write_them(build_script, monkeypatch, tmp_path, listed, names):
    nvcc = program(tmp_path / "nvcc", "echo compute_90; echo compute_100")
    monkeypatch.setenv("MEGALATENT_CUDA_ARCHS", listed)
    assert build_script._architectures(nvcc)[0] == names


def test_wrong_architectures_and_toolkits_are_named(build_script, monkeypatch, tmp_path):
    nvcc = program(tmp_path / "nvcc", "echo compute_90")
    monkeypatch.setenv("MEGALATENT_CUDA_ARCHS", "90;hopper")
    with pytest.raises(build_script.BuildError, match="'hopper' is not a compute capability"):
        build_script._architectures(nvcc)
    monkeypatch.delenv("MEGALATENT_CUDA_ARCHS")
    program(tmp_path / "nvcc", "echo no licence >&2; exit 3")
    with pytest.raises(build_script.BuildError, match="--list-gpu-arch failed: no licence"):
        build_script._architectures(nvcc)


def test_a_source_distribution_can_be_built_from(tmp_path):
    """It holds the build script and all sources, and nothing of this checkout's own build."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    package = tmp_path / "megalatent" / "kernels"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text('__version__ = "0"\n')
    (package / "_kernels_build.json").write_text("{}")
    code = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    environment = os.environ | {"MEGALATENT_KERNELS": "none"}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    sources = [path for path in (ROOT / "kernels" / "src").rglob("*.*") if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    assert "kernels/build.py" in names
    assert "megalatent/kernels/_kernels_build.json" not in names
