"""Mixtral: routed experts in every layer."""

from __future__ import annotations

from typing import Any

from megalatent.checkpoint.families.fields import BACKBONE, backbone, only
from megalatent.checkpoint.mapping import Family, attention_rules, ends_rules, expert_rules


def _settings(config: Any) -> dict[str, Any]:
    only(config, "router_jitter_noise", 0.0)
    return {
        **backbone(config),
        "num_experts": config.num_local_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.intermediate_size,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=ends_rules() + attention_rules() + expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    carried=BACKBONE
    | {
        "num_experts_per_tok",
        "num_local_experts",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    },
    settings=_settings,
)
