"""Fields of Hugging Face configurations that families share."""

from __future__ import annotations

from typing import Any

from megalatent.errors import UserError

__all__ = ["BACKBONE", "NEUTRAL", "backbone", "only"]

# They say how a model was saved or is to be run, and nothing of what it computes.
NEUTRAL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

BACKBONE = NEUTRAL | {
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
}

_SAME_NAME = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)


def backbone(config: Any) -> dict[str, Any]:
    """Fields of `MegalatentConfig` for what all families have; they do not fuse."""
    settings = {name: getattr(config, name) for name in _SAME_NAME}
    return {
        **settings,
        "head_dim": getattr(config, "head_dim", None),
        "sliding_window": getattr(config, "sliding_window", None),
        "layer_types": getattr(config, "layer_types", None),
        "fusion": "none",
    }


def only(config: Any, name: str, *values: Any) -> None:
    """Raise UserError unless a field has one of the values that can be carried."""
    value = getattr(config, name, values[0])
    if value not in values:
        allowed = " or ".join(map(repr, values))
        raise UserError(
            f"config.json: {name}={value!r} cannot be carried to Megatron (only {allowed}): this "
            "model does not convert"
        )
