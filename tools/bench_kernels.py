"""What the fusion kernels cost: `python -m tools.bench_kernels [--json FILE]` in the repository.

On a CPU: time and memory of the compiled op against plain PyTorch, both measured in one run, in
turns, so that a busy machine slows both alike. On a GPU: the share of the card's copy bandwidth
that each kernel reaches, counting each byte once that must be read or written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megalatent.errors import UserError
from megalatent.kernels import Backend, KernelSetting, select

EPS = 1e-5
CPU_ROWS, CPU_WIDTH = 4096, 1536
GPU_WIDTHS = (1536, 2048, 4096, 8192)
GPU_ELEMENTS = 1 << 27  # a bfloat16 activation of 256 MiB: no cache holds it
Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class CpuCost:
    """The compiled op against PyTorch: `time_ratio` how often faster, `memory_ratio` its share of
    the memory beyond the results (outputs and gradients)."""

    name: str
    compiled_ms: float
    torch_ms: float
    time_ratio: float
    memory_ratio: float | None


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """`share`: bytes that must move over time, against the same card's device-to-device copy."""

    kernel: str
    backend: str
    width: int
    microseconds: float
    share: float


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of every fusion: [s, 1, D] activations and what goes with them."""

    u: torch.Tensor
    g: torch.Tensor
    e: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    dx: torch.Tensor
    source: torch.Tensor
    position: torch.Tensor

    @classmethod
    def random(
        cls, rows: int, width: int, dtype: torch.dtype, device: str, plain: float = 0.0
    ) -> Inputs:
        """`plain`: share of plain positions."""
        u, g, e, dx = (torch.randn(rows, 1, width, device=device, dtype=dtype) for _ in range(4))
        source = torch.arange(rows, device=device) - 1
        return cls(
            u=u.requires_grad_(),
            g=g.requires_grad_(),
            e=e.requires_grad_(),
            mask=torch.rand(rows, 1, device=device) >= plain,
            weight=torch.rand(width, device=device, dtype=dtype).requires_grad_(),
            dx=dx,
            source=source,
            position=source.clamp(min=0).unsqueeze(1),
        )

    def gated(self, backend: Backend) -> torch.Tensor:
        return backend.gated(self.u, self.g, self.e, self.mask, self.weight, EPS)

    def gated_both_ways(self, backend: Backend) -> tuple[torch.Tensor, ...]:
        leaves = (self.u, self.g, self.e, self.weight)
        x = self.gated(backend)
        return x, *torch.autograd.grad(x, leaves, self.dx)

    def shift(self, backend: Backend, h: torch.Tensor | None = None) -> torch.Tensor:
        state = self.u.detach() if h is None else h
        rest = (self.source, self.position, self.position)
        return backend.shift_jitter(state, None, *rest, k=2, seed=1, sigma=0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    try:
        costs = list(cpu_costs())
    except UserError as error:
        print(f"bench_kernels: error: {error}", file=sys.stderr)
        return 2
    print(f"CPU, float32, {CPU_ROWS} rows of {CPU_WIDTH}, {torch.get_num_threads()} threads")
    for cost in costs:
        memory = "" if cost.memory_ratio is None else f", {cost.memory_ratio:.0%} of the memory"
        print(
            f"  {cost.name:<22} {cost.compiled_ms:8.1f} ms, PyTorch {cost.torch_ms:8.1f} ms: "
            f"{cost.time_ratio:.1f} times as fast{memory}"
        )
    found: dict[str, object] = {"cpu": [dataclasses.asdict(cost) for cost in costs]}
    if torch.cuda.is_available():
        copied = copy_bandwidth()
        shares = list(bandwidths(copied))
        print(f"{torch.cuda.get_device_name()}, bfloat16, copy {copied / 1e12:.2f} TB/s")
        for row in shares:
            print(
                f"  {row.kernel:<22} {row.backend:<7} D = {row.width:<5} "
                f"{row.microseconds:8.1f} us  {row.share:.0%} of the copy bandwidth"
            )
        found |= {"copy_bytes_per_second": copied, "gpu": [dataclasses.asdict(r) for r in shares]}
    else:
        print("GPU: not measured, there is no CUDA device here")
        found["gpu"] = None
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def cpu_costs(rounds: int = 5) -> Iterator[CpuCost]:
    """The compiled op's CPU kernels against the PyTorch reference.

    Raises:
        UserError: the compiled op is not built.
    """
    compiled, reference = (select(which, "cpu", torch.float32) for which in ("cuda", "torch"))
    inputs = Inputs.random(CPU_ROWS, CPU_WIDTH, torch.float32, "cpu", plain=0.1)
    leaves = (inputs.u, inputs.g, inputs.e, inputs.weight)
    results = inputs.dx.nbytes + sum(leaf.nbytes for leaf in leaves)

    def both_ways(backend: Backend) -> Run:
        return lambda: inputs.gated_both_ways(backend)

    def shift(backend: Backend) -> Run:
        return lambda: inputs.shift(backend)

    for name, make in (("gated, both ways", both_ways), ("shift and jitter", shift)):
        fast, slow = make(compiled), make(reference)
        times = [(_seconds(fast), _seconds(slow)) for _ in range(rounds)]
        memory = None
        if make is both_ways:
            memory = (peak_bytes(fast) - results) / (peak_bytes(slow) - results)
        fast_s, slow_s = (min(column) for column in zip(*times, strict=True))
        yield CpuCost(name, fast_s * 1e3, slow_s * 1e3, slow_s / fast_s, memory)


def peak_bytes(run: Run) -> int:
    """Most memory that torch's CPU allocator held at once during `run`, beyond the start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = run()
    del kept
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of the same size."""
    source = torch.empty(2 * GPU_ELEMENTS, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_seconds(lambda: target.copy_(source))


def bandwidths(
    copied: float, settings: tuple[KernelSetting, ...] = ("cuda", "triton")
) -> Iterator[Bandwidth]:
    """Every kernel that runs here, at every width; `copied` is `copy_bandwidth()`."""
    for setting in settings:
        try:
            backend = select(setting, "cuda", torch.bfloat16)
        except UserError:
            continue
        for width in GPU_WIDTHS:
            inputs = Inputs.random(GPU_ELEMENTS // width, width, torch.bfloat16, "cuda")
            one = inputs.u.nbytes  # bytes of an activation
            for kernel, run, moved in _gpu_kernels(inputs, backend, one):
                seconds = gpu_seconds(run)
                share = moved / seconds / copied
                yield Bandwidth(kernel, backend.name, width, seconds * 1e6, share)
            del inputs


def operators(backend: Backend) -> Any:
    """The operators themselves, without the front's checks."""
    return torch.ops.megalatent if backend.name == "cuda" else torch.ops.megalatent_triton


