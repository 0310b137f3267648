"""What the Hugging Face models share: initialisation, names on disk, output types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import Cache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.modeling_outputs import ModelOutput

from .configuration_megalatent import AUTO_MAP, MegalatentConfig
from .fusion_megalatent import FusedNorm, FusionLinear
from .layers_megalatent import MegalatentExperts, MegalatentRouter

__all__ = ["MegalatentCausalLMOutput", "MegalatentModelOutput", "MegalatentPreTrainedModel"]

# On disk one tensor per expert and projection, as Qwen3-MoE checkpoints have it.
register_checkpoint_conversion_mapping(
    MegalatentConfig.model_type,
    [
        WeightConverter(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ],
    overwrite=True,
)


@dataclass
class MegalatentModelOutput(ModelOutput):
    """Output of the stack.

    `last_hidden_state` is the state `[b, s, h]` of the last pass, `pass_states` those of all
    passes (if asked for). `hidden_states`, `attentions` and `router_logits` are the last pass's;
    `pass_router_logits` holds every pass's router logits of all its MoE layers.
    """

    last_hidden_state: torch.Tensor
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    pass_states: tuple[torch.Tensor, ...] | None = None
    pass_router_logits: tuple[tuple[torch.Tensor, ...], ...] | None = None


@dataclass
class MegalatentCausalLMOutput(ModelOutput):
    """`logits` are the last pass's; `loss` weighs all passes, `pass_losses` are unweighted."""

    loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    pass_losses: tuple[torch.Tensor, ...] | None = None
    pass_states: tuple[torch.Tensor, ...] | None = None


class MegalatentPreTrainedModel(PreTrainedModel):
    """Initialisation and capabilities shared by the two models."""

    config_class = MegalatentConfig
    config: MegalatentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MegalatentDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save weights, configuration and this code; any Auto class then loads the folder."""
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, FusionLinear):
            if module.starts_at_zero:
                initialization.zeros_(module.weight)
            else:
                generator = _fusion_generator(module)
                initialization.normal_(module.weight, mean=0.0, std=std, generator=generator)
        elif isinstance(module, FusedNorm):
            # Fused and plain stack inputs start at one scale.
            table = self.get_input_embeddings().weight
            scale = table.float().square().mean().sqrt().to(module.weight)
            initialization.copy_(module.weight, scale.expand_as(module.weight))
        elif isinstance(module, MegalatentExperts):
            initialization.normal_(module.gate_up_proj, mean=0.0, std=std)
            initialization.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, MegalatentRouter):
            initialization.normal_(module.weight, mean=0.0, std=std)
        else:
            super()._init_weights(module)


def _fusion_generator(module: FusionLinear) -> torch.Generator | None:
    """A generator of the fusion's own: adding a fusion leaves the backbone's draws as they are."""
    if module.weight.is_meta:
        return None
    generator = torch.Generator(module.weight.device)
    return generator.manual_seed((torch.initial_seed() + module.seed_offset) % 2**63)
