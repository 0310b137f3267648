"""The operators of the fast backends: schemas, shapes and gradient formulas, stated once.

The compiled extension (`megalatent::…`) and the Triton kernels (`megalatent_triton::…`) offer the
same operators. `register_formulas` gives either namespace its fake kernels, which `torch.compile`
traces with, and its autograd formulas. A forward keeps its inputs and one reciprocal RMS per row;
the rest is computed anew in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from megalatent.kernels.backend import Backend, accumulation_dtype

__all__ = ["SCHEMAS", "OpBackend", "register_formulas"]

# `kernels/src/schemas.cpp` holds the same text for the extension; a test compares the two.
SCHEMAS = {
    "gated": "(Tensor u, Tensor g, Tensor e, Tensor fused_mask, Tensor norm_weight, float eps)"
    " -> (Tensor x, Tensor rstd)",
    "gated_backward": "(Tensor dx, Tensor u, Tensor g, Tensor fused_mask, Tensor norm_weight,"
    " Tensor rstd, bool need_e) -> (Tensor du, Tensor dg, Tensor de, Tensor dnorm_weight)",
    "concat": "(Tensor c_state, Tensor c_gate, Tensor e, Tensor fused_mask, Tensor norm_weight,"
    " float eps) -> (Tensor x, Tensor rstd)",
    "concat_backward": "(Tensor dx, Tensor c_state, Tensor c_gate, Tensor fused_mask,"
    " Tensor norm_weight, Tensor rstd, bool need_e)"
    " -> (Tensor dc, Tensor de, Tensor dnorm_weight)",
    "additive": "(Tensor a, Tensor e, Tensor fused_mask) -> Tensor",
    "additive_backward": "(Tensor dx, Tensor fused_mask) -> Tensor",
    "shift_jitter": "(Tensor h, Tensor boundary, Tensor source, Tensor position, Tensor sample,"
    " SymInt k, int seed, float sigma) -> Tensor",
    "shift_jitter_backward": "(Tensor dout, Tensor source, SymInt boundary_rows)"
    " -> (Tensor dh, Tensor dboundary)",
}


class OpBackend(Backend):
    """A backend whose work is done by the operators of one namespace."""

    def __init__(self, name: str, reason: str, namespace: str) -> None:
        super().__init__(name, reason)
        self._namespace = namespace

    @property
    def _ops(self) -> Any:
        # Looked up, not kept: torch's namespaces cannot be copied, models that hold a backend are.
        return getattr(torch.ops, self._namespace)

    def _gated(
        self,
        u: torch.Tensor,
        g: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        x, _ = self._ops.gated(*_contiguous(u, g, e, fused_mask, norm_weight), eps)
        return x

    def _concat(
        self,
        c_state: torch.Tensor,
        c_gate: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        x, _ = self._ops.concat(*_contiguous(c_state, c_gate, e, fused_mask, norm_weight), eps)
        return x

    def _additive(self, a: torch.Tensor, e: torch.Tensor, fused_mask: torch.Tensor) -> torch.Tensor:
        return self._ops.additive(*_contiguous(a, e, fused_mask))

    def _shift_jitter(
        self,
        h: torch.Tensor,
        boundary: torch.Tensor,
        source: torch.Tensor,
        position: torch.Tensor,
        sample: torch.Tensor,
        k: int,
        seed: int,
        sigma: float,
    ) -> torch.Tensor:
        tensors = _contiguous(h, boundary, source, position, sample)
        return self._ops.shift_jitter(*tensors, k, _signed_64(seed), sigma)


def register_formulas(namespace: str) -> None:
    """Attach fake kernels and autograd formulas to the operators of `namespace`."""
    ops = SimpleNamespace(
        **{name: getattr(getattr(torch.ops, namespace), name) for name in SCHEMAS}
    )
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"{namespace}::{name}", fake)
    for name, (setup, make_backward) in _GRADIENTS.items():
        torch.library.register_autograd(
            f"{namespace}::{name}", make_backward(ops), setup_context=setup
        )
    for name in SCHEMAS.keys() - _GRADIENTS.keys():
        torch.library.register_autograd(f"{namespace}::{name}", _no_second_derivative)


def _contiguous(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # torch would go on without the tangents.
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError(
            "the fast fusion kernels have no forward-mode derivatives; write "
            "latent.fusion.kernel: torch"
        )
    return tuple(tensor.contiguous() for tensor in tensors)


def _signed_64(seed: int) -> int:
    """`seed` modulo 2^64 as the int64 an operator's `int` is."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


# --- shapes and dtypes of the results -------------------------------------------------------------


