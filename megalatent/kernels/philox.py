"""Philox4x32-10 on tensors, and the jitter noise that every layout and every kernel sees alike.

The words are carried in int64 tensors, because torch has no unsigned 32-bit arithmetic. This is the
reference that the C++, CUDA and Triton kernels equal bit for bit; see `docs/kernels.md` for the
definition of key, counter and noise.
"""

from __future__ import annotations

import torch

from megalatent.kernels.philox_scalar import (
    MASK32,
    MULTIPLIER_0,
    MULTIPLIER_1,
    ROUNDS,
    WEYL_0,
    WEYL_1,
    jitter_key,
)

__all__ = ["check_pass", "philox4x32", "uniform_noise"]

# Counters worked on at once: three int64 temporaries of this length stay in a core's L2 cache.
_BLOCK = 1 << 14


def check_pass(k: int) -> None:
    """Raise `ValueError` if pass `k` does not fit the 16 bits it has in the counter."""
    if not 0 <= k < 1 << 16:
        raise ValueError(f"pass k = {k} does not fit the noise counter; it must be in [0, 65536)")


def philox4x32(
    key0: int | torch.Tensor,
    key1: int | torch.Tensor,
    c0: torch.Tensor,
    c1: torch.Tensor,
    c2: torch.Tensor,
    c3: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words per counter, as int64 tensors holding values in [0, 2^32).

    Counters (and keys, where they are tensors) are int64 and broadcast against one another; values
    outside [0, 2^32) are taken modulo 2^32. Each result has the broadcast shape.
    """
    key0, key1 = key0 & MASK32, key1 & MASK32
    c0, c1, c2, c3 = c0 & MASK32, c1 & MASK32, c2 & MASK32, c3 & MASK32
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(c0, MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, MULTIPLIER_1)
        # Not in place: in the first rounds operands are narrower than their broadcast shape, and
        # stay so as long as they can.
        c0 = high_1 ^ (c1 ^ key0)
        c1 = low_1
        c2 = high_0 ^ (c3 ^ key1)
        c3 = low_0
        key0 = (key0 + WEYL_0) & MASK32
        key1 = (key1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def uniform_noise(
    seed: int,
    sample: torch.Tensor,
    k: int,
    position: torch.Tensor,
    channels: int,
    sigma: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Noise uniform on [-sigma, sigma), a pure function of its arguments (FBT section 3, jitter).

    Args:
        seed: seed of the run, modulo 2^64.
        sample: int64, consumed-sample index of each row; broadcasts against `position`.
        k: pass, 0 <= k < 65536.
        position: int64, global position in its sequence of each row.
        channels: hidden size D; channel c of a row is element c of the last axis.
        sigma: half width of the interval.
        dtype: type the float32 noise is converted to. Add the float32 noise to a state in float32
            and round once, rather than asking for a narrower type here.

    Returns:
        `[*broadcast(sample, position), channels]`. Element: a signed 24-bit integer from the word
        `channel % 4` of the counter, times `float32(sigma * 2^-23)`, in one float32 product.

    Raises:
        ValueError: `k` is out of range.
    """
    check_pass(k)
    sample, position = torch.broadcast_tensors(sample, position)
    shape = sample.shape
    flat_sample, flat_position = sample.reshape(-1, 1), position.reshape(-1, 1)
    rows, quads = flat_sample.shape[0], -(-channels // 4)
    noise = torch.empty((rows, quads, 4), dtype=dtype, device=sample.device)
    scale = sigma * 2.0**-23
    key0, key1 = jitter_key(seed)
    c1 = torch.arange(quads, dtype=torch.int64, device=sample.device)
    step = max(1, _BLOCK // max(quads, 1))
    for start in range(0, rows, step):
        rows_here = slice(start, start + step)
        block_sample = flat_sample[rows_here]
        c3 = ((block_sample >> 32) & 0xFFFF) | (k << 16)
        words = philox4x32(key0, key1, flat_position[rows_here], c1, block_sample, c3)
        for lane, word in enumerate(words):
            signed = (word >> 8).sub_(1 << 23)
            # The integer has at most 24 bits: exact in float32, so the product rounds once.
            noise[rows_here, :, lane] = signed.to(torch.float32).mul_(scale)
    return noise.view(rows, 4 * quads)[:, :channels].reshape(*shape, channels)


def _multiply(x: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of `multiplier * x`, for 0 <= x < 2^32 and 2^31 <= multiplier < 2^32."""
    # The multiplier less 2^32 keeps the product within int64; adding x to the high half mends it.
    product = x * (multiplier - (1 << 32))
    low = product & MASK32
    high = (product >> 32).add_(x).bitwise_and_(MASK32)
    return high, low
