"""The fusion's matrices in FP8, through Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["fp8_matrices"]


def fp8_matrices(config: Any) -> Callable[..., nn.Module]:
    """What makes a matrix of the fusion, with the arguments of ``nn.Linear``.

    The weight keeps its dtype; its product is computed with the recipe of ``config``, a
    ``TransformerConfig`` with ``fp8`` set.
    """
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch import Linear

    class Fp8Linear(Linear):
        """A linear layer that quantises its weight once a step, as Megatron's own do.

        Attributes:
            is_first_microbatch: set by Megatron's ``set_is_first_microbatch`` when a step begins:
                the next call quantises the weight anew, and the calls after it reuse the result.
        """

        # No keys in checkpoints besides the weight's: they fit models without FP8. Delayed scaling
        # then starts after a resume with the first visit's values.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
            super().__init__(inputs, outputs, bias=bias, params_dtype=dtype)
            self.is_first_microbatch = True
            # Transformer Engine marks all weights as split over TP; this one is whole everywhere.
            self.weight.tensor_model_parallel = False

        def forward(self, x: Tensor) -> Tensor:
            first, self.is_first_microbatch = self.is_first_microbatch, False
            with get_fp8_context(config):
                return super().forward(x, is_first_microbatch=first)

    return Fp8Linear
