"""The objective over passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from .configuration_megalatent import MegalatentConfig

__all__ = ["balance_loss", "weighted_over_passes"]


def weighted_over_passes(losses: Sequence[torch.Tensor], config: MegalatentConfig) -> torch.Tensor:
    """Sum with weight 1 for pass 1 and, for the K-1 others, `lambda/(K-1)` each (FBT eq. 12) or 1
    each (Recycler eq. 4)."""
    total, later = losses[0], losses[1:]
    if later:
        mean = config.loss_weighting == "mean"
        weight = config.loss_lambda / len(later) if mean else 1.0
        for loss in later:
            total = total + weight * loss
    return total


def balance_loss(
    router_logits: tuple[torch.Tensor, ...],
    config: MegalatentConfig,
    padding_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Load-balancing loss of one pass over all its MoE layers; padded positions do not count."""
    return load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, padding_mask
    )
