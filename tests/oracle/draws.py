"""The keyed draws of training in plain Python integers: Philox4x32-10, one block at a time.

What is drawn depends on the seed and on what is trained (sample, pass, position, channel), never on
the layout. Passes `k` count from 1; the jitter of pass k goes to the state of pass k - 1.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
JITTER, PREFIX, PASSES = 0x6A697474, 0x70726566, 0x70617373  # "jitt", "pref", "pass"


def philox_scalar(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Four 32-bit words of Philox4x32-10 (Salmon et al., SC 2011)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & LOW, (left >> 32) ^ c3 ^ k1, left & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return [c0, c1, c2, c3]


def _key(seed: int, domain: int) -> tuple[int, int]:
    return seed & LOW, (seed >> 32) ^ domain


def _sample(sample: int, k: int) -> tuple[int, int]:
    return sample & LOW, (k << 16) | ((sample >> 32) & 0xFFFF)


def jitter_noise(seed: int, sample: int, k: int, position: int, D: int, sigma: float) -> Tensor:
    """Noise `[D]`, fp32, uniform on [-sigma, sigma), of one position of one row."""
    c2, c3 = _sample(sample, k)
    values = []
    for channel in range(D):
        words = philox_scalar(_key(seed, JITTER), (position & LOW, channel // 4, c2, c3))
        values.append((words[channel % 4] >> 8) - 2**23)
    scale = torch.tensor(sigma * 2.0**-23, dtype=torch.float32)
    return torch.tensor(values, dtype=torch.float32) * scale


def jitter_rows(seed: int, samples: Sequence[int], k: int, s: int, D: int, sigma: float) -> Tensor:
    """Noise `[b, s, D]`, fp32, of the rows whose sample indices are `samples`."""
    return torch.stack(
        [
            torch.stack([jitter_noise(seed, sample, k, t, D, sigma) for t in range(s)])
            for sample in samples
        ]
    )


def prefix_length(seed: int, sample: int, k: int, document_start: int, n: int) -> int:
    """Plain prefix, uniform on 1 … n, of the document of `n` positions at `document_start`."""
    words = philox_scalar(_key(seed, PREFIX), (document_start & LOW, 0, *_sample(sample, k)))
    return 1 + (words[0] * n >> 32)


def prefix_rows(
    seed: int, samples: Sequence[int], k: int, document_starts: Tensor
) -> list[list[int]]:
    """Prefix lengths `[row][document]`; `document_starts [b, s]`, position 0 always starts one."""
    lengths = []
    for sample, row in zip(samples, document_starts.tolist(), strict=True):
        starts = [t for t, is_start in enumerate(row) if is_start or t == 0]
        ends = [*starts[1:], len(row)]
        lengths.append(
            [
                prefix_length(seed, sample, k, start, end - start)
                for start, end in zip(starts, ends, strict=True)
            ]
        )
    return lengths


def drawn_passes(seed: int, iteration: int, micro_batch: int, mixture: Mapping[int, float]) -> int:
    """K of a micro-batch (`micro_batch` 0 when K is drawn per batch) from shares keyed by K."""
    counter = (micro_batch & LOW, 0, iteration & LOW, iteration >> 32)
    u = philox_scalar(_key(seed, PASSES), counter)[0] / 2**32
    cumulative = 0.0
    for passes in sorted(mixture):
        cumulative += mixture[passes]
        if cumulative > u:
            return passes
    raise ValueError(f"shares of {dict(mixture)} do not reach {u}")
