"""The normed fusions in Triton: one program per row forward, programs that walk over rows backward.

The mathematics is that of `kernels/src/cuda`; see `kernels/src/contract.h` for the contract.
"""

# Triton functions have no Python types: their arguments are tiles and pointers of the device.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megalatent.kernels.backend import accumulation_dtype

__all__ = ["norm_backward", "norm_forward"]

# Programs of the backward per multiprocessor; each sums the norm weight's gradient over its rows.
_PROGRAMS_PER_PROCESSOR = 2


@triton.jit
def _sigmoid(g):
    """sigmoid(g) and its slope, neither by a difference that cancels."""
    e = tl.exp(-tl.abs(g))
    d = 1.0 / (1.0 + e)
    return tl.where(g < 0, e * d, d), e * d * d


@triton.jit
def _forward_kernel(
    a_ptr, b_ptr, e_ptr, mask_ptr, weight_ptr, x_ptr, rstd_ptr, width, eps,
    GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    if tl.load(mask_ptr + row) != 0:
        a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            gate, _ = _sigmoid(b)
            y = a * gate
        else:
            y = a + b
        rstd = 1.0 / tl.sqrt(tl.sum(y * y, axis=0) / width + eps)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = y * rstd * weight
        tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=inside)
        tl.store(rstd_ptr + row, rstd)
    else:
        e = tl.load(e_ptr + at, mask=inside, other=0.0)
        tl.store(x_ptr + at, e, mask=inside)
        tl.store(rstd_ptr + row, 0.0)


@triton.jit
def _backward_kernel(
    dx_ptr, a_ptr, b_ptr, mask_ptr, weight_ptr, rstd_ptr,
    da_ptr, db_ptr, de_ptr, partial_ptr, rows, width,
    GATE: tl.constexpr, NEED_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    zeros = tl.zeros([BLOCK], dtype=tl.float32).to(da_ptr.dtype.element_ty)
    row = program
    while row < rows:
        at = row * width + columns
        gradient = tl.load(dx_ptr + at, mask=inside, other=0.0)
        if tl.load(mask_ptr + row) != 0:
            dx = gradient.to(tl.float32)
            a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + row)
            if GATE:
                gate, slope = _sigmoid(b)
                y = a * gate
            else:
                y = a + b
            along = tl.sum(dx * weight * y, axis=0) / width * rstd * rstd
            dy = rstd * (dx * weight - y * along)
            dweight += dx * (y * rstd)
            if GATE:
                da = dy * gate
                db = dy * (a * slope)
                tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=inside)
                tl.store(db_ptr + at, db.to(db_ptr.dtype.element_ty), mask=inside)
            else:
                tl.store(da_ptr + at, dy.to(da_ptr.dtype.element_ty), mask=inside)
            if NEED_E:
                tl.store(de_ptr + at, zeros, mask=inside)
        else:
            tl.store(da_ptr + at, zeros, mask=inside)
            if GATE:
                tl.store(db_ptr + at, zeros, mask=inside)
            if NEED_E:
                tl.store(de_ptr + at, gradient, mask=inside)
        row += tl.num_programs(0)
    tl.store(partial_ptr + program * width + columns, dweight, mask=inside)


def norm_forward(
    gate: bool,
    a: torch.Tensor,
    b: torch.Tensor,
    e: torch.Tensor,
    fused_mask: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(x, rstd)` of the gated (`gate`) or the concat fusion; inputs are dense."""
    width = a.shape[-1]
    x = torch.empty_like(a)
    rstd = torch.empty(fused_mask.shape, dtype=accumulation_dtype(a.dtype), device=a.device)
    if fused_mask.numel():
        _forward_kernel[(fused_mask.numel(),)](
            a, b, e, _bytes(fused_mask), norm_weight, x, rstd, width, eps,
            GATE=gate, **_tile(width),
        )  # fmt: skip
    return x, rstd


def norm_backward(
    gate: bool,
    dx: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    fused_mask: torch.Tensor,
    norm_weight: torch.Tensor,
    rstd: torch.Tensor,
    need_e: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(da, db, de, dnorm_weight)`; for the concat fusion `db` is `da` itself."""
    rows, width = fused_mask.numel(), a.shape[-1]
    da = torch.empty_like(a)
    db = torch.empty_like(a) if gate else da
    de = torch.empty_like(a) if need_e else a.new_empty(0)
    # Two stages, each in a fixed order: the sums repeat bit for bit on one kind of card.
    partials = torch.empty((_programs(rows, a.device), width), dtype=rstd.dtype, device=a.device)
    if rows:
        _backward_kernel[(partials.shape[0],)](
            dx, a, b, _bytes(fused_mask), norm_weight, rstd, da, db, de, partials, rows, width,
            GATE=gate, NEED_E=need_e, **_tile(width),
        )  # fmt: skip
    else:
        partials.zero_()
    return da, db, de, partials.sum(dim=0).to(norm_weight.dtype)


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    return mask.view(torch.uint8)


def _programs(rows: int, device: torch.device) -> int:
    if device.type != "cuda":
        return max(1, min(rows, 3))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(rows, _PROGRAMS_PER_PROCESSOR * processors))


def _tile(width: int) -> dict[str, int]:
    """A row is one tile, with eight elements a thread or as near as the warp count allows."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}
