"""The doctor's rows that need torch: the library, the GPUs, and the kernels of the fusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalatent.doctor_finding import Finding

__all__ = ["ROWS"]


def library() -> Finding:
    """torch itself."""
    import torch

    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Finding("torch", "ok", f"{torch.__version__}, {built}", needed=True)


def gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "absent", "training runs on the CPU, over gloo")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = sorted({f"{card.name} (sm_{card.major}{card.minor})" for card in cards})
    # torch's own name for it: it has no public one.
    driver: int = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009
    runs = f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    return Finding("GPU", "ok", f"{len(cards)} x {', '.join(named)}, {runs}")


def nccl() -> Finding:
    import torch

    if not torch.distributed.is_nccl_available():
        return Finding("NCCL", "absent", "this torch has none: several GPUs cannot train together")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    idle = "" if torch.cuda.is_available() else ", idle without a GPU: gloo is used"
    return Finding("NCCL", "ok", f"{version}{idle}")


def compiled_cpu() -> Finding:
    from megalatent.kernels import extension

    state = extension.cpu_library()
    if not state.loaded:
        return Finding("kernels: C++", "broken" if state.built else "absent", state.reason)
    return tried("kernels: C++", "cuda", "cpu", f"sources {state.information['sources']}")


def compiled_cuda() -> Finding:
    import torch

    from megalatent.errors import UserError
    from megalatent.kernels import choice, extension

    name = "kernels: CUDA"
    try:
        state = extension.cuda_library()
    except UserError as error:
        return Finding(name, "broken", str(error))
    if not state.loaded:
        return Finding(name, "broken" if state.built else "absent", state.reason)
    built = (
        f"built for {', '.join('sm_' + a for a in state.information['architectures'].split(';'))}"
    )
    if not torch.cuda.is_available():
        return Finding(name, "ok", f"{built}; loads, not run: no GPU here")
    obstacle = choice.compiled_op_obstacle("cuda", torch.bfloat16)
    if obstacle is not None:
        return Finding(name, "broken", obstacle)
    return tried(name, "cuda", "cuda", built)


def triton() -> Finding:
    import torch

    from megalatent.kernels import choice

    name = "kernels: Triton"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = choice.triton_obstacle(device, torch.bfloat16)
    if obstacle is not None:
        return Finding(name, "absent", obstacle)
    import triton

    return tried(name, "triton", device, f"triton {triton.__version__}")


def chosen() -> Finding:
    import torch

    from megalatent.kernels import choice

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backend = choice.select("auto", device, dtype)
    taken = f"`auto` takes {choice.sentence(backend)} for {dtype} on {device}"
    return Finding("kernels: choice", "ok", taken)


def tried(name: str, setting: Any, device: str, detail: str) -> Finding:
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


#: By the names of their rows.
ROWS: dict[str, Callable[[], Finding]] = {
    "torch": library,
    "GPU": gpu,
    "NCCL": nccl,
    "kernels: C++": compiled_cpu,
    "kernels: CUDA": compiled_cuda,
    "kernels: Triton": triton,
    "kernels: choice": chosen,
}
