"""`megalatent doctor`: what is installed and built here, what runs, and why the rest does not.

Packages that may crash or break others when imported are imported in processes of their own. The
doctor changes nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import platform as host
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "add_doctor_parser", "examine", "run_doctor_command"]

Status = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes:
        name: what was looked at.
        status: `ok` if it runs here, `absent` if it is not there (its `detail` says what that
            costs, or how to get it), `broken` if it is there and does not work.
        detail: version, choice or reason, in one sentence.
        needed: without it nothing trains here.
    """

    name: str
    status: Status
    detail: str
    needed: bool = False


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
    """Look at everything; takes as long as the slowest import."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        shim = pool.submit(_platform_shim)
        packages = [pool.submit(_package, package) for package in _PACKAGES]
        here = [
            Finding("Python", "ok", f"{host.python_version()} on {host.machine()}", needed=True),
            *(look() for look in (_torch, _gpu, _nccl, _compiler, _toolkit, _megatron)),
        ]
        kernels = [look() for look in (_compiled_cpu, _compiled_cuda, _triton, _chosen)]
        return [*here, shim.result(), *kernels, *(package.result() for package in packages)]


def _torch() -> Finding:
    import torch

    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Finding("torch", "ok", f"{torch.__version__}, {built}", needed=True)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "absent", "training runs on the CPU, over gloo")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = sorted({f"{card.name} (sm_{card.major}{card.minor})" for card in cards})
    # torch's own name for it: it has no public one.
    driver: int = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009
    runs = f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    return Finding("GPU", "ok", f"{len(cards)} x {', '.join(named)}, {runs}")


def _nccl() -> Finding:
    import torch

    if not torch.distributed.is_nccl_available():
        return Finding("NCCL", "absent", "this torch has none: several GPUs cannot train together")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    idle = "" if torch.cuda.is_available() else ", idle without a GPU: gloo is used"
    return Finding("NCCL", "ok", f"{version}{idle}")


def _compiler() -> Finding:
    wanted = os.environ.get("CXX", "").split()[:1] or ["g++", "c++", "clang++"]
    found = next((path for path in map(shutil.which, wanted) if path), None)
    if found is None:
        return Finding("C++ compiler", "absent", "the kernels cannot be built here: install g++")
    return Finding("C++ compiler", "ok", _first_line([found, "--version"]))


def _toolkit() -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if nvcc is None or not os.path.exists(nvcc):
        where = f"CUDA_HOME={home} has no bin/nvcc" if home else "no nvcc on the PATH"
        return Finding("CUDA toolkit", "absent", f"{where}: CUDA kernels cannot be built here")
    release = _first_line([nvcc, "--version"], containing="release")
    return Finding("CUDA toolkit", "ok", f"{nvcc}: {release}")


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


def _compiled_cpu() -> Finding:
    from megalatent.kernels import extension

    state = extension.cpu_library()
    if not state.loaded:
        return Finding("kernels: C++", "absent", state.reason)
    return _tried("kernels: C++", "cuda", "cpu", f"sources {state.information['sources']}")


def _compiled_cuda() -> Finding:
    import torch

    from megalatent.errors import UserError
    from megalatent.kernels import choice, extension

    name = "kernels: CUDA"
    try:
        state = extension.cuda_library()
    except UserError as error:
        return Finding(name, "broken", str(error))
    if not state.loaded:
        return Finding(name, "absent", state.reason)
    built = (
        f"built for {', '.join('sm_' + a for a in state.information['architectures'].split(';'))}"
    )
    if not torch.cuda.is_available():
        return Finding(name, "ok", f"{built}; loads, not run: no GPU here")
    obstacle = choice.compiled_op_obstacle("cuda", torch.bfloat16)
    if obstacle is not None:
        return Finding(name, "broken", obstacle)
    return _tried(name, "cuda", "cuda", built)


def _triton() -> Finding:
    import torch

    from megalatent.kernels import choice

    name = "kernels: Triton"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = choice.triton_obstacle(device, torch.bfloat16)
    if obstacle is not None:
        return Finding(name, "absent", obstacle)
    return _tried(name, "triton", device, f"triton {importlib.metadata.version('triton')}")


def _chosen() -> Finding:
    import torch

    from megalatent.kernels import choice

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backend = choice.select("auto", device, dtype)
    taken = f"`auto` takes {choice.sentence(backend)} for {dtype} on {device}"
    return Finding("kernels: choice", "ok", taken)


def _tried(name: str, setting: Any, device: str, detail: str) -> Finding:
    """Run a small fusion forward and backward, and compare it with plain PyTorch."""
    import torch

    from megalatent.kernels import select

    def run(which: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(3, 4, 2, 96, generator=generator).to(device)
        u, g, e = leaves = [state.requires_grad_() for state in states.unbind()]
        mask = torch.tensor([[True, False]], device=device).expand(4, 2).contiguous()
        weight = torch.ones(96, device=device)
        x = select(which, device, torch.float32).gated(u, g, e, mask, weight, 1e-5)
        return [x, *torch.autograd.grad(x.square().sum(), leaves)]

    try:
        pairs = zip(run(setting), run("torch"), strict=True)
        right = all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)
    except Exception as error:  # whatever stops it is what the report is for
        return Finding(name, "broken", f"{detail}; fails: {error}".splitlines()[0])
    if not right:
        return Finding(name, "broken", f"{detail}; its results differ from PyTorch's")
    return Finding(name, "ok", f"{detail}; runs")


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


def _python(code: str, seconds: float = 180.0) -> subprocess.CompletedProcess[str] | None:
    """Run `code` in a fresh interpreter; None if it takes too long."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _last_line(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return "it takes more than three minutes"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ends with status {done.returncode}"


def _first_line(command: list[str], containing: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if containing in line]
    return lines[0].strip() if lines else f"`{' '.join(command)}` says nothing"


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
