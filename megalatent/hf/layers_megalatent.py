"""Transformer layers of the Hugging Face model; parameter names are those of Llama and Qwen3.

Shapes here are Hugging Face's, batch first: hidden states `[b, s, h]`, heads `[b, n, s, d]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from .configuration_megalatent import MegalatentConfig

__all__ = [
    "LayerOutput",
    "MegalatentAttention",
    "MegalatentDecoderLayer",
    "MegalatentExperts",
    "MegalatentMLP",
    "MegalatentRMSNorm",
    "MegalatentRotaryEmbedding",
    "MegalatentRouter",
    "MegalatentSparseMLP",
]

MegalatentRotaryEmbedding = LlamaRotaryEmbedding
# Experts are one 3-dimensional tensor in memory, and one tensor per expert on disk.
MegalatentExperts = Qwen3MoeExperts
MegalatentRouter = Qwen3MoeTopKRouter


class MegalatentRMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in at least single precision."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LayerOutput(NamedTuple):
    """Hidden states `[b, s, h]`; attention weights `[b, n, s, keys]` if the implementation gives
    them; router logits `[b * s, experts]` of a layer with experts."""

    hidden_states: torch.Tensor
    attention_weights: torch.Tensor | None
    router_logits: torch.Tensor | None


class MegalatentAttention(nn.Module):
    """Grouped-query attention with optional head norms and one output gate per head."""

    def __init__(self, config: MegalatentConfig, layer_idx: int) -> None:
        super().__init__()
        # The config fills these in when they are not given.
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        assert config.layer_types is not None
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None

        hidden, heads = config.hidden_size, config.num_attention_heads
        query, key = heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, hidden, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = MegalatentRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = MegalatentRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if config.attention_gate:
            self.gate_proj = nn.Linear(hidden, heads, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output `[b, s, h]` and, from eager attention, its weights."""
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim)
        key = self.k_proj(hidden_states).view(*shape, -1, self.head_dim)
        value = self.v_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )  # [b, s, n, d]
        if self.config.attention_gate:
            output = output * torch.sigmoid(self.gate_proj(hidden_states)).unsqueeze(-1)
        return self.o_proj(output.reshape(*shape, -1)), weights


class MegalatentMLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: MegalatentConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        inner = self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        return self.down_proj(inner), None


class MegalatentSparseMLP(nn.Module):
    """Feed-forward block of routed experts: softmax over all experts, then the best ones."""

    def __init__(self, config: MegalatentConfig) -> None:
        super().__init__()
        self.experts = MegalatentExperts(config)
        self.gate = MegalatentRouter(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[b, s, h]` and router logits `[b * s, experts]`."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, weights, chosen = self.gate(tokens)
        return self.experts(tokens, chosen, weights).view_as(hidden_states), logits


class MegalatentDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm layer; with sandwich norms each branch is normed again before it is added.

    `input_layernorm` and `post_attention_layernorm` are the norms *before* the two branches, as in
    Llama; the norms after them are `attention_output_norm` and `mlp_output_norm`.
    """

    def __init__(self, config: MegalatentConfig, layer_idx: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.sandwich_norm = config.sandwich_norm
        self.self_attn = MegalatentAttention(config, layer_idx)
        is_moe = config.is_moe_layer(layer_idx)
        self.mlp = MegalatentSparseMLP(config) if is_moe else MegalatentMLP(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = MegalatentRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = MegalatentRMSNorm(hidden, eps=eps)
        if config.sandwich_norm:
            self.attention_output_norm = MegalatentRMSNorm(hidden, eps=eps)
            self.mlp_output_norm = MegalatentRMSNorm(hidden, eps=eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> LayerOutput:
        branch, weights = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings,
            attention_mask,
            past_key_values,
            **kwargs,
        )
        if self.sandwich_norm:
            branch = self.attention_output_norm(branch)
        hidden_states = hidden_states + self._scaled(branch)

        branch, router_logits = self.mlp(self.post_attention_layernorm(hidden_states))
        if self.sandwich_norm:
            branch = self.mlp_output_norm(branch)
        return LayerOutput(hidden_states + self._scaled(branch), weights, router_logits)

    def _scaled(self, branch: torch.Tensor) -> torch.Tensor:
        # After the norm: before it, the factor would cancel.
        return branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier
