"""Qwen3: norms over each head of queries and keys."""

from __future__ import annotations

from typing import Any

from megalatent.checkpoint.families.fields import BACKBONE, backbone
from megalatent.checkpoint.mapping import Family, attention_rules, dense_rules, ends_rules


def _settings(config: Any) -> dict[str, Any]:
    return {
        **backbone(config),
        "qk_norm": True,
        "attention_bias": config.attention_bias,
        "attention_output_bias": config.attention_bias,
    }


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=ends_rules() + attention_rules() + dense_rules(),
    carried=BACKBONE | {"attention_bias", "layer_types", "max_window_layers", "use_sliding_window"},
    settings=_settings,
)
