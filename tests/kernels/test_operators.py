"""The compiled operators as torch sees them: schemas, fake kernels, tracing, memory, processors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from megalatent.kernels.ops import SCHEMAS
from tests.kernels.cases import EPS, REFERENCE, make_case
from tests.kernels.conftest import ROOT


def operator_arguments(name: str, dtype: torch.dtype) -> tuple[object, ...]:
    a, b, e = (torch.randn(3, 2, 8, dtype=dtype).requires_grad_() for _ in range(3))
    weight = torch.rand(8, dtype=dtype).requires_grad_()
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    rows = torch.zeros(3, 2, dtype=torch.int64)
    boundary = torch.randn(1, 2, 8, dtype=dtype).requires_grad_()
    dx, rstd = a.detach(), torch.rand(3, 2, dtype=torch.float32)
    plain = (a.detach(), b.detach(), mask, weight.detach(), rstd)
    return {
        "gated": (a, b, e, mask, weight, EPS),
        "gated_backward": (dx, *plain, True),
        "concat": (a, b, e, mask, weight, EPS),
        "concat_backward": (dx, *plain, False),
        "additive": (a, e, mask),
        "additive_backward": (dx, mask),
        "shift_jitter": (a, boundary, torch.tensor([3, 0, -1]), rows, rows, 2, 7, 0.1),
        "shift_jitter_backward": (dx, torch.tensor([3, 0, -1]), 1),
    }[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name, dtype, compiled):
    """Schema, autograd registration, fake kernel and tracing, by torch's own checks."""
    operator = getattr(torch.ops.megalatent, name).default
    results = torch.library.opcheck(operator, operator_arguments(name, dtype))
    assert set(results.values()) == {"SUCCESS"}


def test_schemas_are_those_of_the_extension(compiled):
    for name, schema in SCHEMAS.items():
        registered = str(getattr(torch.ops.megalatent, name).default._schema)
        assert registered == f"megalatent::{name}{schema}"


def test_arguments_are_checked(compiled):
    """The operators can be called without the front, and then refuse what does not fit."""
    u, mask = torch.randn(3, 2, 8), torch.ones(3, 2, dtype=torch.bool)
    gated = torch.ops.megalatent.gated
    with pytest.raises(RuntimeError, match="second input must be contiguous"):
        gated(u, torch.randn(3, 8, 2).transpose(1, 2), u, mask, torch.ones(8), EPS)
    with pytest.raises(RuntimeError, match="e must have the shape"):
        gated(u, u, u[:2].contiguous(), mask, torch.ones(8), EPS)
    with pytest.raises(RuntimeError, match="one bool per row"):
        gated(u, u, u, mask[:2].contiguous(), torch.ones(8), EPS)
    with pytest.raises(RuntimeError, match="norm_weight must have the activations' dtype"):
        gated(u, u, u, mask, torch.ones(8).double(), EPS)
    with pytest.raises(RuntimeError, match="float32, bfloat16, float16 or float64"):
        gated(u.int(), u.int(), u.int(), mask, torch.ones(8).int(), EPS)


def test_strided_inputs(seeded, backend):
    """The front makes inputs dense; gradients come back in the inputs' shapes."""
    case = make_case("gated", torch.ones((4, 3), dtype=torch.bool), 16, torch.float32)
    u, g, e, weight = case.differentiable
    turned = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (u, g, e)]
    assert not turned[0].is_contiguous()
    want = backend.gated(u, g, e, case.mask, weight, EPS)
    assert torch.equal(backend.gated(*turned, case.mask, weight, EPS), want)


