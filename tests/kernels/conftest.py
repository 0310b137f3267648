"""Implementations under test: the compiled op, the emulated CUDA kernels, interpreted Triton."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

# Read when the Triton kernels are imported. On a GPU machine too: these tests use CPU tensors.
os.environ["TRITON_INTERPRET"] = "1"

from megalatent.kernels.backend import Backend
from megalatent.kernels.ops import OpBackend

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megalatent" / "kernels"


def load_build_script() -> ModuleType:
    """kernels/build.py as a module; it is a script, not part of a package."""
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build_script() -> ModuleType:
    return load_build_script()


@pytest.fixture(scope="session")
def compiled(build_script: ModuleType) -> Backend:
    """The compiled op with its CPU kernels, built from the present sources."""
    built = build_script.build_all(("cpu",), PACKAGE)["cpu"]
    assert built["status"] == "built", built["detail"]
    from megalatent.kernels.extension import cpu_library

    state = cpu_library()
    assert state.loaded, state.reason
    assert state.information["sources"] == build_script.source_hash()
    return OpBackend("cuda", "under test", "megalatent")


@pytest.fixture(scope="session")
def emulated() -> Backend:
    """The CUDA kernels, compiled for the CPU."""
    from tests.kernels import emulated

    emulated.register()
    return OpBackend("emulated", "under test", emulated.NAMESPACE)


@pytest.fixture(scope="session")
def triton() -> Backend:
    """The Triton kernels, interpreted."""
    from megalatent.kernels import triton_ops

    triton_ops.register()
    return OpBackend("triton", "under test", triton_ops.NAMESPACE)


@pytest.fixture(params=["compiled", "emulated", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each implementation in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds nan, so that an element nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def seeded() -> random.Random:
    """Another seed each run; pytest shows it when a test fails."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed = {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)
