"""Fusions, forward and backward, of every implementation against float64."""

from __future__ import annotations

import math

import pytest
import torch

from megalatent.kernels.backend import Backend
from tests.kernels.cases import (
    EPS,
    REFERENCE,
    Case,
    assert_close,
    gradient_terms,
    make_case,
    random_mask,
)

KINDS = ("gated", "concat", "additive")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compare(case: Case, backend: Backend) -> None:
    # The interpreter of Triton cuts bfloat16 off where a GPU rounds.
    truncates = backend.name == "triton" and case.gradient.dtype == torch.bfloat16
    x, *got = case.run(backend)
    wide_x, *want = case.run(REFERENCE, wide=True)
    assert_close(x, wide_x, f"{backend.name} {case.kind}", truncates=truncates)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        vector = one.dim() == 1  # the norm weight's gradient: a sum over rows, no norm to subtract
        sum_of_rows = case.gradient.abs().max().item() * math.sqrt(case.mask.numel())
        terms = sum_of_rows if vector else gradient_terms(case)
        name = f"{backend.name} {case.kind} gradient {i}"
        assert_close(one, other, name, terms, truncates and not vector)


def test_reference_is_the_formula(seeded):
    """The reference itself, element by element in plain Python (FBT eq. 4, Recycler eq. 2)."""
    mask = random_mask(seeded, (3, 2), "mixed")
    gated = make_case("gated", mask, 5, torch.float64)
    x = gated.run(REFERENCE)[0]
    u, g, e, weight = gated.differentiable
    y = [[[p / (1 + math.exp(-q)) for p, q in zip(*rows, strict=True)]
          for rows in zip(us, gs, strict=True)]
         for us, gs in zip(u.tolist(), g.tolist(), strict=True)]  # fmt: skip
    for i in range(3):
        for j in range(2):
            rms = math.sqrt(sum(value**2 for value in y[i][j]) / 5 + EPS)
            for c in range(5):
                want = y[i][j][c] / rms * weight[c].item() if mask[i, j] else e[i, j, c].item()
                assert x[i, j, c].item() == pytest.approx(want, rel=1e-12)
    additive = make_case("additive", mask, 5, torch.float64)
    a, e = additive.differentiable
    assert torch.equal(additive.run(REFERENCE)[0], e + a * mask.unsqueeze(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_gradients_numerically(kind, implementation, seeded, request):
    backend = REFERENCE if implementation == "reference" else request.getfixturevalue("compiled")
    case = make_case(kind, random_mask(seeded, (3, 2), "mixed"), 7, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in case.differentiable]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        if kind == "additive":
            return backend.additive(*tensors, case.mask)
        *activations, weight = tensors
        return getattr(backend, kind)(*activations, case.mask, weight, EPS)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("mask_kind", ["plain", "fused", "mixed"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, dtype, mask_kind, seeded, compiled):
    """Random shapes: widths of the recipes, powers of two, odd ones, one."""
    widths = [1, 64, 1536, seeded.randrange(2, 400), 2 * seeded.randrange(100) + 65]
    for width in widths:
        shape = (seeded.randrange(1, 40), seeded.randrange(1, 4))
        compare(make_case(kind, random_mask(seeded, shape, mask_kind), width, dtype), compiled)


@pytest.mark.parametrize("width", [8192, 16384, 10001])
def test_compiled_wide_rows(width, seeded, compiled):
    mask = random_mask(seeded, (3, 2), "mixed")
    for dtype in (torch.float32, torch.bfloat16):
        compare(make_case("gated", mask, width, dtype), compiled)


# Per width: which kernel the CUDA launcher takes. In 2-byte types eight elements make a pack.
CUDA_WIDTHS = {
    64: "one warp a row, many rows at once",
    264: "more packs than a warp has threads",
    1536: "several warps a row, several rows at once",
    101: "one element at a time",
    8200: "wider than a block, in packs",
}


@pytest.mark.parametrize("width", CUDA_WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_emulated_cuda(kind, dtype, width, seeded, emulated):
    from tests.kernels.emulated import emulated_card

    shape = (seeded.randrange(9, 14), 2) if width < 2000 else (3, 1)
    case = make_case(kind, random_mask(seeded, shape, "mixed"), width, dtype)
    # Threads in any order: a barrier too few would show.
    emulated_card(order=seeded.randrange(10))
    compare(case, emulated)


@pytest.mark.parametrize("width", CUDA_WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_emulated_cuda_with_more_rows_than_blocks(kind, width, seeded, emulated):
    """A block takes several turns; warps that are ahead must not disturb those that are behind."""
    from tests.kernels.emulated import emulated_card

    try:
        for order in (0, 1, seeded.randrange(2, 10)):
            emulated_card(most_blocks=2, order=order)
            shape = (17, 2) if width < 2000 else (7, 1)
            compare(
                make_case(kind, random_mask(seeded, shape, "mixed"), width, torch.float32), emulated
            )
    finally:
        emulated_card()


@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_cuda_on_a_small_card(dtype, seeded, emulated):
    """With less shared memory fewer rows fit at once, and wide rows take the general kernel."""
    from tests.kernels.emulated import emulated_card

    try:
        for shared in (48 * 1024, 2 * 1024):
            emulated_card(processors=2, shared_per_block=shared)
            case = make_case("gated", random_mask(seeded, (7, 1), "mixed"), 512, dtype)
            compare(case, emulated)
    finally:
        emulated_card()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_triton(kind, dtype, seeded, triton):
    for width in (64, 2 * seeded.randrange(40) + 1):
        case = make_case(kind, random_mask(seeded, (5, 1), "mixed"), width, dtype)
        compare(case, triton)


@pytest.mark.parametrize("mask_kind", ["plain", "fused"])
def test_uniform_masks(mask_kind, seeded, backend):
    for kind in KINDS:
        mask = random_mask(seeded, (4, 2), mask_kind)
        compare(make_case(kind, mask, 40, torch.float32), backend)


def test_weight_in_float32(seeded, backend):
    mask = random_mask(seeded, (5, 1), "mixed")
    for kind in ("gated", "concat"):
        compare(make_case(kind, mask, 72, torch.float16, torch.float32), backend)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(kind, backend):
    case = make_case(kind, torch.zeros((0, 2), dtype=torch.bool), 64, torch.float32)
    x, *gradients = case.run(backend)
    assert x.shape == (0, 2, 64)
    if kind != "additive":
        assert torch.equal(gradients[-1], torch.zeros(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_values(dtype, seeded, backend):
    """Saturated gates, denormal states, large states, rows of zeros: finite and right."""
    mask = torch.ones((6, 1), dtype=torch.bool)
    case = make_case("gated", mask, 48, dtype)
    u, g, *_ = case.differentiable
    g[0] *= 200  # saturates, with both signs
    g[1] = -90 - 10 * torch.rand(48)  # exp(-|g|) is denormal in float32
    g[2] = 30  # the slope of the sigmoid is far below the spacing at 1
    u[3] *= torch.finfo(dtype).smallest_normal / 4
    u[4] *= 1e4 if dtype == torch.float16 else 1e15
    u[5] = 0
    compare(case, backend)


def test_plain_positions_take_nothing_from_the_others(seeded, backend):
    """Whatever stands in u and g at plain positions, nan too; embeddings come out bit for bit."""
    mask = random_mask(seeded, (6, 2), "mixed")
    mask[0, 0], mask[1, 0] = True, False
    for kind in KINDS:
        case = make_case(kind, mask, 24, torch.float32)
        clean = case.run(backend)
        for tensor in case.differentiable[: 1 if kind == "additive" else 2]:
            tensor[~mask] = float("nan")
        dirty = case.run(backend)
        for before, after in zip(clean, dirty, strict=True):
            assert torch.equal(before, after)
        e = case.differentiable[1 if kind == "additive" else 2]
        assert torch.equal(dirty[0][~mask], e[~mask])


def test_weight_gradient_repeats(seeded, compiled):
    """The same bits on every run, and for any number of threads."""
    mask = random_mask(seeded, (1000, 1), "mixed")
    case = make_case("gated", mask, 136, torch.float32)
    first = case.run(compiled)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        again = case.run(compiled)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_only_the_wanted_gradients(seeded, backend):
    """Embeddings that need no gradient get none, and the others do not change."""
    case = make_case("gated", random_mask(seeded, (4, 1), "mixed"), 32, torch.float32)
    _, du, dg, _, dweight = case.run(backend)
    u, g, e, weight = (tensor.detach().clone() for tensor in case.differentiable)
    wanted = [tensor.requires_grad_() for tensor in (u, g, weight)]
    x = backend.gated(u, g, e, case.mask, weight, EPS)
    gradients = torch.autograd.grad(x, wanted, case.gradient)
    for got, want in zip(gradients, (du, dg, dweight), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused(kind, seeded, backend):
    """They would silently lack what the gradients depend on."""
    case = make_case(kind, torch.ones((3, 1), dtype=torch.bool), 16, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in case.differentiable]
    norm = [leaves.pop()] if kind != "additive" else []
    rest = (*norm, EPS) if norm else ()
    x = getattr(backend, kind)(*leaves, case.mask, *rest)
    (du,) = torch.autograd.grad(x.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"differentiated once.*kernel: torch"):
        (du.square().sum() + x.sum()).backward()


def test_forward_mode_is_refused(seeded, backend):
    """torch itself would take the tangent of the result for zero."""
    case = make_case("additive", torch.ones((3, 1), dtype=torch.bool), 16, torch.float32)
    a, e = case.differentiable
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda a: backend.additive(a, e, case.mask), (a,), (a,))
    assert torch.equal(backend.additive(a, e, case.mask), e + a)


@pytest.mark.full
def test_more_than_2_to_31_elements(compiled):
    """Rows whose offset does not fit 32 bits; 13 GB of memory."""
    rows, width = 2**25 + 3, 64
    mask = torch.zeros((rows, 1), dtype=torch.bool)
    mask[-2] = True
    torch.use_deterministic_algorithms(False)  # filling with nan would take half the time
    u = torch.zeros((rows, 1, width), dtype=torch.bfloat16)
    u[-4:] = torch.randn(4, 1, width).to(torch.bfloat16)
    weight = torch.ones(width, dtype=torch.bfloat16)
    x = compiled.gated(u, u, u, mask, weight, EPS)
    tail = [tensor[-4:] for tensor in (u, u, u, mask)]
    assert torch.equal(x[-4:], compiled.gated(*tail, weight, EPS))
    assert torch.equal(x[:4], u[:4])
