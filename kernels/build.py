"""Build the fusion kernels: `python kernels/build.py [cpu] [cuda] [--output FOLDER]`.

Used by `pip install` (setup.py), `make kernels` and CI. Needs a C++20 compiler and torch's headers;
the CUDA part also nvcc. Imports neither torch nor megalatent, and calls the compilers itself: the
kernels include no torch headers and the operators only those of the stable ABI, so that a build
takes seconds and the result works with later versions of torch.

Environment:
    MEGALATENT_KERNELS     parts to build on install: "cpu,cuda" (default), "cpu" or "none"
    MEGALATENT_CUDA_ARCHS  compute capabilities, default "90;100"; the last one also as PTX
    CXX                    the compiler, if the found one is not the right; with flags, or ccache
    CUDA_HOME, CUDA_PATH   the folder of the CUDA toolkit, if the found one is not the right
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
import itertools
import json
import os
import platform
import re
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
        except (BuildError, OSError) as error:
            # An older library would not match the sources any more.
            (output / f"_kernels_{part}.so").unlink(missing_ok=True)
            report[part] = {"status": "not built", "detail": str(error)}
        print(f"kernels: {part}: {report[part]['status']} ({report[part]['detail']})")
    _add_to_report(output, report)
    return report


def _add_to_report(output: Path, rows: dict[str, dict[str, str]]) -> None:
    """Parts that were not tried keep what an earlier build said of them."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / REPORT_NAME
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or cut off
        known = {}
    # Replaced at once: another build, or a run, may be reading it.
    with tempfile.NamedTemporaryFile("w", dir=output, delete=False) as copy:
        copy.write(json.dumps(known | rows, indent=1) + "\n")
    os.chmod(copy.name, 0o644)
    os.replace(copy.name, path)


def parts_for_install() -> tuple[str, ...]:
    """Parts that `pip install` tries, from MEGALATENT_KERNELS."""
    wanted = os.environ.get("MEGALATENT_KERNELS", "cpu,cuda")
    named = (name.strip() for name in wanted.split(","))
    parts = tuple(name for name in named if name not in ("", "none"))
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
    """The CUDA toolkit's folder. `nvcc` on the PATH may be a wrapper script, so ask it last.

    Raises:
        BuildError: CUDA_HOME or CUDA_PATH is set to a folder that is none.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if given := os.environ.get(name):
            if _cuda_headers(Path(given)) is None:
                raise BuildError(f"{name}={given} holds no CUDA toolkit: set it right or unset it")
            return Path(given).resolve()
    candidates = []
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
        if _cuda_headers(Path(candidate)) is not None:
            return Path(candidate).resolve()
    return None


def _cuda_headers(toolkit: Path) -> Path | None:
    """Where cuda_runtime.h is, if `toolkit` is one; conda's have it under `targets` alone."""
    if not (toolkit / "bin/nvcc").exists():
        return None
    folders = (toolkit / "include", *sorted(toolkit.glob("targets/*/include")))
    return next((folder for folder in folders if (folder / "cuda_runtime.h").exists()), None)


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """The C++ compiler: all words of the command, itself, and the flags that it is given."""

    command: list[str]
    program: str
    flags: list[str]


def _compiler() -> _Compiler:
    given = os.environ.get("CXX", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise BuildError(f"CXX={given} is not a command: {error}") from None
    command = command or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    if not command:
        raise BuildError("no C++ compiler: install g++ (12 or later) or set CXX")
    # "ccache g++ -m64": the last word before the flags is the compiler.
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), command))
    for word in (command[0], *words[-1:]):
        if not shutil.which(word):
            raise BuildError(f"no C++ compiler: CXX={given}: there is no program {word!r}")
    return _Compiler(command, words[-1], command[len(words) :])


@functools.cache
def _version_of(command: str) -> str:
    return _output([command, "--version"]).strip()


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
    own = f'-DMEGALATENT_SOURCES="{source_hash()}"'
    return _Torch([_TARGET, own, "-isystem", str(headers)], link, version)


def _plan_cpu() -> Plan:
    compiler = _compiler()
    torch = _torch("torch_cpu")
    x86 = platform.machine() in ("x86_64", "AMD64")
    avx2 = ["-DMEGALATENT_HAS_AVX2"] if x86 else []
    host = [*compiler.command, *_HOST_FLAGS, "-c"]
    isa = str(SOURCES / "cpu/isa.cpp")
    compiles = {
        "operators": [*host, "-O2", *torch.compile, str(SOURCES / "operators_cpu.cpp")],
        "schemas": [*host, "-O2", *torch.compile, str(SOURCES / "schemas.cpp")],
        "dispatch": [*host, "-O2", *avx2, str(SOURCES / "cpu/dispatch.cpp")],
        "baseline": [*host, *_KERNEL_FLAGS, "-DMEGALATENT_ISA=baseline", isa],
    }
    if x86:
        fast = ["-mavx2", "-mfma", "-mf16c", "-DMEGALATENT_ISA=avx2", *avx2]
        compiles["avx2"] = [*host, *_KERNEL_FLAGS, *fast, isa]
    detail = f"{compiler.program}, {'baseline and avx2' if x86 else platform.machine()}"
    link = [*compiler.command, "-shared", *torch.link]
    return Plan(compiles, link, detail, _version_of(compiler.program) + torch.version)


