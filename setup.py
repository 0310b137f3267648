"""Builds the compiled fusion kernels during `pip install`; everything else is in pyproject.toml.

The kernels are optional: without a compiler, without nvcc, or if a compiler fails, the installation
goes on, and `megalatent doctor` says what is missing. MEGALATENT_KERNELS=none skips them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "kernels" / "build.py")
assert _spec is not None
assert _spec.loader is not None
kernels_build = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = kernels_build
_spec.loader.exec_module(kernels_build)


class BuildKernels(build_ext):
    """Hands each extension to kernels/build.py, and lets none of them stop the installation."""

    def run(self) -> None:
        # The folder may hold what an earlier installation built; what is not asked for now would
        # be installed with the rest, of older sources perhaps.
        for part in set(kernels_build.PARTS) - set(parts):
            left = Path(self.build_lib, "megalatent", "kernels", f"_kernels_{part}.so")
            left.unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        # Not bound to a version of Python: the libraries are loaded by torch.
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        self._build(ext, Path(self.get_ext_fullpath(ext.name)).parent)

    def copy_extensions_to_source(self) -> None:
        # Editable install. Not copied over: a running process may have the old library mapped.
        for ext in self.extensions:
            self._build(ext, ROOT.joinpath(*ext.name.split(".")[:-1]))

    def _build(self, ext: Extension, folder: Path) -> None:
        kernels_build.build_all((ext.name.rpartition("_")[2],), folder)


def build_requirements(parts: tuple[str, ...]) -> list[str]:
    """Torch's headers are needed; an isolated build brings torch only where none can be read."""
    names = ("g++", "c++", "clang++")
    compiler = "CXX" in os.environ or any(shutil.which(name) for name in names)
    return ["torch>=2.13"] if parts and compiler and not kernels_build.find_torch_headers() else []


parts = kernels_build.parts_for_install()
sources = [str(path.relative_to(ROOT)) for path in kernels_build.source_files()]
setup(
    ext_modules=[
        Extension(f"megalatent.kernels._kernels_{part}", sources=sources, optional=True)
        for part in parts
    ],
    cmdclass={"build_ext": BuildKernels},
    setup_requires=build_requirements(parts),
)
