"""Random inputs of the fusion kernels, and the comparison with a float64 result."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch

from megalatent.kernels.backend import Backend
from megalatent.kernels.reference import ReferenceBackend

EPS = 1e-5
REFERENCE = ReferenceBackend("what the others are compared with")
Fusion = Callable[..., torch.Tensor]


@dataclasses.dataclass
class Case:
    """Arguments of one fusion; `differentiable` are leaves, in the fusion's order."""

    kind: str  # "gated", "concat" or "additive"
    differentiable: list[torch.Tensor]
    mask: torch.Tensor
    gradient: torch.Tensor

    def run(self, backend: Backend, wide: bool = False) -> list[torch.Tensor]:
        """The output and the gradient of every leaf; in float64 if `wide`."""
        leaves = [_leaf(tensor, wide) for tensor in self.differentiable]
        gradient = self.gradient.double() if wide else self.gradient
        if self.kind == "additive":
            a, e = leaves
            x = backend.additive(a, e, self.mask)
        else:
            *activations, weight = leaves
            x = getattr(backend, self.kind)(*activations, self.mask, weight, EPS)
        return [x.detach(), *torch.autograd.grad(x, leaves, gradient)]


def _leaf(tensor: torch.Tensor, wide: bool) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.double() if wide else tensor.clone()).requires_grad_()


def random_mask(seeded: random.Random, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    if kind == "mixed":
        return torch.rand(shape) < seeded.uniform(0.2, 0.8)
    return torch.full(shape, kind == "fused")


def make_case(
    kind: str,
    mask: torch.Tensor,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Case:
    """Normal activations times `scale`, of shape `[*mask.shape, width]`."""
    shape = (*mask.shape, width)
    count = 2 if kind == "additive" else 3
    leaves = [(torch.randn(shape) * scale).to(dtype) for _ in range(count)]
    if kind != "additive":
        leaves.append((0.5 + torch.rand(width)).to(weight_dtype or dtype))
    return Case(kind, leaves, mask, torch.randn(shape).to(dtype))


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    name: str,
    terms: torch.Tensor | float = 0.0,
    truncates: bool = False,
) -> None:
    """`got` equals the float64 `want` as well as its dtype allows.

    One rounding to the dtype (half a unit in the last place, a whole one if `truncates`), plus a
    few float32 roundings, taken against the largest element of the row and the size of the `terms`
    whose differences it holds. Intermediate float32 values may be denormal, with an absolute
    spacing, and are multiplied by up to 1 / sqrt(EPS) and a norm weight.
    """
    assert not torch.isnan(got).any(), f"{name}: an element was not written"
    information = torch.finfo(got.dtype)
    unit = information.eps / (1 if truncates else 2)
    row = want.abs().amax(dim=-1, keepdim=True) + terms
    arithmetic = 4e-15 if got.dtype == torch.float64 else 3e-6
    denormal = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    spacing = max(information.smallest_normal * information.eps, 2e3 * denormal)
    allowed = unit * want.abs() + arithmetic * row + spacing
    error = (got.double() - want).abs()
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert worst <= 1.05, f"{name}: error {worst:.2f} times what rounding allows"


def gradient_terms(case: Case) -> torch.Tensor | float:
    """Size of what the norm's backward subtracts, per row: it may cancel, in narrow rows wholly."""
    if case.kind == "additive":
        return 0.0
    a, b, _, weight = (tensor.double() for tensor in case.differentiable)
    y = a * torch.sigmoid(b) if case.kind == "gated" else a + b
    rstd = torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + EPS)
    incoming = (case.gradient.double() * weight).abs().amax(dim=-1, keepdim=True)
    return rstd * incoming * a.abs().amax(dim=-1, keepdim=True).clamp(min=1)
