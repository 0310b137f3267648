"""Build the fusion kernels: `python kernels/build.py [cpu] [cuda] [--output FOLDER]`.

Used by `pip install` (setup.py), `make kernels` and CI. Needs a C++20 compiler and torch's headers;
the CUDA part also nvcc. Imports neither torch nor megalatent, and calls the compilers itself: the
kernels include no torch headers and the operators only those of the stable ABI, so that a build
takes seconds and the result works with later versions of torch.

Environment:
    MEGALATENT_KERNELS     parts to build on install: "cpu,cuda" (default), "cpu" or "none"
    MEGALATENT_CUDA_ARCHS  compute capabilities, default "90;100"; the last one also as PTX
    CXX, CUDA_HOME         the compiler and the CUDA toolkit, if the found ones are not the right
    MAX_JOBS               compilers run at once, default the number of processors
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels" / "src"
CACHE = ROOT / "build" / "kernels"
REPORT_NAME = "_kernels_build.json"
PARTS = ("cpu", "cuda")

# The oldest stable ABI the operators need (torch 2.10): libraries run on that torch and later.
_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
_HOST_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# No contraction: a fused multiply-add would change the jitter's last bit.
_KERNEL_FLAGS = [
    *("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
]


class BuildError(Exception):
    """A part cannot be built; the message says why in one or two lines."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Commands that make one library: objects from sources, then the link."""

    compiles: dict[str, list[str]]  # object name -> command without `-o object`
    link: list[str]  # the objects go after `-shared`
    detail: str  # what it is built for, in words
    versions: str  # compilers and headers, part of the cache key


def build(part: str, output: Path) -> str:
    """Build one part into `output`, or copy it from the cache; returns what it was built for.

    Raises:
        BuildError: something it needs is missing, or a compiler failed.
    """
    plan = _plan_cpu() if part == "cpu" else _plan_cuda()
    key = hashlib.sha256(repr((plan, source_hash())).encode()).hexdigest()[:16]
    cached = CACHE / f"{part}-{key}" / f"_kernels_{part}.so"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with open(cached.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may ask at once
        if not cached.exists():
            _run_plan(plan, cached)
    output.mkdir(parents=True, exist_ok=True)
    target = output / cached.name
    # Replaced, not rewritten: a process may have the old library mapped.
    with tempfile.NamedTemporaryFile(dir=output, delete=False) as copy:
        copy.write(cached.read_bytes())
    os.chmod(copy.name, 0o755)
    os.replace(copy.name, target)
    return plan.detail


def build_all(parts: tuple[str, ...], output: Path) -> dict[str, dict[str, str]]:
    """Build what can be built, and leave a report in `output` for `megalatent doctor`."""
    report: dict[str, dict[str, str]] = {}
    for part in PARTS:
        if part not in parts:
            continue
        try:
            report[part] = {"status": "built", "detail": build(part, output)}
        except BuildError as error:
            # An older library would not match the sources any more.
            (output / f"_kernels_{part}.so").unlink(missing_ok=True)
            report[part] = {"status": "not built", "detail": str(error)}
        print(f"kernels: {part}: {report[part]['status']} ({report[part]['detail']})")
    output.mkdir(parents=True, exist_ok=True)
    path = output / REPORT_NAME
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | report, indent=1) + "\n")
    return report


def parts_for_install() -> tuple[str, ...]:
    """Parts that `pip install` tries, from MEGALATENT_KERNELS."""
    wanted = os.environ.get("MEGALATENT_KERNELS", "cpu,cuda")
    parts = tuple(name for name in wanted.split(",") if name not in ("", "none"))
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise SystemExit(
            f"MEGALATENT_KERNELS={wanted}: {unknown[0]!r} is not a part; give cpu, cuda or none"
        )
    return parts


def source_hash() -> str:
    """One hash of every source file; the libraries carry it, so that a stale one is noticed."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(str(path.relative_to(SOURCES)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def source_files() -> list[Path]:
    """Every C++ and CUDA file of the kernels."""
    suffixes = (".h", ".cuh", ".cpp", ".cu")
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes)


def find_torch_headers() -> Path | None:
    """Torch's include folder: of the importable torch, else of the one beside this interpreter.

    `pip` hides the installed packages from a build, yet their headers can be read.
    """
    folders = [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folders.insert(0, Path(spec.origin).parent)
    for folder in folders:
        if (folder / "include/torch/csrc/stable/library.h").exists():
            return folder / "include"
    return None


def find_cuda() -> Path | None:
    """The CUDA toolkit's folder. `nvcc` on the PATH may be a wrapper script, so ask it last."""
    candidates = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        candidates.append(str(Path(nvcc).resolve().parent.parent))
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        for line in dry_run.stderr.splitlines():
            if line.startswith("#$ TOP="):
                candidates.append(line.removeprefix("#$ TOP=").strip('"'))
    candidates.append("/usr/local/cuda")
    for candidate in filter(None, candidates):
        folder = Path(candidate).resolve()
        if (folder / "bin/nvcc").exists() and (folder / "include/cuda_runtime.h").exists():
            return folder
    return None


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", ""))
    command = command or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    if not command or not shutil.which(command[0]):
        raise BuildError("no C++ compiler: install g++ (12 or later) or set CXX")
    return command


@functools.cache
def _version_of(command: str) -> str:
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class _Torch:
    compile: list[str]
    link: list[str]
    version: str


