"""The project's own export, whose names are Llama's and Qwen3's plus `model.fusion.*`."""

from __future__ import annotations

from typing import Any

from megalatent.checkpoint.families.fields import BACKBONE, only
from megalatent.checkpoint.mapping import (
    Family,
    attention_rules,
    branch_rules,
    dense_rules,
    ends_rules,
    expert_rules,
    fusion_rules,
)

_OWN = frozenset(
    {
        "attention_bias",
        "attention_gate",
        "attention_output_bias",
        "document_end_token_id",
        "fusion",
        "input_norm",
        "jitter",
        "layer_types",
        "loss_lambda",
        "loss_weighting",
        "mlp_bias",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_passes",
        "output_router_logits",
        "prefix_mixin",
        "qk_norm",
        "residual_multiplier",
        "router_aux_loss_coef",
        "sandwich_norm",
    }
)


def _settings(config: Any) -> dict[str, Any]:
    only(config, "norm_topk_prob", True)
    fields = _OWN | BACKBONE - {"rope_scaling", "rope_theta", "torch_dtype"}
    drop = {"_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"}
    return {name: getattr(config, name) for name in fields - drop if hasattr(config, name)}


FAMILY = Family(
    model_type="megalatent",
    architecture="MegalatentForCausalLM",
    rules=ends_rules()
    + fusion_rules()
    + attention_rules()
    + branch_rules()
    + dense_rules()
    + expert_rules("mlp", "gate_proj", "up_proj", "down_proj"),
    carried=BACKBONE | _OWN,
    settings=_settings,
)
