"""Fusions: how the state of the previous position enters the stack input of the next one."""

from __future__ import annotations

import torch
from torch import nn

from .configuration_megalatent import MegalatentConfig
from .layers_megalatent import MegalatentRMSNorm

__all__ = ["FusedNorm", "FusionLinear", "MegalatentFusion"]

_SEED = 0x1A7E57  # any number that no other generator of the model is seeded with


class FusionLinear(nn.Linear):
    """A bias-free linear map that draws nothing when it is built.

    Its weight is set by the model's `_init_weights`, from a generator of its own, so that a model
    with a fusion and one without start with the same backbone.

    Args:
        seed_offset: tells the fusion's generators from each other and from the backbone's.
        starts_at_zero: the weight starts at zero instead of normal.
    """

    def __init__(
        self, in_features: int, out_features: int, seed_offset: int, starts_at_zero: bool = False
    ) -> None:
        self.seed_offset = seed_offset
        self.starts_at_zero = starts_at_zero
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


class FusedNorm(MegalatentRMSNorm):
    """The norm of fused stack inputs; its weight starts at the RMS of the embedding table."""


class MegalatentFusion(nn.Module):
    """Stack inputs from states and token embeddings, all `[b, s, h]`.

    | fusion | stack input |
    |---|---|
    | gated (FBT eq. 4) | `fused_norm(state_proj(h) * sigmoid(gate_proj(gate_norm(e))))` |
    | additive (Recycler eq. 2) | `e + adapter_proj(adapter_norm(h))` |
    | concat | `fused_norm(concat_proj([state_norm(h); gate_norm(e)]))` |

    `h` is the state (the output of the final norm) of the position before, `e` the embedding of
    the position's token.
    """

    def __init__(self, config: MegalatentConfig) -> None:
        super().__init__()
        self.kind = config.fusion
        self.input_norm = config.input_norm
        size, eps = config.hidden_size, config.rms_norm_eps
        if self.kind == "gated":
            self.state_proj = FusionLinear(size, size, _SEED)
            self.gate_proj = FusionLinear(size, size, _SEED + 1)
            self.gate_norm = MegalatentRMSNorm(size, eps=eps)
            self.fused_norm = FusedNorm(size, eps=eps)
        elif self.kind == "additive":
            self.adapter_proj = FusionLinear(size, size, _SEED, starts_at_zero=True)
            self.adapter_norm = MegalatentRMSNorm(size, eps=eps)
        else:
            self.concat_proj = FusionLinear(2 * size, size, _SEED)
            self.state_norm = MegalatentRMSNorm(size, eps=eps)
            self.gate_norm = MegalatentRMSNorm(size, eps=eps)
            self.fused_norm = FusedNorm(size, eps=eps)

    def plain(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Stack input of positions that read no state."""
        return self.fused_norm(embeddings) if self.input_norm == "all" else embeddings

    def token_term(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The part of a fused input that only the token decides: the same in every pass."""
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(self.gate_norm(embeddings)))
        return embeddings if self.kind == "additive" else self.gate_norm(embeddings)

    def forward(self, states: torch.Tensor, token_term: torch.Tensor) -> torch.Tensor:
        """Stack inputs of the positions of `token_term`; `states` are those one position before."""
        if self.kind == "gated":
            return self.fused_norm(self.state_proj(states) * token_term)
        if self.kind == "additive":
            return token_term + self.adapter_proj(self.adapter_norm(states))
        return self.fused_norm(
            self.concat_proj(torch.cat([self.state_norm(states), token_term], dim=-1))
        )
