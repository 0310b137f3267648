"""The choice of an implementation, made once per setting, device and dtype, and said once."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
import typing
from pathlib import Path

import torch

from megalatent.errors import UserError
from megalatent.kernels.backend import Backend, KernelSetting
from megalatent.kernels.extension import cpu_library, cuda_library
from megalatent.kernels.ops import OpBackend
from megalatent.kernels.reference import ReferenceBackend

__all__ = ["compiled_op_obstacle", "select", "sentence", "triton_obstacle"]

_LOG = logging.getLogger(__name__)
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU_DTYPES = (*_CUDA_DTYPES, torch.float64)


def select(setting: KernelSetting, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The implementation for activations of `dtype` on `device`; logs which one and why, once.

    Args:
        setting: `cuda` is the compiled op (on a CPU its C++ kernels), `triton` the Triton kernels
            (on a CPU only under `TRITON_INTERPRET=1`), `torch` the PyTorch reference. `auto` takes
            the first of them that runs, Triton only on a GPU.
        device: where the activations are.
        dtype: dtype of the activations.

    Raises:
        UserError: the setting is unknown, or what it names does not run here.
    """
    if setting not in typing.get_args(KernelSetting):
        known = ", ".join(typing.get_args(KernelSetting))
        raise UserError(f"fusion kernel {setting!r} is unknown; choose one of: {known}")
    return _select(setting, torch.device(device).type, dtype)


@functools.cache
def _select(setting: KernelSetting, device_type: str, dtype: torch.dtype) -> Backend:
    backend = (
        _auto(device_type, dtype) if setting == "auto" else _named(setting, device_type, dtype)
    )
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank() > 0):
        _LOG.info("fusion kernels for %s on %s: %s", dtype, device_type, sentence(backend))
    return backend


def _auto(device_type: str, dtype: torch.dtype) -> Backend:
    no_op = compiled_op_obstacle(device_type, dtype)
    if no_op is None:
        return OpBackend("cuda", "auto: it is built and runs here", "megalatent")
    if device_type == "cpu":
        return ReferenceBackend(f"auto: no compiled op, {no_op}")
    no_triton = triton_obstacle(device_type, dtype)
    if no_triton is None:
        return _triton(f"auto: no compiled op, {no_op}")
    return ReferenceBackend(f"auto: no compiled op, {no_op}; no Triton, {no_triton}")


def _named(setting: KernelSetting, device_type: str, dtype: torch.dtype) -> Backend:
    if setting == "torch":
        return ReferenceBackend("as configured")
    find = compiled_op_obstacle if setting == "cuda" else triton_obstacle
    obstacle = find(device_type, dtype)
    if obstacle is not None:
        raise UserError(
            f"fusion kernel {setting!r} does not run for {dtype} on {device_type}: {obstacle}; "
            "or choose `auto`"
        )
    if setting == "cuda":
        return OpBackend("cuda", "as configured", "megalatent")
    return _triton("as configured")


def compiled_op_obstacle(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the compiled op cannot serve `dtype` on `device_type`; None if it can."""
    if device_type not in ("cpu", "cuda"):
        return f"it has no kernels for {device_type} devices"
    dtypes = _CPU_DTYPES if device_type == "cpu" else _CUDA_DTYPES
    if dtype not in dtypes:
        return f"it has no {dtype} kernels for {device_type} devices"
    library = cpu_library() if device_type == "cpu" else cuda_library()
    if not library.loaded:
        return library.reason
    if device_type == "cuda":
        return _architecture_obstacle(library.information["architectures"].split(";"))
    return None


def triton_obstacle(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve `dtype` on `device_type`; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package `triton` is not installed"
    if dtype not in _CUDA_DTYPES:
        return f"they have no {dtype} version"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        return "on a CPU they only run interpreted, for tests: set TRITON_INTERPRET=1"
    if device_type not in ("cpu", "cuda"):
        return f"they are not written for {device_type} devices"
    if not interpreted and (missing := _missing_for_launchers()):
        return f"Triton compiles C as it runs, and {missing}"
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken package may raise anything
        said = str(error).strip().splitlines()[:1]
        return f"`import triton` fails: {': '.join([type(error).__name__, *said])}"
    return None


def _missing_for_launchers() -> str | None:
    """What Triton lacks to compile its launchers, when they are first called."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return "there is no C compiler: install gcc or set CC"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are missing: install them (python3-dev)"
    return None


def _architecture_obstacle(built: list[str]) -> str | None:
    """`built` holds "90" for machine code of sm_90 and "100+PTX" if later cards can be served."""
    major, minor = torch.cuda.get_device_capability()
    for architecture in built:
        number, _, suffix = architecture.partition("+")
        built_major, built_minor = int(number[:-1]), int(number[-1])
        same_family = built_major == major and built_minor <= minor
        if same_family or (suffix == "PTX" and (built_major, built_minor) <= (major, minor)):
            return None
    return (
        f"it was built for {', '.join('sm_' + name for name in built)} and this card is "
        f"sm_{major}{minor}; build with MEGALATENT_CUDA_ARCHS={major}{minor} make kernels"
    )


def _triton(reason: str) -> Backend:
    from megalatent.kernels.triton_ops import register

    register()
    return OpBackend("triton", reason, "megalatent_triton")


def sentence(backend: Backend) -> str:
    """The implementation and its reason, for people: "the compiled op (as configured)"."""
    names = {
        "cuda": "the compiled op",
        "triton": "Triton",
        "torch": "plain PyTorch, slower and with more memory",
    }
    return f"{names[backend.name]} ({backend.reason})"
