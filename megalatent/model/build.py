"""A latent model from Megatron's backbone and our configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from megalatent.config import LatentConfig
from megalatent.model.fp8 import fp8_matrices
from megalatent.model.fusion import FUSIONS, Fusion, FusionSettings
from megalatent.model.wrapper import LatentModel

__all__ = ["latent_model"]


def latent_model(backbone: Any, latent: LatentConfig, vocab_size: int) -> LatentModel:
    """Join a backbone chunk with the configured fusion.

    Args:
        backbone: a Megatron language model chunk.
        latent: resolved configuration.
        vocab_size: true vocabulary size.
    """
    fusion: Fusion | None = None
    if latent.fusion.fuses and backbone.pre_process:
        config = backbone.config
        fusion = FUSIONS[latent.fusion.kind](
            FusionSettings(
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
                input_norm=latent.fusion.input_norm,
                init_std=latent.fusion.init_std,
                seed=latent.seed,
                dtype=config.params_dtype,
                sequence_parallel=config.sequence_parallel,
                matrix=fp8_matrices(config) if latent.fusion.fp8 else nn.Linear,
            )
        )
    return LatentModel(backbone, fusion, vocab_size)
