"""The shift and its jitter: rows, noise bit for bit, slices of every layout, gradients."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from megalatent.kernels.backend import Backend
from megalatent.kernels.philox_scalar import (
    jitter_counter,
    jitter_key,
    philox4x32_scalar,
)
from tests.kernels.cases import REFERENCE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Shift:
    """Arguments of `Backend.shift_jitter`."""

    h: torch.Tensor
    boundary: torch.Tensor
    source: torch.Tensor
    position: torch.Tensor
    sample: torch.Tensor
    k: int
    seed: int
    sigma: float

    def run(self, backend: Backend, **changes: object) -> torch.Tensor:
        return backend.shift_jitter(**(self.__dict__ | changes))


def random_shift(
    seeded: random.Random, s: int, batch: int, n: int, width: int, dtype: torch.dtype
) -> Shift:
    """Any rows in any order, each at most once, some positions without a predecessor."""
    rows = torch.randperm(s + n)[:s]
    rows[torch.rand(s) < 0.2] = -1
    return Shift(
        h=torch.randn(s, batch, width).to(dtype),
        boundary=torch.randn(n, batch, width).to(dtype),
        source=rows,
        position=torch.randint(0, 2**33, (s, batch)),
        sample=torch.randint(0, 2**47, (s, batch)),
        k=seeded.randrange(1, 2**16),
        seed=seeded.getrandbits(64),
        sigma=seeded.choice([0.02, 0.3, 1.0]),
    )


def by_hand(shift: Shift) -> np.ndarray:
    """The definition, one element after another, in numpy's float32; for float32 states."""
    out = np.zeros(tuple(shift.h.shape), dtype=np.float32)
    scale = np.float32(shift.sigma * 2.0**-23)
    rows = torch.cat([shift.h, shift.boundary]).numpy()
    for i, j, c in np.ndindex(*out.shape):
        source = int(shift.source[i])
        if source < 0:
            continue
        sample, position = int(shift.sample[i, j]), int(shift.position[i, j])
        counter = jitter_counter(sample, shift.k, position, c)
        word = philox4x32_scalar(*jitter_key(shift.seed), *counter)[c % 4]
        out[i, j, c] = rows[source, j, c] + np.float32((word >> 8) - 2**23) * scale
    return out


@pytest.fixture(params=["reference", "compiled", "emulated", "triton"])
def any_backend(request: pytest.FixtureRequest) -> Backend:
    return REFERENCE if request.param == "reference" else request.getfixturevalue(request.param)


@pytest.mark.parametrize("width", [16, 7])
def test_definition(width, seeded, any_backend):
    """Bit for bit what Philox and one product in float32 give, in every implementation."""
    shift = random_shift(seeded, 4, 2, 2, width, torch.float32)
    assert np.array_equal(shift.run(any_backend).numpy(), by_hand(shift))


@pytest.mark.parametrize("dtype", DTYPES)
def test_implementations_agree_bit_for_bit(dtype, seeded, backend):
    for width in (64, 200, 2 * seeded.randrange(50) + 1):
        shift = random_shift(seeded, 5, 2, 1, width, dtype)
        want = shift.run(REFERENCE)
        if backend.name == "triton" and dtype == torch.bfloat16:
            # Triton's interpreter cuts bfloat16 off where a GPU rounds.
            wide = shift.run(REFERENCE, h=shift.h.float(), boundary=shift.boundary.float())
            want = (wide.view(torch.int32) & -65536).view(torch.float32).bfloat16()
        assert torch.equal(shift.run(backend), want)


def test_compiled_agrees_on_large_states(seeded, compiled):
    """Large enough that several threads and many noise blocks take part; float64 too."""
    for dtype in (*DTYPES, torch.float64):
        shift = random_shift(seeded, 150, 2, 3, 1037, dtype)
        assert torch.equal(shift.run(compiled), shift.run(REFERENCE))


def test_without_noise_rows_are_copied(seeded, any_backend):
    shift = random_shift(seeded, 6, 2, 3, 40, torch.float16)
    got = shift.run(any_backend, sigma=0.0)
    table = torch.cat([shift.h, shift.boundary, torch.zeros_like(shift.h[:1])])
    assert torch.equal(got, table[shift.source])


def test_noise_keeps_within_sigma(seeded, any_backend):
    shift = random_shift(seeded, 8, 1, 0, 64, torch.float32)
    shift.source[0] = 0  # one has a predecessor, whatever was drawn
    shift.h.zero_()
    out = shift.run(any_backend)
    assert out.abs().max() <= shift.sigma
    assert (out[shift.source < 0] == 0).all()
    assert (out[shift.source >= 0] != 0).any()