def _gpu_kernels(inputs: Inputs, backend: Backend, one: int) -> list[tuple[str, Run, int]]:
    """Name, call and bytes that must move: each input and each output once."""
    ops = operators(backend)
    u, g, e, weight = (leaf.detach() for leaf in (inputs.u, inputs.g, inputs.e, inputs.weight))
    dx, mask, source, position = inputs.dx, inputs.mask, inputs.source, inputs.position
    none = u.new_empty((0, *u.shape[1:]))
    _, rstd = ops.gated(u, g, e, mask, weight, EPS)
    _, rstd_sum = ops.concat(u, g, e, mask, weight, EPS)
    shift = (u, none, source, position, position, 2, 1)
    return [
        ("gated forward", lambda: ops.gated(u, g, e, mask, weight, EPS), 3 * one),
        (
            "gated backward",
            lambda: ops.gated_backward(dx, u, g, mask, weight, rstd, False),
            5 * one,
        ),
        ("concat forward", lambda: ops.concat(u, g, e, mask, weight, EPS), 3 * one),
        (
            "concat backward",
            lambda: ops.concat_backward(dx, u, g, mask, weight, rstd_sum, False),
            4 * one,
        ),
        ("additive forward", lambda: ops.additive(u, e, mask), 3 * one),
        ("additive backward", lambda: ops.additive_backward(dx, mask), 2 * one),
        ("shift and jitter", lambda: ops.shift_jitter(*shift, 0.02), 2 * one),
        ("shift backward", lambda: ops.shift_jitter_backward(dx, source, 0), 2 * one),
    ]


def _seconds(run: Run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def gpu_seconds(run: Run, rounds: int = 20) -> float:
    """Median time of one call on the device, in seconds, after warming up."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


if __name__ == "__main__":
    sys.exit(main())
