"""The fusions: how the previous position's state enters the next stack input.

A fusion is one class in ``FUSIONS``; nothing else in the package names the three that exist.
To add a fourth, subclass :class:`Fusion` here, give its weights in ``__init__``, split its
arithmetic into the part that needs only the token (:meth:`Fusion.token_part`, done once per
micro-batch) and the part that needs the state (:meth:`Fusion.combine`, done in every pass), and
register it.

Every fusion works on sequence slices ``[s_local, b, h]`` with replicated weights, so no TP rank
repeats another's matrix product. The plain (unfused) rows of a slice are the token embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

__all__ = ["FUSIONS", "Fusion", "FusionSettings", "register_fusion"]


@dataclass(frozen=True, kw_only=True)
class FusionSettings:
    """What a fusion needs to know.

    Attributes:
        hidden_size: D.
        eps: epsilon of every RMSNorm, the backbone's.
        input_norm: ``"fused"`` norms fused rows only; ``"all"`` norms every stack input.
        init_std: standard deviation of normally initialised matrices.
        seed: seed of the fusion's own generator, so that adding a fusion does not change how
            the backbone initialises.
        dtype: parameter dtype.
        sequence_parallel: marks the weights for Megatron's gradient sum over TP.
        matrix: makes a matrix; called as ``nn.Linear``.
    """

    hidden_size: int
    eps: float
    input_norm: Literal["fused", "all"] = "fused"
    init_std: float = 0.02
    seed: int = 0
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    matrix: Callable[..., nn.Module] = nn.Linear


class _Scale(nn.Module):
    """An RMSNorm weight ``[h]`` whose norm is done inside a fused kernel.

    The weight is read only inside this module's call: with an overlapped parameter gather the
    wait for fresh weights is a pre-hook of the module that owns them.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, kernel: Any, *operands: Tensor, eps: float) -> Tensor:
        return kernel(*operands, self.weight, eps)


class _Halves(nn.Linear):
    """``W_C [D, 2D]``, applied one half at a time."""

    def forward(self, x: Tensor, half: Literal["state", "gate"]) -> Tensor:  # type: ignore[override]
        width = self.out_features
        part = self.weight[:, :width] if half == "state" else self.weight[:, width:]
        return nn.functional.linear(x, part)


