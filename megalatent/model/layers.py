"""Layer specs: Megatron's own, with single submodules replaced.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` takes. One description serves both
implementations: `_describe` adds to Megatron's layers what `latent.model:` asks for. Then, with
`transformer_impl: local`, norms that know sequence parallelism and attention that knows packing and
context parallelism take the place of Megatron's.

Checkpoint keys are the same for both implementations, and are those of Transformer Engine's layers,
where the norm before a linear layer is a part of it (`linear_qkv.layer_norm_weight`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megalatent.config_model import ModelConfig
from megalatent.model.attention import LocalAttention, ReferenceAttention
from megalatent.model.gate import GatedSelfAttention
from megalatent.model.norms import LocalNorm
from megalatent.model.residual import ResidualBranch

__all__ = ["layer_spec", "mtp_spec", "substitute", "unscale_branches"]

# The norm before a linear layer, under the name that it has as a part of that layer.
_QKV_NORM = {
    f"input_layernorm.{part}": f"self_attention.linear_qkv.layer_norm_{part}"
    for part in ("weight", "bias")
}


def layer_spec(
    config: Any, *, vp_stage: int | None = None, model: ModelConfig | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and chunk), and the final norm.

    Args:
        config: a `TransformerConfig`, or a `GPTModelConfig` that holds one.
        vp_stage: the virtual pipeline chunk, if there are several.
        model: what the layers have besides; by default nothing.

    Raises:
        ValueError: `transformer_impl` is neither transformer_engine nor local, or the layers are
            not ordinary attention layers and cannot have what `model` asks for.
    """
    config = _transformer(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=_use_te(config),
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    layers = [_describe(layer, config, model or ModelConfig()) for layer in block.layer_specs]
    block = dataclasses.replace(block, layer_specs=layers)
    return substitute(block, _replacements(config))


def mtp_spec(config: Any, *, vp_stage: int | None = None, model: ModelConfig | None = None) -> Any:
    """The multi-token prediction layers of this stage, or None if it has none.

    Megatron builds these from its own layers, whatever the decoder's spec says.
    """
    config = _transformer(config)
    if not config.mtp_num_layers:
        return None
    use_te = _use_te(config)
    layers = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    last = _describe(layers[-1], config, model or ModelConfig())
    block = get_gpt_mtp_block_spec(config, last, use_te, vp_stage=vp_stage)
    return substitute(block, _replacements(config))


def unscale_branches(config: Any, model: ModelConfig) -> None:
    """Let the last matrix of a branch start like any other, if a norm follows it.

    Megatron draws it smaller by sqrt(2 L). The norm would cancel that, but for its epsilon, which
    swallows branches as small as that.

    Args:
        config: the `TransformerConfig`, changed in place before a model is built from it.
    """
    if model.sandwich_norm:
        config.output_layer_init_method = config.init_method


def _describe(layer: ModuleSpec, config: Any, model: ModelConfig) -> ModuleSpec:
    """Megatron's layer with gate, norms after the branches and multiplier, as `model` says."""
    parts = layer.submodules
    changes: dict[str, Any] = {"sharded_state_dict_keys_map": _checkpoint_keys(parts, config)}
    if model.attention_gate:
        changes |= _gated(parts, config)
    if model.sandwich_norm or model.residual_multiplier != 1.0:
        norm = None if not model.sandwich_norm else TENorm if _use_te(config) else LocalNorm
        joined = ModuleSpec(
            module=ResidualBranch,
            params={"config": config, "norm": norm, "multiplier": model.residual_multiplier},
        )
        changes |= {"self_attn_bda": joined, "mlp_bda": joined}
    return dataclasses.replace(layer, submodules=dataclasses.replace(parts, **changes))


def _checkpoint_keys(parts: Any, config: Any) -> dict[str, str]:
    """Megatron's names for checkpoints, corrected where its two implementations differ."""
    keys = dict(parts.sharded_state_dict_keys_map)
    if not _use_te(config) and getattr(parts.mlp, "func", None) is MoELayer:
        # Transformer Engine has no linear layer behind this norm to make it a part of.
        keys.pop("pre_mlp_layernorm.", None)
    return keys


def _gated(parts: Any, config: Any) -> dict[str, Any]:
    """The submodules of a layer whose attention has a gate per head."""
    attention = parts.self_attention
    if attention.module is not SelfAttention:
        raise ValueError(
            "latent.model.attention_gate: true needs ordinary attention, and these layers have "
            f"{attention.module.__name__}: leave one of them out"
        )
    changes: dict[str, Any] = {}
    if _use_te(config):
        # The gate reads the normed input too, which Transformer Engine's fused norm keeps inside.
        inner = dataclasses.replace(attention.submodules, linear_qkv=TEColumnParallelLinear)
        attention = dataclasses.replace(attention, submodules=inner)
        keys = {**_checkpoint_keys(parts, config), **_QKV_NORM}
        changes = {"input_layernorm": TENorm, "sharded_state_dict_keys_map": keys}
    return {**changes, "self_attention": dataclasses.replace(attention, module=GatedSelfAttention)}


def substitute(spec: Any, replacements: Mapping[type, type]) -> Any:
    """A copy of a spec in which each class that is a key of `replacements` is replaced.

    Specs are nested `ModuleSpec`s, dataclasses of submodules, `partial`s and lists.
    """
    if isinstance(spec, list):
        return [substitute(x, replacements) for x in spec]
    if isinstance(spec, functools.partial):
        keywords = {k: substitute(v, replacements) for k, v in spec.keywords.items()}
        return functools.partial(spec.func, *spec.args, **keywords)
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(
            spec,
            module=substitute(spec.module, replacements),
            submodules=substitute(spec.submodules, replacements),
        )
    if isinstance(spec, type):
        return replacements.get(spec, spec)
    if dataclasses.is_dataclass(spec):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        changed = {name: substitute(value, replacements) for name, value in fields.items()}
        return dataclasses.replace(cast(Any, spec), **changed)
    return spec


def _transformer(config: Any) -> Any:
    return getattr(config, "transformer", config)


def _use_te(config: Any) -> bool:
    if config.transformer_impl not in ("transformer_engine", "local"):
        raise ValueError(
            f"transformer_impl: {config.transformer_impl} cannot be trained; "
            "use transformer_engine (GPU) or local"
        )
    return bool(config.transformer_impl == "transformer_engine")


def _replacements(config: Any) -> dict[type, type]:
    """Nothing with Transformer Engine, whose norms and attention know SP, CP and packing."""
    if _use_te(config):
        return {}
    attention = ReferenceAttention if config.context_parallel_size > 1 else LocalAttention
    return {WrappedTorchNorm: LocalNorm, DotProductAttention: attention}