def test_gradients_go_back_to_their_rows(seeded, any_backend):
    """The Jacobian is a selection of rows: unread rows get zeros, noise has no part in it."""
    shift = random_shift(seeded, 7, 2, 4, 24, torch.float32)
    h, boundary = shift.h.requires_grad_(), shift.boundary.requires_grad_()
    gradient = torch.randn(7, 2, 24)
    dh, dboundary = torch.autograd.grad(shift.run(any_backend), (h, boundary), gradient)
    want = torch.zeros(7 + 4, 2, 24)
    for i, source in enumerate(shift.source.tolist()):
        if source >= 0:
            want[source] = gradient[i]
    assert torch.equal(torch.cat([dh, dboundary]), want)


def test_odd_widths_go_back_too(seeded, backend):
    shift = random_shift(seeded, 5, 1, 2, 9, torch.float16)
    leaves = (shift.h.requires_grad_(), shift.boundary.requires_grad_())
    gradient = torch.randn(5, 1, 9).half()
    got = torch.autograd.grad(shift.run(backend), leaves, gradient)
    want = torch.autograd.grad(shift.run(REFERENCE), leaves, gradient)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_no_boundary_and_no_rows(seeded, any_backend):
    shift = random_shift(seeded, 4, 2, 0, 16, torch.float32)
    assert torch.equal(shift.run(any_backend, boundary=None), shift.run(any_backend))
    empty = random_shift(seeded, 0, 2, 0, 16, torch.float32)
    assert empty.run(any_backend).shape == (0, 2, 16)


@pytest.mark.parametrize("layout", ["sequence", "context"])
def test_slices_equal_the_whole(layout, seeded, any_backend):
    """Sequence slices (TP, SP) and the load-balanced chunk pairs of CP see the same noise.

    Each slice gets the row before each of its chunks as a boundary row.
    """
    length, ranks, batch, width = 16, 2, 2, 32
    sample = torch.randint(0, 2**40, (1, batch)).expand(length, batch).contiguous()
    position = (torch.arange(length) - 1).view(-1, 1).expand(length, batch).contiguous()
    h = torch.randn(length, batch, width)
    common = {"k": 3, "seed": 5, "sigma": 0.1}
    whole = any_backend.shift_jitter(h, None, torch.arange(length) - 1, position, sample, **common)
    chunk = length // (2 * ranks)
    for rank in range(ranks):
        if layout == "sequence":
            chunks = [range(rank * 2 * chunk, (rank + 1) * 2 * chunk)]
        else:
            mirror = 2 * ranks - 1 - rank
            chunks = [range(c * chunk, (c + 1) * chunk) for c in (rank, mirror)]
        rows = [row for part in chunks for row in part]
        before = [part[0] - 1 for part in chunks if part[0] > 0]
        source = []
        for part in chunks:
            first = len(source)
            has_boundary = part[0] > 0
            source.append(len(rows) + before.index(part[0] - 1) if has_boundary else -1)
            source.extend(range(first, first + len(part) - 1))
        got = any_backend.shift_jitter(
            h[rows], h[before], torch.tensor(source), position[rows], sample[rows], **common
        )
        assert torch.equal(got, whole[rows])


def test_wrong_sources_are_refused(seeded, compiled):
    shift = random_shift(seeded, 4, 1, 0, 8, torch.float32)
    with pytest.raises(RuntimeError, match="source 4 is not -1 or a row below 4"):
        shift.run(compiled, source=torch.tensor([0, 1, 2, 4]))
    out = shift.run(compiled, h=shift.h.requires_grad_(), source=torch.tensor([0, 0, 1, 2]))
    with pytest.raises(RuntimeError, match="source uses row 0 twice"):
        out.sum().backward()


@pytest.mark.parametrize("width", [64, 37])
def test_emulated_cuda_with_more_rows_than_blocks(width, seeded, emulated):
    from tests.kernels.emulated import emulated_card

    shift = random_shift(seeded, 40, 2, 3, width, torch.float32)
    leaves = (shift.h.requires_grad_(), shift.boundary.requires_grad_())
    gradient = torch.randn(40, 2, width)
    want = shift.run(REFERENCE)
    try:
        emulated_card(most_blocks=2)
        got = shift.run(emulated)
        of_rows = torch.autograd.grad(got, leaves, gradient)
    finally:
        emulated_card()
    assert torch.equal(got, want)
    for one, other in zip(of_rows, torch.autograd.grad(want, leaves, gradient), strict=True):
        assert torch.equal(one, other)