def _plan_cuda() -> Plan:
    compiler = _compiler()
    cuda = find_cuda()
    if cuda is None:
        raise BuildError("no CUDA toolkit: put nvcc on the PATH or set CUDA_HOME")
    torch = _torch("torch_cpu", "torch_cuda")
    nvcc = str(cuda / "bin/nvcc")
    names, targets, unknown = _architectures(nvcc)
    host = [*compiler.command, *_HOST_FLAGS, "-c"]
    device = [
        *(nvcc, "-std=c++17", "-O3", "-ccbin", compiler.program, "-c"),
        *(part for flag in ("-fPIC", *compiler.flags) for part in ("-Xcompiler", flag)),
        *("--fmad=true", "--expt-relaxed-constexpr", *targets),
    ]
    compiles = {path.stem: [*device, str(path)] for path in sorted((SOURCES / "cuda").glob("*.cu"))}
    built_for = f'-DMEGALATENT_ARCHITECTURES="{";".join(names)}"'
    compiles["operators_cuda"] = [
        *(*host, "-O2", "-DUSE_CUDA", *torch.compile, "-isystem", str(_cuda_headers(cuda))),
        *(built_for, str(SOURCES / "operators_cuda.cpp")),
    ]
    # The runtime is linked in, so that the library does not depend on which one torch brings.
    library = next(iter(sorted(cuda.glob("lib*/**/libcudart_static.a"))), None)
    library = library or next(iter(sorted(cuda.glob("targets/*/lib/libcudart_static.a"))), None)
    if library is None:
        raise BuildError(f"{cuda} has no libcudart_static.a: install the toolkit's runtime library")
    link = [*compiler.command, "-shared", "-Wl,--exclude-libs,ALL", *torch.link]
    link += [str(library), "-ldl", "-lrt", "-lpthread"]
    detail = f"{cuda}, sm_{', sm_'.join(names)}"
    if unknown:
        detail += f"; this nvcc does not know sm_{', sm_'.join(unknown)}"
    versions = _version_of(nvcc) + _version_of(compiler.program) + torch.version
    return Plan(compiles, link, detail, versions)


# A compute capability, also as torch and nvcc write them. The kernels use nothing that only one
# card has, so that what is built for 9.0 serves "90a" too.
_CAPABILITY = re.compile(r"(?:sm_|compute_)?(\d+)\.?(\d)[af]?(?:\+PTX)?", re.IGNORECASE)


def _architectures(nvcc: str) -> tuple[list[str], list[str], list[str]]:
    """Names ("90", "100+PTX") and nvcc flags of the cards to build for; those it does not know."""
    listed = os.environ.get("MEGALATENT_CUDA_ARCHS", "").strip() or "90;100"
    wanted: list[str] = []
    for word in filter(None, re.split(r"[;,\s]+", listed)):
        found = _CAPABILITY.fullmatch(word)
        if found is None:
            raise BuildError(
                f"MEGALATENT_CUDA_ARCHS={listed}: {word!r} is not a compute capability; "
                "give for example 90;100"
            )
        name = found[1] + found[2]
        wanted += [name] if name not in wanted else []
    known = _output([nvcc, "--list-gpu-arch"]).split()
    usable = [name for name in wanted if f"compute_{name}" in known]
    if not usable:
        raise BuildError(f"this nvcc does not build for any of sm_{', sm_'.join(wanted)}")
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in usable]
    last = usable[-1]
    flags[-1] = f"-gencode=arch=compute_{last},code=[sm_{last},compute_{last}]"
    return [*usable[:-1], f"{last}+PTX"], flags, [name for name in wanted if name not in usable]


def _run_plan(plan: Plan, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = {name: str(Path(scratch) / f"{name}.o") for name in plan.compiles}
        with concurrent.futures.ThreadPoolExecutor(_jobs()) as pool:
            commands = [[*plan.compiles[name], "-o", objects[name]] for name in plan.compiles]
            list(pool.map(_run, commands))
        finished = str(Path(scratch) / library.name)
        after = plan.link.index("-shared") + 1
        _run([*plan.link[:after], *objects.values(), *plan.link[after:], "-o", finished])
        os.replace(finished, library)


def _jobs() -> int:
    given = os.environ.get("MAX_JOBS", "").strip() or "0"
    if not given.isdecimal():
        raise BuildError(f"MAX_JOBS={given} is not a number of compilers: give 1 or more")
    return int(given) or os.cpu_count() or 1


def _output(command: list[str]) -> str:
    """What a program that must run prints."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise BuildError(f"{shlex.join(command)} failed: {said[-1]}")
    return done.stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
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
    try:
        report = build_all(tuple(arguments.parts) or PARTS, arguments.output)
    except OSError as error:
        print(f"kernels: error: {error}", file=sys.stderr)
        return 1
    failed = any(row["status"] != "built" for row in report.values())
    return 1 if arguments.require and failed else 0


if __name__ == "__main__":
    sys.exit(main())
