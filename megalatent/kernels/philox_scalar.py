"""Philox4x32-10 on plain integers, for draws made before (or without) torch.

Philox4x32-10 is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), with the constants of their Random123 library. The same key and counter give the
same four words here, in `megalatent.kernels.philox`, in C++, in CUDA and in Triton. This module
imports nothing, so the planner and the samplers can use it without loading torch.
"""

from __future__ import annotations

__all__ = [
    "JITTER_DOMAIN",
    "MASK32",
    "MULTIPLIER_0",
    "MULTIPLIER_1",
    "ROUNDS",
    "WEYL_0",
    "WEYL_1",
    "jitter_counter",
    "jitter_key",
    "philox4x32_scalar",
]

MASK32 = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10

# Mixed into the key so that jitter and other draws of one seed are independent streams ("jitt").
JITTER_DOMAIN = 0x6A697474


def philox4x32_scalar(
    key0: int, key1: int, c0: int, c1: int, c2: int, c3: int
) -> tuple[int, int, int, int]:
    """The four 32-bit words of one counter; every argument is taken modulo 2^32."""
    key0, key1 = key0 & MASK32, key1 & MASK32
    c0, c1, c2, c3 = c0 & MASK32, c1 & MASK32, c2 & MASK32, c3 & MASK32
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * c0
        product_1 = MULTIPLIER_1 * c2
        c0 = (product_1 >> 32) ^ c1 ^ key0
        c1 = product_1 & MASK32
        c2 = (product_0 >> 32) ^ c3 ^ key1
        c3 = product_0 & MASK32
        key0 = (key0 + WEYL_0) & MASK32
        key1 = (key1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def jitter_key(seed: int) -> tuple[int, int]:
    """Philox key of the jitter noise of a run; `seed` is taken modulo 2^64."""
    return seed & MASK32, ((seed >> 32) & MASK32) ^ JITTER_DOMAIN


def jitter_counter(sample: int, k: int, position: int, channel: int) -> tuple[int, int, int, int]:
    """Philox counter of one element of the jitter; its word is number `channel % 4`.

    `sample` is the consumed-sample index (48 bits), `k` the pass (16 bits), `position` the global
    position in the row (32 bits) and `channel` the index along the hidden size.
    """
    c3 = ((k & 0xFFFF) << 16) | ((sample >> 32) & 0xFFFF)
    return position & MASK32, channel // 4, sample & MASK32, c3
