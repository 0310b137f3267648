"""Masked addition, and the shift with its jitter, in Triton: one program per row."""

# Triton functions have no Python types: their arguments are tiles and pointers of the device.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megalatent.kernels.philox_scalar import (
    MULTIPLIER_0,
    MULTIPLIER_1,
    ROUNDS,
    WEYL_0,
    WEYL_1,
    jitter_key,
)

__all__ = ["masked_add", "shift_backward", "shift_forward"]

_MULTIPLIER_0 = tl.constexpr(MULTIPLIER_0)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_WEYL_0 = tl.constexpr(WEYL_0)
_WEYL_1 = tl.constexpr(WEYL_1)
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def _multiply(x, multiplier: tl.constexpr):
    """High and low 32 bits of the product."""
    product = x.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), (product & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _philox(key0, key1, c0, c1, c2, c3):
    """Philox4x32-10; everything is uint32."""
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIER_0)
        high1, low1 = _multiply(c2, _MULTIPLIER_1)
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = ((key0.to(tl.uint64) + _WEYL_0) & 0xFFFFFFFF).to(tl.uint32)
        key1 = ((key1.to(tl.uint64) + _WEYL_1) & 0xFFFFFFFF).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _signed_24(word):
    return ((word >> 8).to(tl.int32) - 8388608).to(tl.float32)


@triton.jit
def _shift_kernel(
    h_ptr, boundary_ptr, source_ptr, position_ptr, sample_ptr, out_ptr, scale_ptr,
    s, batch, width, k, key0, key1,
    NOISY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    source = tl.load(source_ptr + row // batch)
    out = out_ptr + row * width + columns
    if source < 0:
        tl.store(out, tl.zeros([BLOCK], dtype=tl.float32).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        column = row % batch
        if source < s:
            state = tl.load(h_ptr + (source * batch + column) * width + columns, mask=inside)
        else:
            other = ((source - s) * batch + column) * width
            state = tl.load(boundary_ptr + other + columns, mask=inside)
        if NOISY:
            position = tl.load(position_ptr + row)
            sample = tl.load(sample_ptr + row)
            quads = tl.arange(0, BLOCK // 4)
            zeros = tl.zeros([BLOCK // 4], dtype=tl.int64)
            c0 = (zeros + (position & 0xFFFFFFFF)).to(tl.uint32)
            c2 = (zeros + (sample & 0xFFFFFFFF)).to(tl.uint32)
            c3 = (zeros + ((k << 16) | ((sample >> 32) & 0xFFFF))).to(tl.uint32)
            low = (zeros + key0).to(tl.uint32)
            high = (zeros + key1).to(tl.uint32)
            w0, w1, w2, w3 = _philox(low, high, c0, quads.to(tl.uint32), c2, c3)
            words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
            # Launched without fusing products and sums: each rounds by itself.
            noise = _signed_24(words) * tl.load(scale_ptr)
            state = (state.to(tl.float32) + noise).to(out_ptr.dtype.element_ty)
        tl.store(out, state, mask=inside)


@triton.jit
def _copy_rows_kernel(
    from_ptr, reader_ptr, to_ptr, first, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    reader = tl.load(reader_ptr + first + row)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(from_ptr + reader * width + columns, mask=inside & (reader >= 0), other=0.0)
    tl.store(to_ptr + row * width + columns, values, mask=inside)


@triton.jit
def _masked_add_kernel(
    a_ptr, e_ptr, mask_ptr, x_ptr, width, HAS_E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    fused = tl.load(mask_ptr + row) != 0
    a = tl.load(a_ptr + at, mask=inside & fused, other=0.0)
    if HAS_E:
        e = tl.load(e_ptr + at, mask=inside, other=0.0)
        x = tl.where(fused, (e.to(tl.float32) + a.to(tl.float32)).to(x_ptr.dtype.element_ty), e)
        tl.store(x_ptr + at, x, mask=inside)
    else:
        tl.store(x_ptr + at, a, mask=inside)


def masked_add(a: torch.Tensor, e: torch.Tensor | None, fused_mask: torch.Tensor) -> torch.Tensor:
    """`e + a` or `e`; without e, `a` or zeros (the gradient of a)."""
    x = torch.empty_like(a)
    if fused_mask.numel():
        grid, block = _row_grid(fused_mask.numel(), a.shape[-1])
        _masked_add_kernel[grid](
            a, a if e is None else e, fused_mask.view(torch.uint8), x, a.shape[-1],
            HAS_E=e is not None, BLOCK=block,
        )  # fmt: skip
    return x


def shift_forward(
    h: torch.Tensor,
    boundary: torch.Tensor,
    source: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    k: int,
    seed: int,
    sigma: float,
) -> torch.Tensor:
    """The shifted, jittered states; see `Backend.shift_jitter`."""
    s, batch, width = h.shape
    out = torch.empty_like(h)
    if s * batch == 0:
        return out
    key0, key1 = jitter_key(seed)
    # In memory, not as an argument: Triton would hand a float over in float64.
    scale = torch.full((1,), sigma * 2.0**-23, dtype=torch.float32, device=h.device)
    block = max(triton.next_power_of_2(width), 4)
    _shift_kernel[(s * batch,)](
        h, boundary, source, position, sample, out, scale, s, batch, width, k, key0, key1,
        NOISY=sigma > 0, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def shift_backward(
    dout: torch.Tensor, source: torch.Tensor, boundary_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(dh, dboundary)`: each row is the gradient of the row that read it, or zeros."""
    s, batch, width = dout.shape
    dh = torch.empty_like(dout)
    dboundary = dout.new_empty((boundary_rows, batch, width))
    # Rows without a predecessor write to one spare place at the end.
    reader = source.new_full((s + boundary_rows + 1,), -1)
    places = torch.where(source < 0, s + boundary_rows, source)
    reader.index_copy_(0, places, torch.arange(s, device=source.device))
    for to, first in ((dh, 0), (dboundary, s)):
        if to.numel():
            grid, block = _row_grid(to.shape[0], batch * width)
            _copy_rows_kernel[grid](dout, reader, to, first, batch * width, BLOCK=block)
    return dh, dboundary


def _row_grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(triton.next_power_of_2(width), 2048)
    return (rows, triton.cdiv(width, block)), block
