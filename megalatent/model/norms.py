"""The norm of layers without Transformer Engine: torch's own, fit for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["LocalNorm"]


class LocalNorm:
    """Builds `torch.nn.RMSNorm` or `LayerNorm`, as `config.normalization` says.

    Megatron's `WrappedTorchNorm` builds the same modules but refuses sequence parallelism. Each TP
    rank then norms its own rows, so a weight's gradient is a sum over TP ranks: Megatron does that
    sum for every parameter marked `sequence_parallel`, and that mark is all that is added here.

    A class, because Megatron's specs treat plain functions as finished modules.

    Raises:
        ValueError: the configuration asks for a norm that torch does not have.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> nn.Module:
        # `persist_layer_norm` (on by default) only picks an apex kernel: nothing to refuse.
        for flag in ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm"):
            if getattr(config, flag):
                raise ValueError(
                    f"{flag} is set, but layers with transformer_impl: local use torch's norms, "
                    "which do not have it; unset it or use transformer_impl: transformer_engine"
                )
        kinds: dict[str, Any] = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"normalization: {config.normalization} is not available with transformer_impl: "
                "local; use RMSNorm or LayerNorm"
            )
        norm: nn.Module = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            _mark_sequence_parallel(parameter, config.sequence_parallel)
        return norm


def _mark_sequence_parallel(parameter: torch.nn.Parameter, value: bool) -> None:
    parameter.sequence_parallel = value  # type: ignore[attr-defined]
