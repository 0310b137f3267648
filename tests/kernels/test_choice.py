"""Which implementation is taken, what is said about it, and what is refused."""

from __future__ import annotations

import copy
import logging
import sys

import pytest
import torch

from megalatent.errors import UserError
from megalatent.kernels import choice, select
from megalatent.kernels.extension import LibraryState

MISSING = LibraryState(False, "not built; run `make kernels`", {})


@pytest.fixture(autouse=True)
def _forget_choices():
    choice._select.cache_clear()
    yield
    choice._select.cache_clear()


def test_auto_on_a_cpu_takes_the_compiled_op(compiled):
    assert select("auto", "cpu", torch.float32).name == "cuda"
    assert select("auto", torch.device("cpu"), torch.float64).name == "cuda"


def test_auto_without_the_extension_takes_pytorch_and_says_why(monkeypatch, caplog):
    monkeypatch.setattr(choice, "cpu_library", lambda: MISSING)
    with caplog.at_level(logging.INFO):
        first = select("auto", "cpu", torch.float32)
        again = select("auto", "cpu", torch.float32)
    assert first.name == "torch"
    assert first is again
    assert len(caplog.records) == 1
    assert "plain PyTorch" in caplog.text
    assert "run `make kernels`" in caplog.text


def test_auto_on_a_gpu_without_the_extension_takes_triton(monkeypatch):
    monkeypatch.setattr(choice, "cuda_library", lambda: MISSING)
    backend = select("auto", "cuda", torch.bfloat16)
    assert backend.name == "triton"
    assert "not built" in backend.reason


def test_auto_on_a_gpu_in_float64_takes_pytorch():
    backend = select("auto", "cuda", torch.float64)
    assert backend.name == "torch"
    assert "float64" in backend.reason


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["90", "100+PTX"], True),
        ((10, 0), ["90", "100+PTX"], True),
        ((10, 3), ["90", "100+PTX"], True),
        ((12, 0), ["90", "100+PTX"], True),  # from PTX
        ((8, 0), ["90", "100+PTX"], False),
        ((10, 0), ["90"], False),
        ((8, 9), ["80"], True),  # machine code serves later minor versions
        ((8, 0), ["89"], False),
    ],
)
def test_architectures(monkeypatch, capability, built, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    obstacle = choice._architecture_obstacle(built)
    assert (obstacle is None) == runs
    if obstacle:
        assert f"MEGALATENT_CUDA_ARCHS={capability[0]}{capability[1]}" in obstacle


def test_named_and_missing_is_an_error(monkeypatch):
    monkeypatch.setattr(choice, "cpu_library", lambda: MISSING)
    with pytest.raises(UserError, match=r"'cuda' does not run .* run `make kernels`; or choose"):
        select("cuda", "cpu", torch.float32)


def test_triton_on_a_cpu_must_be_interpreted(monkeypatch):
    assert select("triton", "cpu", torch.float32).name == "triton"
    choice._select.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="set TRITON_INTERPRET=1"):
        select("triton", "cpu", torch.float32)


def test_triton_that_cannot_run_is_passed_over(monkeypatch, tmp_path):
    """Broken, or without a C compiler or Python's headers: `auto` takes PyTorch and says why."""
    monkeypatch.setattr(choice, "cuda_library", lambda: MISSING)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("CC", "no-such-compiler")
    backend = select("auto", "cuda", torch.bfloat16)
    assert backend.name == "torch"
    assert "there is no C compiler: install gcc or set CC" in backend.reason
    monkeypatch.setenv("CC", "true")
    with monkeypatch.context() as patch:
        patch.setattr(choice.sysconfig, "get_path", lambda name: "/nowhere")
        with pytest.raises(UserError, match=r"install them \(python3-dev\)"):
            select("triton", "cuda", torch.bfloat16)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(choice.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "triton", None)  # its import then fails
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="`import triton` fails: ModuleNotFoundError"):
        select("triton", "cuda", torch.bfloat16)


def test_a_backend_is_copied_with_its_model(backend):
    u = torch.randn(2, 1, 8)
    mask = torch.ones(2, 1, dtype=torch.bool)
    copied = copy.deepcopy(backend)
    assert torch.equal(copied.additive(u, u, mask), backend.additive(u, u, mask))


def test_unknown_setting():
    with pytest.raises(UserError, match="'cudnn' is unknown; choose one of: auto, cuda, triton"):
        select("cudnn", "cpu", torch.float32)


def test_unknown_device():
    assert select("auto", "meta", torch.float32).name == "torch"
    with pytest.raises(UserError, match="no kernels for meta devices"):
        select("cuda", "meta", torch.float32)