_COMPILE = """
import torch
from megalatent.kernels import select
backend = select("cuda", "cpu", torch.float32)

def step(u, g, e, mask, w, source, position):
    h = backend.shift_jitter(u, None, source, position, position, 2, 1, 0.1)
    return backend.gated(h * 2, g, e, mask, w, 1e-5) + backend.additive(u, e, mask)

torch.manual_seed(0)
leaves = [torch.randn(6, 2, 16, requires_grad=True) for _ in range(3)]
leaves.append(torch.rand(16, requires_grad=True))
rest = (torch.arange(6) - 1, torch.zeros(6, 2, dtype=torch.int64))
mask = torch.rand(6, 2) > 0.5
results = []
for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
    out = run(*leaves[:3], mask, leaves[3], *rest)
    results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
assert all(torch.equal(one, other) for one, other in zip(*results)), "compiled differs"
print("traced")
"""


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_OTHER_SHAPES = """
from torch._dynamo.testing import CompileCounterWithBackend

def step(h, boundary, g, e, mask, w, source, position, k):
    h = backend.shift_jitter(h, boundary, source, position, position, k, 1, 0.1)
    return backend.gated(h, g, e, mask, w, 1e-5)

counter = CompileCounterWithBackend("aot_eager")
compiled = torch.compile(step, fullgraph=True, backend=counter)
for s in range(4, 9):
    leaves = [torch.randn(n, 2, 16, requires_grad=True) for n in (s, s // 2, s, s)]
    rest = (torch.rand(s, 2) > 0.5, torch.rand(16), torch.arange(s) - 1)
    results = []
    for run in (step, compiled):
        out = run(*leaves, *rest, torch.zeros(s, 2, dtype=torch.int64), s)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*results)), "compiled differs"
print("graphs:", counter.frame_count)
"""


def test_torch_compile(compiled):
    """One graph, no break, forward and backward, the same results.

    Five lengths, numbers of boundary rows and passes do not need a graph each.
    """
    said = run_python(_COMPILE + _OTHER_SHAPES, TORCHDYNAMO_DISABLE="0").split()
    assert said[:-1] == ["traced", "graphs:"]
    assert int(said[-1]) <= 3


_ISA = """
import ctypes, torch
from megalatent.kernels import extension
from tests.kernels.cases import *
from tests.kernels.test_shift import random_shift
import random
from megalatent.kernels.ops import OpBackend
assert extension.cpu_library().loaded
library = ctypes.CDLL(str(extension._FOLDER / "_kernels_cpu.so"))
library.megalatent_cpu_instruction_set.restype = ctypes.c_char_p
print(library.megalatent_cpu_instruction_set().decode())
backend = OpBackend("cuda", "", "megalatent")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    case = make_case("gated", torch.rand(20, 2) > 0.3, 100, dtype)
    for i, (got, want) in enumerate(zip(case.run(backend), case.run(REFERENCE, wide=True))):
        assert_close(got, want, str(i), 1.0 if i else 0.0)
    shift = random_shift(random.Random(1), 9, 2, 2, 77, dtype)
    assert torch.equal(shift.run(backend), shift.run(REFERENCE))
"""


def test_baseline_instructions(compiled):
    """The kernels for processors without AVX2 are compiled too, and are right."""
    assert run_python(_ISA, MEGALATENT_CPU_ISA="baseline").strip() == "baseline"


def test_unknown_instruction_set_is_refused(compiled):
    code = (
        "import torch; from megalatent.kernels import select; x = torch.zeros(1, 1, 4);"
        "select('cuda', 'cpu', x.dtype).additive(x, x, torch.ones(1, 1, dtype=torch.bool))"
    )
    with pytest.raises(AssertionError, match="MEGALATENT_CPU_ISA names an instruction set"):
        run_python(code, MEGALATENT_CPU_ISA="sparc")


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory that torch's CPU allocator held at once during `run`, beyond the start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = run()
    del kept
    results = profile.profiler.kineto_results
    held = peak = 0
    for event in results.events():
        if re.fullmatch(r"\[memory\]", event.name()):
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_of_the_compiled_op(compiled):
    """Beyond the results (output and gradients), at most half of what the reference takes."""
    case = make_case("gated", torch.rand(512, 1) > 0.1, 1536, torch.float32)
    results = sum(tensor.nbytes for tensor in [case.gradient, *case.differentiable])
    leaves = [tensor.requires_grad_() for tensor in case.differentiable]

    def step(backend):
        *activations, weight = leaves
        x = backend.gated(*activations, case.mask, weight, EPS)
        return x, torch.autograd.grad(x, leaves, case.gradient)

    peaks = {name: peak_bytes(lambda b=b: step(b)) for name, b in
             (("compiled", compiled), ("reference", REFERENCE))}  # fmt: skip
    assert peaks["compiled"] >= results  # the measurement sees the results themselves
    assert peaks["compiled"] - results <= (peaks["reference"] - results) / 2, peaks