def _norm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    e: torch.Tensor,
    fused_mask: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = a.new_empty(fused_mask.shape, dtype=accumulation_dtype(a.dtype))
    return a.new_empty(a.shape), rstd


def _gated_backward_fake(
    dx: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    fused_mask: torch.Tensor,
    norm_weight: torch.Tensor,
    rstd: torch.Tensor,
    need_e: bool,
) -> tuple[torch.Tensor, ...]:
    de = u.new_empty(u.shape if need_e else (0,))
    return u.new_empty(u.shape), u.new_empty(u.shape), de, norm_weight.new_empty(norm_weight.shape)


def _concat_backward_fake(
    dx: torch.Tensor,
    c_state: torch.Tensor,
    c_gate: torch.Tensor,
    fused_mask: torch.Tensor,
    norm_weight: torch.Tensor,
    rstd: torch.Tensor,
    need_e: bool,
) -> tuple[torch.Tensor, ...]:
    du, _, de, dweight = _gated_backward_fake(
        dx, c_state, c_gate, fused_mask, norm_weight, rstd, need_e
    )
    return du, de, dweight


def _additive_fake(a: torch.Tensor, e: torch.Tensor, fused_mask: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape)


def _additive_backward_fake(dx: torch.Tensor, fused_mask: torch.Tensor) -> torch.Tensor:
    return dx.new_empty(dx.shape)


def _shift_fake(
    h: torch.Tensor,
    boundary: torch.Tensor,
    source: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    k: int,
    seed: int,
    sigma: float,
) -> torch.Tensor:
    return h.new_empty(h.shape)


def _shift_backward_fake(
    dout: torch.Tensor, source: torch.Tensor, boundary_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return dout.new_empty(dout.shape), dout.new_empty((boundary_rows, *dout.shape[1:]))


_FAKES: dict[str, Callable[..., Any]] = {
    "gated": _norm_fake,
    "gated_backward": _gated_backward_fake,
    "concat": _norm_fake,
    "concat_backward": _concat_backward_fake,
    "additive": _additive_fake,
    "additive_backward": _additive_backward_fake,
    "shift_jitter": _shift_fake,
    "shift_jitter_backward": _shift_backward_fake,
}


# --- gradients ------------------------------------------------------------------------------------


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    a, b, _, fused_mask, norm_weight, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, fused_mask, norm_weight, rstd)


def _gated_gradient(ops: SimpleNamespace) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    def backward(
        ctx: Any, dx: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dx is None:
            return (None,) * 6
        need_e = ctx.needs_input_grad[2]
        du, dg, de, dweight = ops.gated_backward(dx.contiguous(), *ctx.saved_tensors, need_e)
        return du, dg, de if need_e else None, None, dweight, None

    return backward


def _concat_gradient(ops: SimpleNamespace) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    def backward(
        ctx: Any, dx: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dx is None:
            return (None,) * 6
        need_e = ctx.needs_input_grad[2]
        dc, de, dweight = ops.concat_backward(dx.contiguous(), *ctx.saved_tensors, need_e)
        # One tensor for both: the sum's gradient is the same for its two terms.
        return dc, dc, de if need_e else None, None, dweight, None

    return backward


def _additive_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[2])


def _additive_gradient(ops: SimpleNamespace) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    def backward(ctx: Any, dx: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dx is None:
            return None, None, None
        (fused_mask,) = ctx.saved_tensors
        # The embedding is a summand of every row, so its gradient is the incoming one itself.
        return ops.additive_backward(dx.contiguous(), fused_mask), dx, None

    return backward


def _shift_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, boundary, source, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.boundary_rows = boundary.shape[0]
    ctx.save_for_backward(source)


def _shift_gradient(ops: SimpleNamespace) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    def backward(ctx: Any, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None:
            return (None,) * 8
        (source,) = ctx.saved_tensors
        dh, dboundary = ops.shift_jitter_backward(dout.contiguous(), source, ctx.boundary_rows)
        return dh, dboundary, None, None, None, None, None, None

    return backward


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor | None) -> None:
    """Without it torch would go on as if the gradients were constants."""
    raise NotImplementedError(
        "the fast fusion kernels can be differentiated once; for second derivatives write "
        "latent.fusion.kernel: torch"
    )


_Gradient = tuple[Callable[..., None], Callable[[SimpleNamespace], Callable[..., Any]]]
_GRADIENTS: dict[str, _Gradient] = {
    "gated": (_norm_setup, _gated_gradient),
    "concat": (_norm_setup, _concat_gradient),
    "additive": (_additive_setup, _additive_gradient),
    "shift_jitter": (_shift_setup, _shift_gradient),
}
