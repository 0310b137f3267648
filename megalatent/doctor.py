"""`megalatent doctor`: what is installed and built here, what runs, and why the rest does not.

Packages that may crash or break others when imported are imported in processes of their own. The
doctor changes nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import itertools
import json
import os
import platform as host
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megalatent import doctor_torch
from megalatent.doctor_finding import Finding, Status

__all__ = ["Finding", "add_doctor_parser", "examine", "run_doctor_command"]


@dataclass(frozen=True)
class _Package:
    """An optional package, and the import that shows that it is whole."""

    name: str
    distributions: tuple[str, ...]
    imported: str
    without: str


_PACKAGES = (
    _Package(
        "Transformer Engine",
        ("transformer-engine", "transformer_engine"),
        "transformer_engine.pytorch",
        "needed for FP8 and for Megatron's fastest layers on GPUs: pip install megalatent[gpu]",
    ),
    _Package(
        "flash-attn",
        ("flash-attn", "flash-attn-3", "flash_attn_3"),
        "flash_attn",
        "attention then uses Transformer Engine or PyTorch",
    ),
    _Package(
        "apex",
        ("apex",),
        "apex.optimizers",
        "Megatron then uses PyTorch's optimisers and norms; it is installed from NVIDIA's source",
    ),
    _Package(
        "modelopt",
        ("nvidia-modelopt",),
        "modelopt.torch.quantization",
        "needed for quantised exports alone",
    ),
    _Package(
        "emerging-optimizers",
        ("emerging-optimizers",),
        "emerging_optimizers",
        "needed for NorMuon: pip install megalatent[optim]",
    ),
    _Package(
        "transformers",
        ("transformers",),
        "transformers",
        "needed for Hugging Face models and tokenizers: pip install megalatent[hf]",
    ),
)

#: How long a process of ours may take.
_SECONDS = 180.0
_SHIM = """
from megalatent import platform
platform.install()
print(len(platform.patches()), platform.on_cpu())
"""


def add_doctor_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `doctor` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="show what is installed, built and running here, and why not",
        description="Shows what is installed and built here, what of it runs, and why the rest "
        "does not. Changes nothing. Exit status 1 if something that training needs is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def run_doctor_command(args: argparse.Namespace) -> int:
    """Print the findings; 1 if something that is needed is not there or broken."""
    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print_table(findings)
    return int(any(finding.needed and finding.status != "ok" for finding in findings))


def examine() -> list[Finding]:
    """Look at everything; takes as long as the slowest import. Nothing that is broken ends it."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        # In a process of its own first: a torch that cannot be loaded may end the process.
        probe = pool.submit(_python, "import torch")
        shim = pool.submit(_looked_at, "platform shim", _platform_shim)
        packages = [pool.submit(_looked_at, one.name, _package, one) for one in _PACKAGES]
        here = [Finding("Python", "ok", f"{host.python_version()} on {host.machine()}", True)]
        here += [_looked_at(name, look) for name, look in _HERE.items()]
        done = probe.result()
        if done is not None and done.returncode == 0:
            with_torch = {name: _looked_at(name, look) for name, look in doctor_torch.ROWS.items()}
        else:
            with_torch = dict(_without_torch(done))
        found = [*here, *with_torch.values(), shim.result(), *(one.result() for one in packages)]
        return sorted(found, key=lambda one: _ORDER.index(one.name))


def _looked_at(name: str, look: Callable[..., Finding], *arguments: Any) -> Finding:
    """What `look` finds; whatever stops it is what the report is for."""
    try:
        return look(*arguments)
    except Exception as error:
        said = str(error).strip().splitlines()
        detail = (
            f"cannot be looked at: {type(error).__name__}{': ' if said else ''}{''.join(said[:1])}"
        )
        return Finding(name, "broken", detail, needed=name in _NEEDED)


def _without_torch(
    done: subprocess.CompletedProcess[str] | None,
) -> Iterator[tuple[str, Finding]]:
    """The rows that need torch, where `import torch` failed."""
    version = _version(("torch",))
    if version is None:
        yield "torch", Finding("torch", "absent", "pip install megalatent brings it", needed=True)
    else:
        detail = f"{version} is installed but `import torch` fails: {_last_line(done)}"
        yield "torch", Finding("torch", "broken", detail, needed=True)
    for name in doctor_torch.ROWS:
        if name != "torch":
            yield name, Finding(name, "absent", "not looked at: torch does not import")


