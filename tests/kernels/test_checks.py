"""Arguments that do not fit are refused by name, whatever the implementation."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import EPS, REFERENCE


def arguments() -> dict[str, torch.Tensor]:
    u = torch.randn(3, 2, 8)
    mask = torch.ones(3, 2, dtype=torch.bool)
    return {"u": u, "g": u, "e": u, "fused_mask": mask, "norm_weight": torch.ones(8)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("g", torch.randn(3, 2, 9), r"g is torch.float32 \(3, 2, 9\).*it must be .*\(3, 2, 8\)"),
        ("e", torch.randn(3, 2, 8).half(), r"e is torch.float16.*must be torch.float32"),
        ("fused_mask", torch.ones(3, 2), "fused_mask has dtype torch.float32"),
        ("fused_mask", torch.ones(3, 1, dtype=torch.bool), r"needs \(3, 2\)"),
        ("norm_weight", torch.ones(7), r"norm_weight has shape \(7,\); it must be \(8,\)"),
        ("norm_weight", torch.ones(8).half(), "norm_weight has dtype torch.float16"),
    ],
)
def test_fusion_arguments(name, value, message):
    with pytest.raises(ValueError, match=message):
        REFERENCE.gated(**(arguments() | {name: value}), eps=EPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": torch.zeros(4, 8)}, r"it must be \[s, b, D\]"),
        ({"boundary": torch.zeros(1, 2, 7)}, r"boundary is .*it must be .*\(1, 2, 8\)"),
        ({"source": torch.zeros(3, dtype=torch.int64)}, r"must be int64 \(4,\)"),
        ({"source": torch.zeros(4, dtype=torch.int32)}, r"must be int64 \(4,\)"),
        ({"position": torch.zeros(4, dtype=torch.int64)}, r"position .*int64 \(4, 2\)"),
        ({"sample": torch.zeros(4, 2)}, r"sample is torch.float32"),
        ({"k": 1 << 16}, "pass k = 65536"),
        ({"k": -1}, "pass k = -1"),
        ({"sigma": -0.1}, "sigma = -0.1 is not a width"),
        ({"sigma": float("nan")}, "sigma = nan is not a width"),
    ],
)
def test_shift_arguments(change, message):
    integers = torch.zeros(4, 2, dtype=torch.int64)
    good = {
        "h": torch.zeros(4, 2, 8),
        "boundary": None,
        "source": torch.arange(4) - 1,
        "position": integers,
        "sample": integers,
        "k": 2,
        "seed": 1,
        "sigma": 0.1,
    }
    REFERENCE.shift_jitter(**good)
    with pytest.raises(ValueError, match=message):
        REFERENCE.shift_jitter(**(good | change))
