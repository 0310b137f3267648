"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from megalatent.checkpoint.families.fields import BACKBONE, backbone
from megalatent.checkpoint.mapping import Family, attention_rules, dense_rules, ends_rules

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=ends_rules() + attention_rules() + dense_rules(),
    # The class reads the window only with use_sliding_window, and has layer_types from both.
    # It has no head_dim: one in the file would change nothing there, and much here.
    carried=BACKBONE - {"head_dim"} | {"layer_types", "max_window_layers", "use_sliding_window"},
    settings=lambda config: {**backbone(config), "attention_bias": True},
)
