"""Attention with one sigmoid gate per head on its output (FBT, appendix A)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GatedSelfAttention", "HeadGate", "apply_head_gate"]


class HeadGate(nn.Module):
    """Logits of the gates, `W x` with `W [heads, h]`.

    `W` is small, so every TP rank keeps all of it: under SP each rank computes its own rows and
    gathers logits, where a column-parallel product would gather the layer's whole input again.
    """

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.config = config
        self.tp_group = tp_group
        self.weight = nn.Parameter(
            torch.empty(config.num_attention_heads, config.hidden_size, dtype=config.params_dtype)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        # Under SP a rank sees its own rows only: Megatron then sums the gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of this TP rank's heads, `[s, b, heads / tp]`.

        Args:
            x: normed layer input, `[s, b, h]`, or `[s / tp, b, h]` under SP.
        """
        logits = F.linear(x, self.weight)
        size = self.tp_group.size()
        if size == 1:
            return logits
        if not self.config.sequence_parallel:
            # Its backward gathers the heads: the gradients of W and x are whole on every rank.
            return tensor_parallel.scatter_to_tensor_model_parallel_region(
                logits, group=self.tp_group
            )
        logits = tensor_parallel.gather_from_sequence_parallel_region(
            logits, tensor_parallel_output_grad=True, group=self.tp_group
        )
        return logits.chunk(size, -1)[self.tp_group.rank()]


def apply_head_gate(output: Tensor, logits: Tensor) -> Tensor:
    """Multiply each head by its gate.

    Args:
        output: attention output, `[s, b, heads * d]`, or `[t, 1, heads * d]` packed.
        logits: `[s, b, heads]`, or `[t, 1, heads]`.
    """
    heads = output.unflatten(-1, (logits.shape[-1], -1))
    return (heads * torch.sigmoid(logits)[..., None]).flatten(-2)


class GatedSelfAttention(SelfAttention):
    """Megatron's attention with `linear_gate`; its input must be normed already.

    Megatron's forward has places for a gate: it gets one together with query, key and value, and
    applies it before the output projection. Its own gate has one value per channel.

    Raises:
        ValueError: the configuration asks for that other gate too.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.attention_output_gate:
            raise ValueError(
                "attention_output_gate and latent.model.attention_gate are two gates on one "
                "output: leave one of them out"
            )
        super().__init__(config, *args, **kwargs)
        self.linear_gate = HeadGate(config, self.pg_collection.tp)
        # Opens those places, after `linear_qkv` was built without rows for Megatron's gate.
        self.config = copy.copy(config)
        self.config.attention_output_gate = True

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Query, key, value, and the gate's logits if `output_gate`."""
        found = super().get_query_key_value_tensors(
            hidden_states, key_value_states, output_gate=False, split_qkv=split_qkv
        )
        return (*found, self.linear_gate(hidden_states)) if output_gate else found

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return apply_head_gate(x, gate)