def _torch(*libraries: str) -> _Torch:
    """Flags to compile against torch's headers and to link with some of its libraries."""
    headers = find_torch_headers()
    if headers is None:
        raise BuildError("torch is not installed beside this Python: install torch, then build")
    folder = headers.parent / "lib"
    for name in libraries:
        if not (folder / f"lib{name}.so").exists():
            raise BuildError(f"the installed torch has no lib{name}.so: it is built without CUDA")
    # No rpath: torch is imported first, and its libraries are then found by their names.
    link = [f"-L{folder}", "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)]
    version = (headers / "torch/headeronly/version.h").read_text()
    return _Torch([_TARGET, "-isystem", str(headers)], link, version)


def _sources_flag() -> str:
    return f'-DMEGALATENT_SOURCES="{source_hash()}"'


def _plan_cpu() -> Plan:
    compiler = _compiler()
    torch = _torch("torch_cpu")
    x86 = platform.machine() in ("x86_64", "AMD64")
    avx2 = ["-DMEGALATENT_HAS_AVX2"] if x86 else []
    host = [*compiler, *_HOST_FLAGS, "-c"]
    isa = str(SOURCES / "cpu/isa.cpp")
    compiles = {
        "operators": [
            *(*host, "-O2", *torch.compile, _sources_flag(), str(SOURCES / "operators_cpu.cpp"))
        ],
        "schemas": [*host, "-O2", *torch.compile, str(SOURCES / "schemas.cpp")],
        "dispatch": [*host, "-O2", *avx2, str(SOURCES / "cpu/dispatch.cpp")],
        "baseline": [*host, *_KERNEL_FLAGS, "-DMEGALATENT_ISA=baseline", isa],
    }
    if x86:
        fast = ["-mavx2", "-mfma", "-mf16c", "-DMEGALATENT_ISA=avx2", *avx2]
        compiles["avx2"] = [*host, *_KERNEL_FLAGS, *fast, isa]
    detail = f"{compiler[-1]}, {'baseline and avx2' if x86 else platform.machine()}"
    link = [*compiler, "-shared", *torch.link]
    return Plan(compiles, link, detail, _version_of(compiler[0]) + torch.version)


def _plan_cuda() -> Plan:
    compiler = _compiler()
    cuda = find_cuda()
    if cuda is None:
        raise BuildError("no CUDA toolkit: put nvcc on the PATH or set CUDA_HOME")
    torch = _torch("torch_cpu", "torch_cuda")
    nvcc = str(cuda / "bin/nvcc")
    names, targets = _architectures(nvcc)
    host = [*compiler, *_HOST_FLAGS, "-c"]
    device = [
        *(nvcc, "-std=c++17", "-O3", "-ccbin", compiler[0], "-Xcompiler", "-fPIC", "-c"),
        *("--fmad=true", "--expt-relaxed-constexpr", *targets),
    ]
    compiles = {path.stem: [*device, str(path)] for path in sorted((SOURCES / "cuda").glob("*.cu"))}
    built_for = f'-DMEGALATENT_ARCHITECTURES="{";".join(names)}"'
    compiles["operators_cuda"] = [
        *(*host, "-O2", "-DUSE_CUDA", *torch.compile, "-isystem", str(cuda / "include")),
        *(_sources_flag(), built_for, str(SOURCES / "operators_cuda.cpp")),
    ]
    # The runtime is linked in, so that the library does not depend on which one torch brings.
    library = next(iter(sorted(cuda.glob("lib*/**/libcudart_static.a"))), None)
    library = library or next(iter(sorted(cuda.glob("targets/*/lib/libcudart_static.a"))), None)
    if library is None:
        raise BuildError(f"{cuda} has no libcudart_static.a: install the toolkit's runtime library")
    link = [*compiler, "-shared", "-Wl,--exclude-libs,ALL", *torch.link]
    link += [str(library), "-ldl", "-lrt", "-lpthread"]
    detail = f"{cuda}, sm_{', sm_'.join(names)}"
    versions = _version_of(nvcc) + _version_of(compiler[0]) + torch.version
    return Plan(compiles, link, detail, versions)


def _architectures(nvcc: str) -> tuple[list[str], list[str]]:
    """Names ("90", "100+PTX") and nvcc flags of the cards to build for."""
    listed = os.environ.get("MEGALATENT_CUDA_ARCHS", "90;100").replace(",", ";").replace(".", "")
    wanted = [name for name in listed.split(";") if name]
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    usable = [name for name in wanted if f"compute_{name.rstrip('af')}" in known.split()]
    if not usable:
        raise BuildError(f"this nvcc does not build for any of sm_{', sm_'.join(wanted)}")
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in usable]
    last = usable[-1]
    flags[-1] = f"-gencode=arch=compute_{last},code=[sm_{last},compute_{last}]"
    return [*usable[:-1], f"{last}+PTX"], flags


def _run_plan(plan: Plan, library: Path) -> None:
    jobs = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = {name: str(Path(scratch) / f"{name}.o") for name in plan.compiles}
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            commands = [[*plan.compiles[name], "-o", objects[name]] for name in plan.compiles]
            list(pool.map(_run, commands))
        finished = str(Path(scratch) / library.name)
        after = plan.link.index("-shared") + 1
        _run([*plan.link[:after], *objects.values(), *plan.link[after:], "-o", finished])
        os.replace(finished, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.stderr.write(f"{shlex.join(command)}\n{done.stdout}{done.stderr}\n")
        first = next(
            (line for line in (done.stderr + done.stdout).splitlines() if "error" in line), ""
        )
        raise BuildError(f"{command[0]} failed: {first.strip() or 'see the output above'}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=PARTS, help="default: both")
    parser.add_argument("--output", type=Path, default=ROOT / "megalatent" / "kernels")
    parser.add_argument(
        "--require", action="store_true", help="exit with 1 if a named part was not built"
    )
    arguments = parser.parse_args()
    report = build_all(tuple(arguments.parts) or PARTS, arguments.output)
    failed = any(row["status"] != "built" for row in report.values())
    return 1 if arguments.require and failed else 0


if __name__ == "__main__":
    sys.exit(main())
