"""A model's configuration as Megatron's arguments, and back.

The configuration in between is always `MegalatentConfig`, which can say what every family that
converts can say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalatent.config_model import ModelConfig
from megalatent.errors import UserError
from megalatent.training.expert_layers import expert_layers

__all__ = [
    "MODEL_ATTRIBUTE",
    "config_from_args",
    "export_obstacles",
    "megatron_options",
    "model_config",
    "to_args",
]

# Where converted checkpoints keep what Megatron's arguments have no place for.
MODEL_ATTRIBUTE = "latent_model"
# What `latent.model:` says, by the same names on both sides.
_MODEL = tuple(field.name for field in dataclasses.fields(ModelConfig))
# Fields of MegalatentConfig that are kept there.
_KEPT = (
    *_MODEL,
    "bos_token_id",
    "document_end_token_id",
    "eos_token_id",
    "fusion",
    "input_norm",
    "jitter",
    "loss_lambda",
    "loss_weighting",
    "num_passes",
    "output_router_logits",
    "pad_token_id",
    "prefix_mixin",
)
# Llama 3's scaling of rotary frequencies: Megatron lets one choose the factor and fixes the rest.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Ways of balancing experts that are also ways of choosing them.
_OTHER_ROUTING = frozenset({"quantile_balancing", "sinkhorn"})

# Arguments that change what a model computes, with the values that a Hugging Face model has too.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_layer_pattern": (None,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_force_biased": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_group_topk": (None,),
    "moe_router_num_groups": (None,),
    "moe_router_pre_softmax": (False,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_shared_expert_intermediate_size": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "rotary_scaling_factor": (1.0,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla",),
    "spec": (None,),
    "squared_relu": (False,),
    "swiglu": (True,),
    "use_mup": (False,),
}


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """An argument of Megatron that is a field of the configuration."""

    argument: str
    field: str
    option: str | None = None  # on the command line, where it is called otherwise


_PAIRS = (
    _Pair(argument="num_layers", field="num_hidden_layers"),
    _Pair(argument="hidden_size", field="hidden_size"),
    _Pair(argument="ffn_hidden_size", field="intermediate_size"),
    _Pair(argument="num_attention_heads", field="num_attention_heads"),
    _Pair(argument="num_query_groups", field="num_key_value_heads"),
    _Pair(argument="kv_channels", field="head_dim"),
    _Pair(argument="max_position_embeddings", field="max_position_embeddings"),
    _Pair(argument="layernorm_epsilon", field="rms_norm_eps", option="norm_epsilon"),
    _Pair(argument="attention_dropout", field="attention_dropout"),
    _Pair(argument="init_method_std", field="initializer_range"),
    _Pair(argument="qk_layernorm", field="qk_norm"),
    _Pair(argument="vocab_size", field="vocab_size"),
)
_MOE_PAIRS = (
    _Pair(argument="num_experts", field="num_experts"),
    _Pair(argument="moe_router_topk", field="num_experts_per_tok"),
    _Pair(argument="moe_ffn_hidden_size", field="moe_intermediate_size"),
    _Pair(argument="moe_aux_loss_coeff", field="router_aux_loss_coef"),
)


# -- from Megatron ----------------------------------------------------------------------------


def export_obstacles(args: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Arguments that no Hugging Face model has: name -> (value, the values that it has)."""
    found = {name: getattr(args, name, values[0]) for name, values in _REQUIRED.items()}
    return {
        name: (value, _REQUIRED[name])
        for name, value in found.items()
        if value not in _REQUIRED[name]
    }


