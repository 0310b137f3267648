"""What every implementation of the fusion kernels offers, and the checks they share.

Layouts: activations are `[s, b, D]`, masks, positions and samples `[s, b]`, all on one device. `s`
is the slice of the sequence this rank holds. Arithmetic is in float32 (float64 for float64 input)
and rounds once, to the activations' dtype.
"""

from __future__ import annotations

import abc
from typing import Literal

import torch

from megalatent.kernels.philox import check_pass

__all__ = ["Backend", "KernelSetting", "accumulation_dtype"]

KernelSetting = Literal["auto", "cuda", "triton", "torch"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype the kernels compute in for activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Backend(abc.ABC):
    """One implementation of the fusion kernels; `name` and `reason` say which and why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {self.reason})"

    def gated(
        self,
        u: torch.Tensor,
        g: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Stack input of the gated fusion, `RMSNorm(u * sigmoid(g)) * w` (FBT eq. 4).

        Args:
            u: `W_U h'` of the previous position, `[s, b, D]`.
            g: `W_G gate_norm(e)`, before the sigmoid, `[s, b, D]`.
            e: plain embeddings, `[s, b, D]`, returned where `fused_mask` is false.
            fused_mask: bool `[s, b]`, true at fused positions. At the others u and g are not used
                (but must be finite for the PyTorch reference's gradient).
            norm_weight: `[D]`, in the dtype of `u` or float32.
            eps: epsilon of the norm.

        Returns:
            `[s, b, D]`, differentiable with respect to u, g, e and norm_weight, once.

        Raises:
            ValueError: shapes, dtypes or devices do not fit together.
        """
        _check_activations({"u": u, "g": g, "e": e}, fused_mask)
        _check_weight(norm_weight, u)
        return self._gated(u, g, e, fused_mask, norm_weight, eps)

    def concat(
        self,
        c_state: torch.Tensor,
        c_gate: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Stack input of the concat fusion, `RMSNorm(c_state + c_gate) * w`.

        `c_state` and `c_gate` are the products of the two halves of `W_C` with the normed state and
        the normed embedding. Everything else is as in `gated`.
        """
        _check_activations({"c_state": c_state, "c_gate": c_gate, "e": e}, fused_mask)
        _check_weight(norm_weight, c_state)
        return self._concat(c_state, c_gate, e, fused_mask, norm_weight, eps)

    def additive(self, a: torch.Tensor, e: torch.Tensor, fused_mask: torch.Tensor) -> torch.Tensor:
        """Stack input of the additive fusion, `e + a` or `e` (Recycler eq. 2).

        `a` is `W_A adapter_norm(h')`, `[s, b, D]`; it is not used where `fused_mask` is false.
        """
        _check_activations({"a": a, "e": e}, fused_mask)
        return self._additive(a, e, fused_mask)

    def shift_jitter(
        self,
        h: torch.Tensor,
        boundary: torch.Tensor | None,
        source: torch.Tensor,
        position: torch.Tensor,
        sample: torch.Tensor,
        k: int,
        seed: int,
        sigma: float,
    ) -> torch.Tensor:
        """States moved to the positions that read them, plus jitter (FBT section 3).

        Args:
            h: this rank's states, `[s, b, D]`.
            boundary: rows received from other ranks, `[n, b, D]`; None or n = 0 for none.
            source: int64 `[s]`. Output row i is row `source[i]` of h if that is in [0, s), row
                `source[i] - s` of boundary if in [s, s + n), and zeros without noise if it is -1.
                Each row of h and of boundary may be used once at most.
            position: int64 `[s, b]`, global position in its sequence of the state that is read.
            sample: int64 `[s, b]`, consumed-sample index.
            k: pass the noise belongs to, 0 <= k < 65536.
            seed: seed of the run, modulo 2^64.
            sigma: half width of the noise; 0 adds none.

        Returns:
            `[s, b, D]`: the state plus `noise(seed, sample, k, position, channel)`, the sum taken
            in float32 and rounded once. Differentiable with respect to h and boundary.

        Raises:
            ValueError: shapes, dtypes or devices do not fit together, or k or sigma is out of
                range.
        """
        if boundary is None:
            boundary = h.new_empty((0, *h.shape[1:]))
        _check_shift(h, boundary, source, position, sample)
        check_pass(k)
        if not sigma >= 0:
            raise ValueError(f"sigma = {sigma} is not a width; give 0 for no noise or a number > 0")
        return self._shift_jitter(h, boundary, source, position, sample, k, seed, sigma)

    @abc.abstractmethod
    def _gated(
        self,
        u: torch.Tensor,
        g: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor: ...

    @abc.abstractmethod
    def _concat(
        self,
        c_state: torch.Tensor,
        c_gate: torch.Tensor,
        e: torch.Tensor,
        fused_mask: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor: ...

    @abc.abstractmethod
    def _additive(
        self, a: torch.Tensor, e: torch.Tensor, fused_mask: torch.Tensor
    ) -> torch.Tensor: ...

    @abc.abstractmethod
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
    ) -> torch.Tensor: ...


def _check_activations(named: dict[str, torch.Tensor], fused_mask: torch.Tensor) -> None:
    (first_name, first), *others = named.items()
    for name, tensor in others:
        _require_same(name, tensor, first_name, first, tuple(first.shape))
    if fused_mask.dtype != torch.bool:
        raise ValueError(f"fused_mask has dtype {fused_mask.dtype}; it must be torch.bool")
    if fused_mask.shape != first.shape[:-1]:
        raise ValueError(
            f"fused_mask has shape {tuple(fused_mask.shape)}; {first_name} of shape "
            f"{tuple(first.shape)} needs {tuple(first.shape[:-1])}"
        )


def _check_weight(weight: torch.Tensor, activations: torch.Tensor) -> None:
    width = activations.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"norm_weight has shape {tuple(weight.shape)}; it must be ({width},)")
    if weight.dtype not in (activations.dtype, accumulation_dtype(activations.dtype)):
        raise ValueError(
            f"norm_weight has dtype {weight.dtype}; with activations in {activations.dtype} it "
            f"must have that dtype or {accumulation_dtype(activations.dtype)}"
        )


def _check_shift(
    h: torch.Tensor,
    boundary: torch.Tensor,
    source: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
) -> None:
    if h.dim() != 3:
        raise ValueError(f"h has shape {tuple(h.shape)}; it must be [s, b, D]")
    _require_same("boundary", boundary, "h", h, (boundary.shape[0], *h.shape[1:]))
    if source.shape != h.shape[:1] or source.dtype != torch.int64:
        raise ValueError(
            f"source is {source.dtype} {tuple(source.shape)}; it must be int64 ({h.shape[0]},)"
        )
    for name, tensor in (("position", position), ("sample", sample)):
        if tensor.shape != h.shape[:2] or tensor.dtype != torch.int64:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int64 "
                f"{tuple(h.shape[:2])}"
            )


def _require_same(
    name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor, shape: tuple[int, ...]
) -> None:
    if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; to fit "
            f"{like_name} it must be {like.dtype} {shape} on {like.device}"
        )
