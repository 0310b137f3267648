"""Finding and loading the compiled extension.

Two libraries, so that a failed or absent CUDA build costs nothing on CPUs: `_kernels_cpu.so`
defines the operators and their CPU kernels, `_kernels_cuda.so` adds the CUDA kernels. They use
torch's stable ABI, so they outlive an upgrade of torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import torch

from megalatent.errors import UserError

__all__ = ["REPORT_NAME", "LibraryState", "build_report", "cpu_library", "cuda_library"]

REPORT_NAME = "_kernels_build.json"
_FOLDER = Path(__file__).parent
_REMEDY = "run `make kernels`, or `python kernels/build.py` in a checkout"


@dataclasses.dataclass(frozen=True)
class LibraryState:
    """Whether one library is loaded; if not, why and what to do.

    `information` is what the library says of its own build: `sources` (a hash), and for CUDA
    `architectures` ("90;100+PTX"). `built` says whether there is a library at all.
    """

    loaded: bool
    reason: str
    information: dict[str, str]
    built: bool = False


@functools.cache
def cpu_library() -> LibraryState:
    """Load the operators and their CPU kernels, once per process."""
    state = _load("cpu")
    if state.loaded:
        from megalatent.kernels.ops import register_formulas

        register_formulas("megalatent")
    return state


@functools.cache
def cuda_library() -> LibraryState:
    """Load the CUDA kernels of the operators, once per process; loads the CPU library first.

    Raises:
        UserError: the two libraries were built from different sources.
    """
    cpu = cpu_library()
    if not cpu.loaded:
        return LibraryState(False, f"the CPU library it builds on is missing: {cpu.reason}", {})
    state = _load("cuda")
    if state.loaded and state.information["sources"] != cpu.information["sources"]:
        raise UserError(
            "the CPU and CUDA kernel libraries were built from different sources; "
            "build both again with `make kernels`"
        )
    return state


def build_report() -> dict[str, dict[str, str]]:
    """What the last build wrote about each part: `{"cuda": {"status": …, "detail": …}, …}`."""
    try:
        found: dict[str, dict[str, str]] = json.loads((_FOLDER / REPORT_NAME).read_text())
    except (OSError, ValueError):  # no build left one, or one is cut off
        return {}
    return found


def _load(part: str) -> LibraryState:
    path = _FOLDER / f"_kernels_{part}.so"
    if not path.exists():
        tried = build_report().get(part, {})
        failed = tried.get("status") == "not built"
        why = f"not built ({tried['detail']})" if failed else "not built"
        return LibraryState(False, f"{why}; {_REMEDY}", {})
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # torch wraps the linker's own words, which name the missing symbol or library.
        cause = error.__cause__ or error
        return LibraryState(False, f"{path.name} does not load: {cause}; {_REMEDY}", {}, True)
    library = ctypes.CDLL(str(path))
    describe = getattr(library, f"megalatent_{part}_build_information")
    describe.restype = ctypes.c_char_p
    information = json.loads(describe().decode())
    present = _checkout_sources()
    if present not in (None, information["sources"]):
        why = f"{path.name} was built from other sources than this checkout's"
        return LibraryState(False, f"{why}; {_REMEDY}", information, True)
    return LibraryState(True, "loaded", information, True)


def _checkout_sources() -> str | None:
    """Hash of the kernels' sources if they lie beside the package, as kernels/build.py takes it."""
    folder = _FOLDER.parents[1] / "kernels" / "src"
    if not (folder / "contract.h").exists():
        return None  # installed: the libraries came with the package
    digest = hashlib.sha256()
    suffixes = (".h", ".cuh", ".cpp", ".cu")
    for path in sorted(path for path in folder.rglob("*") if path.suffix in suffixes):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