def _compiler() -> Finding:
    # "ccache g++ -m64": the last word before the flags, as kernels/build.py has it.
    given = itertools.takewhile(lambda word: word[0] != "-", os.environ.get("CXX", "").split())
    wanted = list(given)[-1:] or ["g++", "c++", "clang++"]
    found = next((path for path in map(shutil.which, wanted) if path), None)
    if found is None:
        return Finding("C++ compiler", "absent", "the kernels cannot be built here: install g++")
    return _says("C++ compiler", [found, "--version"])


def _toolkit() -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if nvcc is None or not os.path.isfile(nvcc):
        where = f"CUDA_HOME={home} has no bin/nvcc" if home else "no nvcc on the PATH"
        return Finding("CUDA toolkit", "absent", f"{where}: CUDA kernels cannot be built here")
    return _says("CUDA toolkit", [nvcc, "--version"], containing="release", before=f"{nvcc}: ")


def _megatron() -> Finding:
    name = "megatron-core"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", "pip install megalatent brings it", needed=True)
    wanted = _required(name)
    if wanted is not None:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(wanted).contains(version, prereleases=True):
            detail = f"{version} is installed, {wanted} is needed: pip install '{name}{wanted}'"
            return Finding(name, "broken", detail, needed=True)
    return Finding(name, "ok", version, needed=True)


def _platform_shim() -> Finding:
    name = "platform shim"
    done = _python(_SHIM)
    if done is None or done.returncode != 0:
        return Finding(name, "broken", _last_line(done), needed=True)
    patches, on_cpu = done.stdout.split()[-2:]
    role = "Megatron runs on the CPU through it" if on_cpu == "True" else "idle, CUDA is there"
    return Finding(name, "ok", f"{role}; all {patches} names that it replaces exist", needed=True)


def _package(package: _Package) -> Finding:
    version = _version(package.distributions)
    if version is None:
        return Finding(package.name, "absent", f"not installed; {package.without}")
    done = _python(f"import {package.imported}")
    if done is None or done.returncode != 0:
        detail = f"{version} is installed but `import {package.imported}` fails: {_last_line(done)}"
        return Finding(package.name, "broken", detail)
    return Finding(package.name, "ok", version)


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _required(name: str) -> str | None:
    """What this package's own metadata asks of `name`: "~=0.19.2"; None if it is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("megalatent") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    needed = (Requirement(line) for line in lines)
    return next((str(one.specifier) for one in needed if one.name == name), None)


def _python(code: str, seconds: float = _SECONDS) -> subprocess.CompletedProcess[str] | None:
    """Run `code` in a fresh interpreter; None if it takes too long."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return "it takes more than three minutes"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ends with status {done.returncode}"


def _says(name: str, command: list[str], containing: str = "", before: str = "") -> Finding:
    """The first line that `command` prints with `containing` in it, of a tool that must run."""
    shown = f"`{' '.join(command)}`"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except OSError as error:
        return Finding(name, "broken", f"{shown} cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"{shown} takes more than three minutes")
    lines = [line for line in done.stdout.splitlines() if containing in line]
    if done.returncode or not lines:
        said = _last_line(done) if done.returncode else "it does not say its version"
        return Finding(name, "broken", f"{shown} fails: {said}")
    return Finding(name, "ok", before + lines[0].strip())


#: What needs no torch, by the names of the rows.
_HERE: dict[str, Callable[[], Finding]] = {
    "C++ compiler": _compiler,
    "CUDA toolkit": _toolkit,
    "megatron-core": _megatron,
}
_NEEDED = ("torch", "megatron-core", "platform shim")
_ORDER = (
    "Python",
    *("torch", "GPU", "NCCL"),
    *_HERE,
    "platform shim",
    *(name for name in doctor_torch.ROWS if name.startswith("kernels")),
    *(package.name for package in _PACKAGES),
)

_COLOURS: dict[Status, str] = {"ok": "green", "absent": "yellow", "broken": "red"}


def _print_table(findings: list[Finding]) -> None:
    if not sys.stdout.isatty():
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.name:<{width}}  {finding.status:<6}  {finding.detail}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        mark = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(finding.name, mark, Text(finding.detail))
    Console().print(table)