def config_from_args(args: Any, vocab_size: int) -> dict[str, Any]:
    """Fields of `MegalatentConfig` for the model of a checkpoint.

    Args:
        args: Megatron's arguments as the checkpoint has them.
        vocab_size: without padding.

    Raises:
        UserError: the model computes something that the Hugging Face model cannot.
    """
    for name, (value, values) in export_obstacles(args).items():
        raise UserError(
            f"the checkpoint was trained with {name}={value!r}, which the Hugging Face model"
            f" does not have (only {' or '.join(map(repr, values))}): it cannot be exported"
        )
    fields: dict[str, Any] = {
        pair.field: getattr(args, pair.argument) for pair in _PAIRS if hasattr(args, pair.argument)
    }
    fields["vocab_size"] = vocab_size
    if not getattr(args, "group_query_attention", True):
        fields["num_key_value_heads"] = args.num_attention_heads
    all_biases = bool(args.add_bias_linear)
    fields["attention_bias"] = all_biases or bool(getattr(args, "add_qkv_bias", False))
    fields["attention_output_bias"] = fields["mlp_bias"] = all_biases
    fields["tie_word_embeddings"] = not args.untie_embeddings_and_output_weights
    fields["rope_parameters"] = _rope_from_args(args)
    fields |= _window_from_args(args)
    if args.num_experts:
        fields |= _experts_from_args(args)
    fields |= _latent_from_args(args)
    return fields


