"""Llama 2 and 3."""

from __future__ import annotations

from typing import Any

from megalatent.checkpoint.families.fields import BACKBONE, backbone, only
from megalatent.checkpoint.mapping import Family, attention_rules, dense_rules, ends_rules


def _settings(config: Any) -> dict[str, Any]:
    only(config, "pretraining_tp", 1, None)
    return {
        **backbone(config),
        "attention_bias": config.attention_bias,
        "attention_output_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rules=ends_rules() + attention_rules() + dense_rules(),
    carried=BACKBONE - {"sliding_window"} | {"attention_bias", "mlp_bias", "pretraining_tp"},
    settings=_settings,
)
