"""Checks of the fusion kernels on a card: right, repeatable, capturable, and near its bandwidth."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator

import torch

from megalatent.errors import UserError
from megalatent.kernels import Backend, select
from megalatent.kernels.reference import ReferenceBackend
from tools import bench_kernels
from tools.bench_kernels import EPS, Inputs
from tools.gpu_check_report import Outcome

__all__ = [
    "bandwidth",
    "correctness",
    "cuda_graph",
    "large_tensors",
    "noise",
    "share_of_a_step",
    "torch_compile",
]

REFERENCE = ReferenceBackend("to compare with")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# One warp a row; the 1B model; the widest that stays in registers; the two general kernels.
WIDTHS = (64, 1536, 8192, 16384, 1001)
# Rows and share of plain ones: mixed, all fused, all plain, none at all.
SHAPES = ((257, 0.3), (5, 0.0), (5, 1.0), (0, 0.0))
BANDWIDTH_GOAL = 0.85
SHARE_GOAL = 0.01
# The 1B model (FBT appendix A): weights that multiply each token, for 6 flops each in training.
MODEL_WEIGHTS, MODEL_WIDTH = 1.065e9, 1536


def _backends(device: str) -> Iterator[Backend]:
    """The compiled op (it must be there), and Triton where it runs."""
    yield select("cuda", device, torch.float32)
    try:
        yield select("triton", device, torch.float32)
    except UserError as error:
        print(f"gpu_check: {error}")


def correctness(device: str) -> Iterator[Outcome]:
    """Forward and backward of every fusion against float64, and the same bits when repeated."""
    for backend in _backends(device):
        for dtype in DTYPES:
            worst = 0.0
            repeats = True
            for width, (rows, plain) in itertools.product(WIDTHS, SHAPES):
                inputs = _extreme(Inputs.random(rows, width, dtype, device, plain))
                for fusion in (_gated, _concat, _additive):
                    wide = fusion(REFERENCE, _to_float64(inputs))
                    with _poisoned_memory():
                        got = fusion(backend, inputs)
                        again = fusion(backend, inputs)
                    repeats &= all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
                    errors = [_error(one, other) for one, other in zip(got, wide, strict=True)]
                    # `max` may pass over a nan.
                    worst = max(worst, *errors) if all(map(math.isfinite, errors)) else math.inf
            # One rounding to the dtype, and some of float32.
            allowed = torch.finfo(dtype).eps / 2 + 5e-6
            name = f"{backend.name} {str(dtype).removeprefix('torch.')}"
            detail = f"error {worst:.1e} of the row's largest, allowed {allowed:.1e}"
            yield Outcome.of(f"{name} precision", worst <= allowed, detail)
            yield Outcome.of(f"{name} repeats", repeats, "bit for bit, gradients too")


def _gated(backend: Backend, inputs: Inputs) -> list[torch.Tensor]:
    return [x.detach() for x in inputs.gated_both_ways(backend)]


def _concat(backend: Backend, inputs: Inputs) -> list[torch.Tensor]:
    leaves = (inputs.u, inputs.g, inputs.e, inputs.weight)
    x = backend.concat(inputs.u, inputs.g, inputs.e, inputs.mask, inputs.weight, EPS)
    return [x.detach(), *torch.autograd.grad(x, leaves, inputs.dx)]


def _additive(backend: Backend, inputs: Inputs) -> list[torch.Tensor]:
    x = backend.additive(inputs.u, inputs.e, inputs.mask)
    return [x.detach(), *torch.autograd.grad(x, (inputs.u, inputs.e), inputs.dx)]


def _to_float64(inputs: Inputs) -> Inputs:
    def widen(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().double() if tensor.is_floating_point() else tensor
        return wide.requires_grad_(tensor.requires_grad)

    fields = dataclasses.fields(inputs)
    return Inputs(**{field.name: widen(getattr(inputs, field.name)) for field in fields})


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not want.numel():
        return 0.0
    # Below the smallest normal number the dtype's spacing stays as it is there.
    smallest = torch.finfo(got.dtype).smallest_normal
    scale = want.abs().amax(dim=-1, keepdim=True).clamp(min=smallest)
    return ((got.double() - want) / scale).abs().max().item()


def _extreme(inputs: Inputs) -> Inputs:
    """In the first rows saturated gates and large states."""
    with torch.no_grad():
        inputs.g[:1] *= 200
        inputs.u[1:2] *= 1e4
    return inputs


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory holds nan, so that an element nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def noise(device: str) -> Iterator[Outcome]:
    """The jittered states equal those of the CPU reference, bit for bit."""
    for backend in _backends(device):
        for dtype in DTYPES:
            equal = True
            for width in (1536, 1001):
                here = Inputs.random(300, width, dtype, "cpu")
                there = Inputs(
                    **{f.name: getattr(here, f.name).to(device) for f in dataclasses.fields(here)}
                )
                equal &= torch.equal(there.shift(backend).cpu(), here.shift(REFERENCE))
            name = f"{backend.name} {str(dtype).removeprefix('torch.')}"
            yield Outcome.of(name, equal, "equal to the CPU reference, bit for bit")


def large_tensors(device: str) -> Iterator[Outcome]:
    """More than 2^31 elements: the last rows come out as they do alone."""
    if device == "cpu":
        yield Outcome("2^31 elements", "skipped", "a rehearsal: takes much memory")
        return
    free, _ = torch.cuda.mem_get_info()
    rows, width = 2**20 + 3, 2048
    wanted = 5 * 2 * rows * width
    if free < wanted:
        detail = f"needs {wanted / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are free"
        yield Outcome("2^31 elements", "skipped", detail)
        return
    u = torch.randn(rows, 1, width, device=device, dtype=torch.bfloat16)
    mask = torch.ones(rows, 1, device=device, dtype=torch.bool)
    weight = torch.ones(width, device=device, dtype=torch.bfloat16)
    position = torch.arange(rows, device=device).unsqueeze(1)
    for backend in _backends(device):
        whole, alone = (
            _last_rows(backend, u[part], mask[part], weight, position[part])
            for part in (slice(None), slice(-4, None))
        )
        equal = all(torch.equal(one, other) for one, other in zip(whole, alone, strict=True))
        detail = f"{rows} rows, both ways and shifted"
        yield Outcome.of(f"{backend.name} 2^31 elements", equal, detail)


def _last_rows(
    backend: Backend,
    u: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    position: torch.Tensor,
) -> list[torch.Tensor]:
    """Three rows of what each kernel makes of `u`; no more than two results at a time."""
    ops = bench_kernels.operators(backend)
    x, rstd = ops.gated(u, u, u, mask, weight, EPS)
    kept = [x[-3:].clone()]
    del x
    du, dg, _, _ = ops.gated_backward(u, u, u, mask, weight, rstd, False)
    kept += [du[-3:].clone(), dg[-3:].clone()]
    del du, dg
    source = torch.arange(u.shape[0], device=u.device) - 1
    shifted = ops.shift_jitter(u, u[:0], source, position, position, 2, 1, 0.02)
    kept.append(shifted[-3:].clone())
    del shifted
    dh, _ = ops.shift_jitter_backward(u, source, 0)
    return [*kept, dh[-3:].clone()]


def cuda_graph(device: str) -> Iterator[Outcome]:
    """A captured fusion, replayed with other inputs, equals the uncaptured one."""
    if device == "cpu":
        yield Outcome("capture", "skipped", "a rehearsal: there is nothing to capture on a CPU")
        return
    for backend in _backends(device):
        inputs = Inputs.random(512, 1536, torch.bfloat16, device, plain=0.3)

        def step(backend: Backend = backend, inputs: Inputs = inputs) -> tuple[torch.Tensor, ...]:
            shifted = inputs.shift(backend, inputs.u)
            x = backend.gated(shifted, inputs.g, inputs.e, inputs.mask, inputs.weight, EPS)
            leaves = (inputs.u, inputs.g, inputs.e, inputs.weight)
            return x, *torch.autograd.grad(x, leaves, inputs.dx)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            for tensor in (inputs.u, inputs.g, inputs.e, inputs.dx):
                tensor.normal_()
            inputs.position.add_(17)
        graph.replay()
        pairs = zip(captured, step(), strict=True)
        equal = all(torch.equal(one, other) for one, other in pairs)
        yield Outcome.of(f"{backend.name} capture", equal, "replayed with other inputs")


def torch_compile(device: str) -> Iterator[Outcome]:
    """One graph without a break, and the results of the uncompiled fusion."""
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") != "0":
        yield Outcome("fullgraph", "skipped", "TORCHDYNAMO_DISABLE is set: nothing would compile")
        return
    backend = select("cuda", device, torch.float32)
    inputs = Inputs.random(128, 256, torch.bfloat16, device, plain=0.3)

    def step(u: torch.Tensor) -> torch.Tensor:
        shifted = inputs.shift(backend, u)
        return backend.gated(shifted, inputs.g, inputs.e, inputs.mask, inputs.weight, EPS)

    compiler = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    gradients = [
        torch.autograd.grad(run(inputs.u), (inputs.u, inputs.weight), inputs.dx)
        for run in (step, compiled)
    ]
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    yield Outcome.of(f"fullgraph, {compiler}", equal, "gradients equal the uncompiled ones")


def bandwidth(device: str) -> Iterator[Outcome]:
    """Each kernel against the card's own copy, counting each needed byte once."""
    if device == "cpu":
        yield Outcome("bandwidth", "skipped", "a rehearsal: measured on a GPU alone")
        return
    copied = bench_kernels.copy_bandwidth()
    yield Outcome("copy", "measured", f"{copied / 1e12:.2f} TB/s read and written")
    for row in bench_kernels.bandwidths(copied):
        what = f"{row.backend} {row.kernel}, D = {row.width}"
        detail = f"{row.share:.0%} of the copy's, {row.microseconds:.0f} us"
        if row.backend == "cuda":
            yield Outcome.of(what, row.share >= BANDWIDTH_GOAL, detail)
        else:
            yield Outcome(what, "measured", detail)


