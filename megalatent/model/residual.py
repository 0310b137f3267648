"""What happens to a branch's output before it joins the residual stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor, nn

__all__ = ["ResidualBranch"]

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class ResidualBranch(nn.Module):
    """`residual + dropout(multiplier * norm(branch))`, in the place of Megatron's bias-dropout-add.

    The multiplier comes after the norm, which would cancel it (FBT: depth-scaled residuals, with
    multiplier 1 / sqrt(L)).

    Args:
        config: the model's `TransformerConfig`.
        norm: builds the norm of the branch's output; None leaves it as it is.
        multiplier: constant factor of the branch.
    """

    def __init__(
        self, config: Any, norm: Callable[..., nn.Module] | None, multiplier: float
    ) -> None:
        super().__init__()
        self.norm = norm and norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.multiplier = multiplier

    def forward(self, training: bool, fused: bool) -> Add:
        """As Megatron's `get_bias_dropout_add`: the function that joins a branch."""
        return functools.partial(self._join, get_bias_dropout_add(training, fused))

    def _join(
        self,
        add: Add,
        branch_with_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
        dropout: float,
    ) -> Tensor:
        branch, bias = branch_with_bias
        if bias is not None:
            branch = branch + bias
        if self.norm is not None:
            branch = self.norm(branch)
        if self.multiplier != 1.0:
            branch = branch * self.multiplier
        return add((branch, None), residual, dropout)
