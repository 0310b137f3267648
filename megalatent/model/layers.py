"""Layer specs: Megatron's own, with single submodules replaced.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` takes. With `transformer_impl:
transformer_engine` the layers are Megatron's; with `local` they get norms that know sequence
parallelism and attention that knows packing and context parallelism.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megalatent.model.attention import LocalAttention, ReferenceAttention
from megalatent.model.norms import LocalNorm

__all__ = ["layer_spec", "mtp_spec", "substitute"]


def layer_spec(config: Any, *, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and chunk), and the final norm.

    Args:
        config: a `TransformerConfig`, or a `GPTModelConfig` that holds one.
        vp_stage: the virtual pipeline chunk, if there are several.

    Raises:
        ValueError: `transformer_impl` is neither transformer_engine nor local.
    """
    config = _transformer(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=_use_te(config),
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return substitute(block, _replacements(config))


def mtp_spec(config: Any, *, vp_stage: int | None = None) -> Any:
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
    block = get_gpt_mtp_block_spec(config, layers[-1], use_te, vp_stage=vp_stage)
    return substitute(block, _replacements(config))


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
