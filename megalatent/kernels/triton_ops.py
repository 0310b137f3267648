"""The Triton kernels as operators `megalatent_triton::…`, with the schemas of the extension's."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megalatent.kernels import triton_norm, triton_rows
from megalatent.kernels.ops import SCHEMAS, register_formulas

__all__ = ["NAMESPACE", "register"]

NAMESPACE = "megalatent_triton"


@functools.cache
def register() -> None:
    """Define the operators, once per process; on CPUs they need `TRITON_INTERPRET=1`."""
    for name, schema in SCHEMAS.items():
        torch.library.define(f"{NAMESPACE}::{name}", schema)
        torch.library.impl(f"{NAMESPACE}::{name}", ("cpu", "cuda"), _IMPLEMENTATIONS[name])
    register_formulas(NAMESPACE)


def _concat_backward(
    dx: torch.Tensor,
    c_state: torch.Tensor,
    c_gate: torch.Tensor,
    fused_mask: torch.Tensor,
    norm_weight: torch.Tensor,
    rstd: torch.Tensor,
    need_e: bool,
) -> tuple[torch.Tensor, ...]:
    dc, _, de, dweight = triton_norm.norm_backward(
        False, dx, c_state, c_gate, fused_mask, norm_weight, rstd, need_e
    )
    return dc, de, dweight


def _additive_backward(dx: torch.Tensor, fused_mask: torch.Tensor) -> torch.Tensor:
    return triton_rows.masked_add(dx, None, fused_mask)


_IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "gated": functools.partial(triton_norm.norm_forward, True),
    "gated_backward": functools.partial(triton_norm.norm_backward, True),
    "concat": functools.partial(triton_norm.norm_forward, False),
    "concat_backward": _concat_backward,
    "additive": triton_rows.masked_add,
    "additive_backward": _additive_backward,
    "shift_jitter": triton_rows.shift_forward,
    "shift_jitter_backward": triton_rows.shift_backward,
}