class Fusion(nn.Module):
    """Base of all fusions.

    Class attributes:
        name: the value of ``latent.fusion.kind``.
        default_jitter: sigma of the jitter where the config leaves it open.
        default_prefix_mixin: whether the prefix mixin is on where the config leaves it open.
        has_fused_norm: whether ``input_norm: all`` makes sense.
        state_products: D x D products of each token in a fused pass.
        token_products: the same in :meth:`token_part`, once for all fused passes.
    """

    name: ClassVar[str]
    default_jitter: ClassVar[float] = 0.02
    default_prefix_mixin: ClassVar[bool] = True
    has_fused_norm: ClassVar[bool] = True
    state_products: ClassVar[int] = 1
    token_products: ClassVar[int] = 1

    def __init__(self, settings: FusionSettings) -> None:
        super().__init__()
        if settings.input_norm == "all" and not self.has_fused_norm:
            raise ValueError(
                f"latent.fusion.input_norm is 'all', but the fusion '{self.name}' has no "
                "fused_norm: use input_norm: fused"
            )
        self.settings = settings

    # -- to be defined by a fusion ---------------------------------------------------------

    def token_part(self, embedding: Tensor) -> Tensor:
        """What depends on the tokens alone, ``[s, b, h]``; computed once per micro-batch."""
        raise NotImplementedError

    def combine(
        self, kernels: Any, state: Tensor, token: Tensor, embedding: Tensor, fused: Tensor
    ) -> Tensor:
        """Stack input of a fused pass, ``[s, b, h]``.

        Args:
            kernels: pointwise kernels (:mod:`megalatent.kernels`).
            state: ``h'`` of the previous position, shifted and jittered, ``[s, b, h]``.
            token: result of :meth:`token_part`.
            embedding: plain token embeddings ``[s, b, h]``, used where ``fused`` is False.
            fused: ``[s, b]`` bool.
        """
        raise NotImplementedError

    # -- common ----------------------------------------------------------------------------

    def forward(self, action: Literal["token", "combine", "plain"], *args: Any) -> Tensor:
        """One entry for every use, so that the module's hooks see each of them."""
        if action == "token":
            return self.token_part(*args)
        if action == "plain":
            return self.plain(*args)
        return self.combine(*args)

    def plain(self, embedding: Tensor) -> Tensor:
        """Stack input of pass 1 with ``input_norm: all``."""
        raise NotImplementedError

    def trained_by_plain_passes(self) -> list[nn.Parameter]:
        """Weights that get a gradient in a step without any fused pass."""
        return []

    def finish_init(self) -> None:
        """Draw the initial weights and mark how they are shared between ranks."""
        for name, parameter in self.named_parameters():
            parameter.sequence_parallel = self.settings.sequence_parallel  # type: ignore[attr-defined]
            if parameter.dim() < 2 or parameter.is_meta:
                continue
            digest = hashlib.sha256(f"{self.settings.seed}/fusion.{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            std = self.initial_std(name)
            values = torch.randn(parameter.shape, generator=generator) * std
            with torch.no_grad():
                parameter.copy_(values)

    def initial_std(self, name: str) -> float:
        """Standard deviation of a matrix at the start."""
        return self.settings.init_std

    def scale_to_embedding(self, rms: float) -> None:
        """Start ``fused_norm`` at the RMS of the embedding table.

        With weight 1 a fused input would start about 50 times a plain one at init 0.02.
        """
        norm = getattr(self, "fused_norm", None)
        if norm is not None and not norm.weight.is_meta:
            with torch.no_grad():
                norm.weight.fill_(rms)

    def _matrix(self) -> nn.Module:
        settings = self.settings
        size = settings.hidden_size
        return settings.matrix(size, size, bias=False, dtype=settings.dtype)

    def _norm(self) -> nn.RMSNorm:
        settings = self.settings
        return nn.RMSNorm(settings.hidden_size, eps=settings.eps, dtype=settings.dtype)


class _NormedFusion(Fusion):
    """Fusions that end in ``fused_norm``."""

    def __init__(self, settings: FusionSettings) -> None:
        super().__init__(settings)
        self.fused_norm = _Scale(settings.hidden_size, settings.dtype)

    def trained_by_plain_passes(self) -> list[nn.Parameter]:
        return [self.fused_norm.weight] if self.settings.input_norm == "all" else []

    def plain(self, embedding: Tensor) -> Tensor:
        return self.fused_norm(_rms_norm, embedding, eps=self.settings.eps)

    def _finish(self, kernel: Any, *operands: Tensor) -> Tensor:
        """``kernel`` norms fused rows and leaves the plain rows, its last two operands."""
        *_, embedding, fused = operands
        x = self.fused_norm(kernel, *operands, eps=self.settings.eps)
        if self.settings.input_norm == "all":
            x = torch.where(fused[..., None], x, self.plain(embedding))
        return x


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


FUSIONS: dict[str, type[Fusion]] = {}


def register_fusion(cls: type[Fusion]) -> type[Fusion]:
    """Make ``cls`` available as ``latent.fusion.kind: cls.name``."""
    if cls.name in FUSIONS:
        raise ValueError(f"a fusion named '{cls.name}' is already registered")
    FUSIONS[cls.name] = cls
    return cls


@register_fusion
class GatedFusion(_NormedFusion):
    """FBT eq. 4: ``fused_norm((W_U h') * sigmoid(W_G gate_norm(e)))``.

    The state is the value and the token only the gate, so the model cannot ignore the state.
    """

    name = "gated"

    def __init__(self, settings: FusionSettings) -> None:
        super().__init__(settings)
        self.state_proj = self._matrix()
        self.gate_proj = self._matrix()
        self.gate_norm = self._norm()
        self.finish_init()

    def token_part(self, embedding: Tensor) -> Tensor:
        return self.gate_proj(self.gate_norm(embedding))

    def combine(
        self, kernels: Any, state: Tensor, token: Tensor, embedding: Tensor, fused: Tensor
    ) -> Tensor:
        return self._finish(kernels.gated, self.state_proj(state), token, embedding, fused)


@register_fusion
class AdditiveFusion(Fusion):
    """Recycler eq. 2: ``e + W_A adapter_norm(h')``, with ``W_A = 0`` at the start.

    The model therefore starts as the plain transformer exactly.
    """

    name = "additive"
    default_jitter = 0.0
    default_prefix_mixin = False
    has_fused_norm = False
    token_products = 0

    def __init__(self, settings: FusionSettings) -> None:
        super().__init__(settings)
        self.adapter_proj = self._matrix()
        self.adapter_norm = self._norm()
        self.finish_init()

    def initial_std(self, name: str) -> float:
        return 0.0

    def token_part(self, embedding: Tensor) -> Tensor:
        return embedding.new_empty(0)

    def combine(
        self, kernels: Any, state: Tensor, token: Tensor, embedding: Tensor, fused: Tensor
    ) -> Tensor:
        return kernels.additive(self.adapter_proj(self.adapter_norm(state)), embedding, fused)


@register_fusion
class ConcatFusion(_NormedFusion):
    """``fused_norm(W_C [state_norm(h'); gate_norm(e)])``, the form multi-token heads use."""

    name = "concat"

    def __init__(self, settings: FusionSettings) -> None:
        super().__init__(settings)
        size = settings.hidden_size
        self.concat_proj = _Halves(2 * size, size, bias=False, dtype=settings.dtype)
        self.state_norm = self._norm()
        self.gate_norm = self._norm()
        self.finish_init()

    def token_part(self, embedding: Tensor) -> Tensor:
        return self.concat_proj(self.gate_norm(embedding), "gate")

    def combine(
        self, kernels: Any, state: Tensor, token: Tensor, embedding: Tensor, fused: Tensor
    ) -> Tensor:
        projected = self.concat_proj(self.state_norm(state), "state")
        return self._finish(kernels.concat, projected, token, embedding, fused)
