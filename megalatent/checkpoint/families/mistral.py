"""Mistral: a sliding window in every layer, if there is one."""

from __future__ import annotations

from megalatent.checkpoint.families.fields import BACKBONE, backbone
from megalatent.checkpoint.mapping import Family, attention_rules, dense_rules, ends_rules

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=ends_rules() + attention_rules() + dense_rules(),
    carried=BACKBONE,
    settings=backbone,
)
