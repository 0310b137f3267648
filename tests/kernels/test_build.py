"""The build: what it finds and says; where nvcc is, what the CUDA library holds."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.conftest import PACKAGE, ROOT

KERNELS = ("norm_forward", "norm_backward", "add_partials", "masked_add", "shift_forward")


@pytest.fixture(scope="module")
def cuda_library_file(build_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with CUDA kernels of the present sources; built for one card if need be."""
    if build_script.find_cuda() is None:
        pytest.skip("no CUDA toolkit here: the CUDA kernels are checked by emulation alone")
    installed = PACKAGE / "_kernels_cuda.so"
    if installed.exists() and build_script.source_hash().encode() in installed.read_bytes():
        return installed
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALATENT_CUDA_ARCHS", "90")
        build_script.build("cuda", PACKAGE)
    return installed


def tool(name: str) -> str:
    """One of the CUDA binary tools, of the toolkit or of Triton's wheel."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        found = str(Path(spec.origin).parent / "backends/nvidia/bin" / name)
    assert found is not None, f"{name} is not installed"
    assert Path(found).exists(), found
    return found


def test_cuda_library_loads_without_a_driver(cuda_library_file, compiled):
    code = (
        "import torch; from megalatent.kernels.extension import cuda_library;"
        "state = cuda_library(); assert state.loaded, state.reason;"
        "key = torch._C._dispatch_has_kernel_for_dispatch_key;"
        "print(key('megalatent::gated', 'CUDA'), key('megalatent::shift_jitter_backward', 'CUDA'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_machine_code_of_the_kernels(cuda_library_file):
    """Every kernel is in the library for sm_90, and none spills to local memory."""
    listing = subprocess.run(
        [tool("cuobjdump"), "-arch", "sm_90", "-res-usage", str(cuda_library_file)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in KERNELS:
        assert re.search(rf"Function \w*{name}\w*", listing), name
    # `assert` in the shift kernels is a call, which may use the stack.
    usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", listing)
    assert usage
    for name, registers, stack in usage:
        if "norm_" in name:
            assert int(stack) == 0, f"{name} spills"
        assert int(registers) <= 64, name


def test_jitter_is_not_contracted(cuda_library_file):
    """A fused multiply-add in the shift would change the last bit of the noise."""
    code = subprocess.run(
        [tool("cuobjdump"), "-arch", "sm_90", "-sass", str(cuda_library_file)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    functions = re.split(r"Function : ", code)[1:]
    shift = [body for body in functions if "shift_forward" in body.split("\n", 1)[0]]
    assert len(shift) == 6  # three dtypes, two alignments
    for body in shift:
        assert "FMUL" in body
        assert "FFMA" not in body


def test_host_libraries_need_no_cuda_runtime(cuda_library_file):
    """The runtime is linked in: whichever one torch brings does not matter."""
    needed = subprocess.run(
        ["readelf", "-d", str(cuda_library_file)], capture_output=True, text=True, check=True
    ).stdout
    assert "libtorch_cuda.so" in needed
    assert "libcudart" not in needed


def test_nothing_to_build_with(build_script, monkeypatch, tmp_path):
    """Without a compiler or a toolkit the build goes on, and leaves the reason for the doctor."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "_kernels_cpu.so").write_text("of older sources")
    report = build_script.build_all(("cpu", "cuda"), tmp_path)
    assert report["cpu"]["status"] == "not built"
    assert "no C++ compiler" in report["cpu"]["detail"]
    assert json.loads((tmp_path / build_script.REPORT_NAME).read_text()) == report
    assert not (tmp_path / "_kernels_cpu.so").exists()


def test_no_toolkit(build_script, monkeypatch, tmp_path):
    monkeypatch.setattr(build_script, "find_cuda", lambda: None)
    report = build_script.build_all(("cuda",), tmp_path)
    assert "put nvcc on the PATH or set CUDA_HOME" in report["cuda"]["detail"]


def test_torch_is_found_though_hidden(build_script, monkeypatch, tmp_path):
    """pip hides installed packages from a build; their headers lie beside the interpreter."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    headers = build_script.find_torch_headers()
    assert headers == Path(torch.__file__).parent / "include"
    monkeypatch.setattr(build_script.sysconfig, "get_path", lambda name: str(tmp_path))
    assert build_script.find_torch_headers() is None


def test_a_wrapper_script_is_seen_through(build_script, monkeypatch, tmp_path):
    """nvcc on the PATH may be a script; its own words then say where the toolkit is."""
    toolkit = tmp_path / "toolkit"
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).touch()
    script = tmp_path / "path" / "nvcc"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho '#$ TOP={toolkit}/bin/..' >&2\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert build_script.find_cuda() == toolkit


def test_parts_for_install(build_script, monkeypatch):
    monkeypatch.delenv("MEGALATENT_KERNELS", raising=False)
    assert build_script.parts_for_install() == ("cpu", "cuda")
    monkeypatch.setenv("MEGALATENT_KERNELS", "none")
    assert build_script.parts_for_install() == ()
    monkeypatch.setenv("MEGALATENT_KERNELS", "gpu")
    with pytest.raises(SystemExit, match="'gpu' is not a part"):
        build_script.parts_for_install()


def test_architectures_that_nvcc_lacks_are_left_out(build_script, monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho compute_80\necho compute_90\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("MEGALATENT_CUDA_ARCHS", "9.0;100")
    names, flags, unknown = build_script._architectures(str(nvcc))
    assert names == ["90+PTX"]
    assert flags == ["-gencode=arch=compute_90,code=[sm_90,compute_90]"]
    assert unknown == ["100"]
    monkeypatch.setenv("MEGALATENT_CUDA_ARCHS", "100")
    with pytest.raises(build_script.BuildError, match="does not build for any of sm_100"):
        build_script._architectures(str(nvcc))
