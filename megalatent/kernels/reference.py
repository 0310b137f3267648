"""The fusion kernels in plain PyTorch: what the others are compared with, and the portable choice.

Written for reading, not for speed: each line is one trip to memory, and autograd keeps what it
needs. Computes in float32 (float64 for float64 input) and rounds once at the end.
"""

from __future__ import annotations

import torch

from megalatent.kernels.backend import Backend, accumulation_dtype
from megalatent.kernels.philox import uniform_noise

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Every kernel as differentiable PyTorch; runs on any device and for any float dtype."""

    def __init__(self, reason: str) -> None:
        super().__init__("torch", reason)

    def _gated(
        self,
        u: torch.Tensor,
        g: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        wide = accumulation_dtype(u.dtype)
        y = u.to(wide) * torch.sigmoid(g.to(wide))
        x = _rms_norm(y, norm_weight.to(wide), eps).to(u.dtype)
        return torch.where(fused_mask.unsqueeze(-1), x, e)

    def _concat(
        self,
        c_state: torch.Tensor,
        c_gate: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        wide = accumulation_dtype(c_state.dtype)
        y = c_state.to(wide) + c_gate.to(wide)
        x = _rms_norm(y, norm_weight.to(wide), eps).to(c_state.dtype)
        return torch.where(fused_mask.unsqueeze(-1), x, e)

    def _additive(self, a: torch.Tensor, e: torch.Tensor, fused_mask: torch.Tensor) -> torch.Tensor:
        # One addition: PyTorch takes it in float32 and rounds once, whatever the dtype.
        return torch.where(fused_mask.unsqueeze(-1), e + a, e)

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
        has_source = (source >= 0).view(-1, 1, 1)
        rows = torch.cat([h, boundary]) if boundary.shape[0] else h
        shifted = rows.index_select(0, source.clamp(min=0))
        if sigma > 0:
            noise = uniform_noise(seed, sample, k, position, h.shape[-1], sigma)
            shifted = (shifted.to(accumulation_dtype(h.dtype)) + noise).to(h.dtype)
        return shifted.masked_fill(~has_source, 0)


def _rms_norm(y: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps) * weight
