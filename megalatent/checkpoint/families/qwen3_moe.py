"""Qwen3 with routed experts in all layers or some."""

from __future__ import annotations

from typing import Any

from megalatent.checkpoint.families.fields import BACKBONE, backbone, only
from megalatent.checkpoint.mapping import (
    Family,
    attention_rules,
    dense_rules,
    ends_rules,
    expert_rules,
)


def _settings(config: Any) -> dict[str, Any]:
    only(config, "norm_topk_prob", True)
    dense = [
        layer
        for layer in range(config.num_hidden_layers)
        if layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
    ]
    return {
        **backbone(config),
        "qk_norm": True,
        "attention_bias": config.attention_bias,
        "attention_output_bias": config.attention_bias,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "mlp_only_layers": dense,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=ends_rules()
    + attention_rules()
    + dense_rules()
    + expert_rules("mlp", "gate_proj", "up_proj", "down_proj"),
    carried=BACKBONE
    | {
        "attention_bias",
        "decoder_sparse_step",
        "max_window_layers",  # the class has no use for it
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
        "output_router_logits",
        "router_aux_loss_coef",
        "use_sliding_window",
    },
    settings=_settings,
)