def _rope_from_args(args: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    if getattr(args, "use_rope_scaling", False):
        rope |= {"rope_type": "llama3", "factor": float(args.rope_scaling_factor), **_LLAMA3}
    return rope


def _window_from_args(args: Any) -> dict[str, Any]:
    window = getattr(args, "window_size", None)
    if not window or window[0] < 0:
        return {"sliding_window": None}
    skip = getattr(args, "window_attn_skip_freq", None)
    slides = [
        True if skip is None else bool(skip[i]) if isinstance(skip, list) else (i + 1) % skip != 0
        for i in range(args.num_layers)
    ]
    kinds = ["sliding_attention" if x else "full_attention" for x in slides]
    # Megatron counts the keys before the position, Hugging Face the position too.
    return {"sliding_window": window[0] + 1, "layer_types": kinds}


def _experts_from_args(args: Any) -> dict[str, Any]:
    if args.add_bias_linear:
        raise UserError(
            "the checkpoint has experts with biases (add_bias_linear), which the Hugging Face model"
            " does not have: it cannot be exported"
        )
    balancing = getattr(args, "moe_router_load_balancing_type", None)
    if _OTHER_ROUTING.intersection(balancing if isinstance(balancing, list) else [balancing]):
        raise UserError(
            f"the checkpoint was trained with moe_router_load_balancing_type={balancing!r}, which"
            " chooses and weighs experts otherwise than the Hugging Face model: it cannot be"
            " exported"
        )
    fields = {pair.field: getattr(args, pair.argument) for pair in _MOE_PAIRS}
    if fields["moe_intermediate_size"] is None:
        fields["moe_intermediate_size"] = args.ffn_hidden_size
    frequency = getattr(args, "moe_layer_freq", 1)
    pattern = expert_layers(frequency, args.num_layers)
    fields["mlp_only_layers"] = [i for i, experts in enumerate(pattern) if not experts]
    coefficient = fields["router_aux_loss_coef"]
    if isinstance(coefficient, list):
        fields["router_aux_loss_coef"] = sum(coefficient)
    return fields


def _latent_from_args(args: Any) -> dict[str, Any]:
    latent = getattr(args, "latent_config", None)
    if latent is None:
        return dict(getattr(args, MODEL_ATTRIBUTE, None) or {"fusion": "none"})
    fusion, passes = latent["fusion"], latent["passes"]
    return {
        **latent.get("model", {}),  # absent in checkpoints older than the section
        "fusion": fusion["kind"],
        "input_norm": fusion["input_norm"],
        "jitter": fusion["jitter"],
        "prefix_mixin": fusion["prefix_mixin"],
        "loss_weighting": passes["loss_weighting"],
        "loss_lambda": passes["lambda"],
    }


# -- to Megatron ------------------------------------------------------------------------------


def megatron_options(config: Any) -> dict[str, Any]:
    """What stands under `megatron:` in the configuration of a run that loads the model.

    Args:
        config: a `MegalatentConfig`.

    Raises:
        UserError: Megatron cannot compute what the configuration says.
    """
    options: dict[str, Any] = {}
    for pair in _PAIRS + (_MOE_PAIRS if config.num_experts else ()):
        value = getattr(config, pair.field)
        options[pair.option or pair.argument] = value
    options |= {
        "group_query_attention": True,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        **_biases(config),
        **_rope(config.rope_parameters or {}),
        **_window(config),
    }
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(
            f"hidden_act={config.hidden_act!r} cannot be carried to Megatron (only 'silu'): this "
            "model does not convert"
        )
    if config.num_experts and config.num_experts_per_tok == 1:
        raise UserError(
            "num_experts_per_tok=1 cannot be carried: Megatron then weighs the expert by the"
            " softmax over all of them, and such a model by one"
        )
    if config.num_experts and config.mlp_only_layers:
        dense = set(config.mlp_only_layers)
        options["moe_layer_freq"] = [int(i not in dense) for i in range(config.num_hidden_layers)]
    return options


def model_config(config: Any) -> ModelConfig:
    """What stands under `latent.model:` in the configuration of a run that loads the model.

    Args:
        config: a `MegalatentConfig`.
    """
    settings = {name: getattr(config, name) for name in _MODEL}
    return ModelConfig(**settings | {"residual_multiplier": float(config.residual_multiplier)})


def to_args(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a converted checkpoint carries.

    Args:
        options: from `megatron_options(config)`.
    """
    renamed = {pair.option: pair.argument for pair in _PAIRS if pair.option}
    args = {renamed.get(name, name): value for name, value in options.items()}
    args["add_bias_linear"] = not args.pop("disable_bias_linear")
    if "window_size" in args:
        before, after = args["window_size"].split(",")
        args["window_size"] = (int(before), int(after))
    args.setdefault("num_experts", None)
    return args | {
        "add_position_embedding": True,
        "rotary_percent": 1.0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        MODEL_ATTRIBUTE: {name: getattr(config, name) for name in _KEPT},
    }


def _biases(config: Any) -> dict[str, Any]:
    qkv, output, mlp = config.attention_bias, config.attention_output_bias, config.mlp_bias
    if output != mlp or (output and not qkv) or (mlp and config.num_experts):
        raise UserError(
            f"attention_bias={qkv}, attention_output_bias={output}, mlp_bias={mlp} cannot be"
            " carried: Megatron has biases on query, key and value, or on all linear layers of a"
            " dense model, or on none"
        )
    return {"add_qkv_bias": qkv and not mlp, "disable_bias_linear": not mlp}


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    known = {"rope_type", "rope_theta"} | ({"factor", *_LLAMA3} if kind == "llama3" else set())
    extra = {name: value for name, value in rope.items() if name not in known}
    if extra.pop("partial_rotary_factor", 1.0) != 1.0 or extra or kind not in ("default", "llama3"):
        raise UserError(
            f"rope_parameters={dict(rope)!r} cannot be carried to Megatron (only the types default"
            " and llama3, over whole heads): this model does not convert"
        )
    theta = rope.get("rope_theta", 10000.0)
    if not isinstance(theta, (int, float)) or not float(theta).is_integer():
        raise UserError(
            f"rope_theta={theta!r} cannot be carried: Megatron's rotary_base is a whole number"
        )
    options: dict[str, Any] = {"rotary_base": int(theta)}
    if kind == "llama3":
        for name, value in _LLAMA3.items():
            if rope.get(name) != value:
                raise UserError(
                    f"rope_parameters: {name}={rope.get(name)!r} cannot be carried: Megatron"
                    f" computes llama3 scaling with {value!r}"
                )
        options |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    return options


def _window(config: Any) -> dict[str, Any]:
    slides = [int(kind == "sliding_attention") for kind in config.layer_types]
    if config.sliding_window is None or not any(slides):
        return {}
    options: dict[str, Any] = {"window_size": f"{config.sliding_window - 1},0"}
    if not all(slides):
        options["window_attn_skip_freq"] = slides
    return options
