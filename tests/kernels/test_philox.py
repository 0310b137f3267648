"""The generator against published vectors, the noise against its definition and its statistics."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from megalatent.kernels.philox import philox4x32, uniform_noise
from megalatent.kernels.philox_scalar import (
    jitter_counter,
    jitter_key,
    philox4x32_scalar,
)

# (key, counter, words): Random123's known answers for philox4x32-10.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000),
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_known_answers(key, counter, words):
    assert philox4x32_scalar(*key, *counter) == words
    tensors = philox4x32(*key, *(torch.tensor(word) for word in counter))
    assert tuple(int(word) for word in tensors) == words


def test_tensors_equal_scalars(seeded):
    draws = [[seeded.getrandbits(32) for _ in range(6)] for _ in range(50)]
    columns = [torch.tensor(column) for column in zip(*draws, strict=True)]
    words = torch.stack(philox4x32(*columns), dim=1)
    assert words.tolist() == [list(philox4x32_scalar(*draw)) for draw in draws]


def test_counters_broadcast_and_wrap():
    rows, columns = torch.arange(3).view(3, 1) - 1, torch.arange(4) + 2**32
    words = philox4x32(1, 2, rows, columns, torch.tensor(5), torch.tensor(-1))
    assert words[0].shape == (3, 4)
    expected = philox4x32_scalar(1, 2, 2**32 - 1, 3, 5, 2**32 - 1)
    assert tuple(int(word[0, 3]) for word in words) == expected


def test_noise_is_what_its_definition_says(seeded):
    seed, k, sigma = seeded.getrandbits(64), seeded.randrange(1, 2**16), 0.02
    sample = torch.tensor([[seeded.getrandbits(47), 3]])
    position = torch.tensor([[seeded.getrandbits(20)], [2**31 + 7]])
    noise = uniform_noise(seed, sample, k, position, 7, sigma)
    assert noise.shape == (2, 2, 7)
    assert noise.dtype == torch.float32
    for row in range(2):
        for column in range(2):
            for channel in range(7):
                counter = jitter_counter(int(sample[0, column]), k, int(position[row, 0]), channel)
                word = philox4x32_scalar(*jitter_key(seed), *counter)[channel % 4]
                signed = np.float32((word >> 8) - 2**23)
                want = signed * np.float32(sigma * 2.0**-23)
                assert noise[row, column, channel].item() == want


def test_large_noise_equals_its_rows(seeded):
    """The rows are worked on in blocks; the blocks must not show."""
    sample = torch.randint(0, 2**40, (700, 1))
    position = torch.randint(0, 2**20, (700, 2))
    whole = uniform_noise(7, sample, 2, position, 130, 0.5)
    row = seeded.randrange(700)
    assert torch.equal(whole[row], uniform_noise(7, sample[row], 2, position[row], 130, 0.5))


def test_noise_is_uniform():
    """Kolmogorov-Smirnov, at the level 0.001; the draws are fixed, so the test cannot flicker."""
    sigma, n = 0.02, 400 * 512
    noise = uniform_noise(11, torch.tensor([3]), 2, torch.arange(400), 512, sigma).flatten()
    assert noise.min() >= -sigma
    assert noise.max() <= sigma
    ranks = (noise.double().sort().values + sigma) / (2 * sigma)
    steps = torch.arange(n, dtype=torch.float64) / n
    distance = max((ranks - steps).abs().max().item(), (ranks - steps - 1 / n).abs().max().item())
    assert distance * n**0.5 < 1.95


def test_neighbours_are_uncorrelated():
    """Channel, position, pass, sample and seed each make a stream of their own."""

    def draw(seed=1, sample=0, k=2, first=0):
        return uniform_noise(seed, torch.tensor([sample]), k, torch.arange(256) + first, 512, 1.0)

    base = draw()
    others = {
        "channel": base.roll(1, dims=1),
        "four channels": base.roll(4, dims=1),
        "position": draw(first=1),
        "pass": draw(k=3),
        "sample": draw(sample=1),
        "sample, high bits": draw(sample=1 << 32),
        "seed": draw(seed=2),
        "seed, high bits": draw(seed=1 + (1 << 32)),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1].item()
        # Four standard deviations of the correlation of independent draws.
        assert abs(correlation) < 4 / base.numel() ** 0.5, name


def test_pass_out_of_range():
    zero = torch.tensor([0])
    with pytest.raises(ValueError, match="must be in"):
        uniform_noise(1, zero, 1 << 16, zero, 4, 0.1)


def test_scalar_module_needs_no_torch():
    code = "import sys, megalatent.kernels.philox_scalar; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