def share_of_a_step(device: str) -> Iterator[Outcome]:
    """The whole fusion, its two products included, against a step of the 1B model.

    The step is taken at the speed of a large matrix product on the same card, faster than any real
    one: the share is then an upper bound.
    """
    if device == "cpu":
        yield Outcome("share of a step", "skipped", "a rehearsal: measured on a GPU alone")
        return
    size, tokens, width = 8192, 32768, MODEL_WIDTH
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * size**3 / bench_kernels.gpu_seconds(lambda: a @ b)
    backend = select("auto", device, torch.bfloat16)
    inputs = Inputs.random(tokens, width, torch.bfloat16, device)
    matrices = [torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for matrix in matrices:
        matrix.requires_grad_()
    leaves = (inputs.u, inputs.g, inputs.weight, *matrices)

    def fusion() -> None:
        u = inputs.shift(backend, inputs.u) @ matrices[0]
        g = inputs.g @ matrices[1]
        x = backend.gated(u, g, inputs.e.detach(), inputs.mask, inputs.weight, EPS)
        torch.autograd.grad(x, leaves, inputs.dx)

    seconds = bench_kernels.gpu_seconds(fusion)
    share = seconds / (6 * MODEL_WEIGHTS * tokens / flops)
    detail = f"{share:.2%} of a step at {flops / 1e12:.0f} TFLOP/s, {seconds * 1e6:.0f} us"
    yield Outcome.of("share of a step", share < SHARE_GOAL, detail)
